"""Window to both sides."""

from __future__ import annotations

from torch import Tensor

from flexbwd.errors import ConfigError

from .signatures import MaskMod


def symmetric_window(radius: int) -> MaskMod:
    """keep |i − j| ≤ radius.

    Source: Longformer (Beltagy et al. 2020, arXiv:2004.05150), §3.1, window 2·radius + 1.
    """
    if radius < 0:
        raise ConfigError(f"{radius=} must be at least 0: it counts the keys on each side of the query's own")

    def symmetric_window_mask(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return (q_idx - kv_idx <= radius) & (kv_idx - q_idx <= radius)

    return symmetric_window_mask
