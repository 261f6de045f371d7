"""Sliding window that keeps the first tokens."""

from __future__ import annotations

from torch import Tensor

from .signatures import MaskMod


def attention_sink(sinks: int, window: int) -> MaskMod:
    """keep j ≤ i and (j < sinks or i − j ≤ window).

    Source: StreamingLLM (Xiao et al. 2023, arXiv:2309.17453).
    """

    def attention_sink_mask(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return (kv_idx <= q_idx) & ((kv_idx < sinks) | (q_idx - kv_idx <= window))

    return attention_sink_mask
