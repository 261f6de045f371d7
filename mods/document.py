"""Packed documents, by document id: any ids, also of documents that are not contiguous."""

from __future__ import annotations

from torch import Tensor

from flexbwd.errors import ShapeError

from .signatures import MaskMod


def document(ids: Tensor) -> MaskMod:
    """keep id_i = id_j.

    Args:
        ids: integer `[S]` for every batch entry alike, or `[B, S]`; S ≥ both lengths.
    Source: sequence packing without cross-contamination (Krell et al. 2021, arXiv:2107.02027).
    """
    _check_ids(ids)
    if ids.ndim == 2:

        def document_batch_mask(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            return ids[b, q_idx] == ids[b, kv_idx]

        return document_batch_mask

    def document_mask(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return ids[q_idx] == ids[kv_idx]

    return document_mask


def document_causal(ids: Tensor) -> MaskMod:
    """keep id_i = id_j and j ≤ i.

    Args:
        ids: integer `[S]` or `[B, S]`, as for `document`.
    Source: Llama 3 (Grattafiori et al. 2024, arXiv:2407.21783), §3.2, the pre-training mask.
    """
    _check_ids(ids)
    if ids.ndim == 2:

        def document_causal_batch_mask(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            return (ids[b, q_idx] == ids[b, kv_idx]) & (kv_idx <= q_idx)

        return document_causal_batch_mask

    def document_causal_mask(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return (ids[q_idx] == ids[kv_idx]) & (kv_idx <= q_idx)

    return document_causal_mask


def _check_ids(ids: Tensor) -> None:
    if ids.ndim not in (1, 2):
        raise ShapeError(f"ids has shape {tuple(ids.shape)}, but must be [S] or [B, S]: one document id per token")
