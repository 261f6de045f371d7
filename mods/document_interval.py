"""Packed documents, as one interval of keys per query: a row costs two comparisons and no load per key."""

from __future__ import annotations

import torch
from torch import Tensor

from flexbwd.errors import ShapeError

from .signatures import MaskMod


def document_interval(offsets: Tensor) -> MaskMod:
    """keep start_i ≤ j < end_i, the document of token i.

    Args:
        offsets: integer `[documents + 1]`, ascending from 0: document n is the tokens offsets[n] … offsets[n+1] − 1.
    Source: cu_seqlens of FlashAttention (Dao et al. 2022, arXiv:2205.14135), variable-length interface.
    """
    start, end = document_bounds(offsets)

    def document_interval_mask(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return (kv_idx >= start[q_idx]) & (kv_idx < end[q_idx])

    return document_interval_mask


def document_interval_causal(offsets: Tensor) -> MaskMod:
    """keep start_i ≤ j ≤ i.

    Args:
        offsets: as for `document_interval`.
    Source: cu_seqlens of FlashAttention (Dao et al. 2022, arXiv:2205.14135), variable-length causal attention.
    """
    start, _ = document_bounds(offsets)

    def document_interval_causal_mask(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return (kv_idx >= start[q_idx]) & (kv_idx <= q_idx)

    return document_interval_causal_mask


def document_ids(offsets: Tensor) -> Tensor:
    """The document number of every token, int32 `[offsets[-1]]`."""
    if offsets.ndim != 1 or offsets.numel() < 2:
        raise ShapeError(f"offsets has shape {tuple(offsets.shape)}, but must be [documents + 1], ascending from 0")
    lengths = (offsets[1:] - offsets[:-1]).long()
    return torch.arange(lengths.numel(), dtype=torch.int32, device=offsets.device).repeat_interleave(lengths)


def document_bounds(offsets: Tensor) -> tuple[Tensor, Tensor]:
    """First token, and one past the last, of every token's document: two int32 `[offsets[-1]]`."""
    ids = document_ids(offsets).long()
    edges = offsets.to(torch.int32)
    return edges[ids], edges[ids + 1]
