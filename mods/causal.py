"""Causal masks: no query sees the future."""

from __future__ import annotations

from torch import Tensor

from .signatures import MaskMod


def causal(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    """keep j ≤ i.

    A mask_mod itself, not a factory. Query 0 and key 0 are aligned, whatever the two lengths.
    Source: Attention Is All You Need (Vaswani et al. 2017, arXiv:1706.03762), §3.2.3.
    """
    return kv_idx <= q_idx


def causal_offset(offset: int) -> MaskMod:
    """keep j ≤ i + offset.

    `offset = Skv − Sq` aligns the last query with the last key: decoding, or a chunk of queries after cached keys.
    Source: flash-attn 2.1 (Dao 2023), causal masks aligned to the bottom right corner.
    """

    def causal_offset_mask(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return kv_idx <= q_idx + offset

    return causal_offset_mask
