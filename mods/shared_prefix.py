"""Packed answers that share a prompt: the prompt is stored once."""

from __future__ import annotations

import torch
from torch import Tensor

from flexbwd.errors import ShapeError

from .document_interval import document_bounds, document_ids
from .signatures import MaskMod


def shared_prefix(offsets: Tensor, prefix_of: Tensor) -> MaskMod:
    """keep start_i ≤ j ≤ i or prefix_start_i ≤ j < prefix_end_i.

    Causal within a document, and the whole of the document it continues.

    Args:
        offsets: integer `[documents + 1]`, as for `document_interval`.
        prefix_of: integer `[documents]`: the document that each one continues; itself for none.
    Source: Hydragen (Juravsky et al. 2024, arXiv:2402.05099), shared prefixes.
    """
    if prefix_of.ndim != 1 or prefix_of.numel() != offsets.numel() - 1:
        raise ShapeError(f"prefix_of has shape {tuple(prefix_of.shape)}, but needs one entry for each of the "
                         f"{offsets.numel() - 1} documents in offsets")  # fmt: skip
    start, _ = document_bounds(offsets)
    owner = prefix_of.long()[document_ids(offsets).long()]
    edges = offsets.to(torch.int32)
    prefix_start, prefix_end = edges[owner], edges[owner + 1]
    prefix_end = torch.where(owner == document_ids(offsets), prefix_start, prefix_end)  # no prefix: nothing to add

    def shared_prefix_mask(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        own = (kv_idx >= start[q_idx]) & (kv_idx <= q_idx)
        return own | ((kv_idx >= prefix_start[q_idx]) & (kv_idx < prefix_end[q_idx]))

    return shared_prefix_mask
