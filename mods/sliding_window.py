"""Causal sliding window."""

from __future__ import annotations

from torch import Tensor

from flexbwd.errors import ConfigError

from .signatures import MaskMod


def sliding_window(window: int) -> MaskMod:
    """keep 0 ≤ i − j ≤ window.

    The query's own key and the `window` keys before it.
    Source: Mistral 7B (Jiang et al. 2023, arXiv:2310.06825), §2.
    """
    if window < 0:
        raise ConfigError(f"{window=} must be at least 0: it counts the keys before the query's own")

    def sliding_window_mask(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return (kv_idx <= q_idx) & (q_idx - kv_idx <= window)

    return sliding_window_mask
