"""The other direction of a block mask's lists: kv blocks by q block -> q blocks by kv block, and back."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from flexbwd.errors import MaskError

from .tensors import BlockSparseTensors

Array = np.ndarray


def transpose(lists: BlockSparseTensors, n_other: int) -> BlockSparseTensors:
    """The same blocks, listed by the other dimension, ascending.

    Args:
        lists: one direction, in any order; entries past the counts are never read.
        n_other: number of blocks of the dimension that the entries index.
    Returns:
        Lists with `n_other` rows, padded to the longest one (at least 1), on the device of `lists`.
    Raises:
        MaskError: a listed index lies outside `[0, n_other)`, or a count exceeds its list's width.
    """
    mask_cnt, mask_idx, _ = _transpose(lists.mask_block_cnt, lists.mask_block_idx, None, n_other, "mask_block_idx")
    if lists.full_block_cnt is None or lists.full_block_idx is None:
        return BlockSparseTensors(mask_cnt, mask_idx)
    full_cnt, full_idx, _ = _transpose(lists.full_block_cnt, lists.full_block_idx, None, n_other, "full_block_idx")
    return BlockSparseTensors(mask_cnt, mask_idx, full_cnt, full_idx)


def transpose_slots(lists: BlockSparseTensors, slots: Tensor, n_other: int) -> Tensor:
    """`slots`, parallel to `lists.mask_block_idx`, rearranged to run parallel to the transposed lists' one."""
    found = _transpose(lists.mask_block_cnt, lists.mask_block_idx, slots, n_other, "mask_block_idx")[2]
    assert found is not None
    return found


def pad_lists(counts: Array, entries: Array, out: Array | None = None) -> Array:
    """Concatenated lists as one padded array: int32 `[..., rows, max(1, longest)]`, zero past the counts.

    Args:
        counts: `[..., rows]` length of each list.  entries: all lists one after another.
        out: zeros of any width that holds the longest list, written in place.
    """
    if out is None:
        out = np.zeros((*counts.shape, max(1, int(counts.max(initial=0)))), dtype=np.int32)
    out[np.arange(out.shape[-1], dtype=np.int32) < counts[..., None]] = entries
    return out


def _transpose(
    counts: Tensor, index: Tensor, slots: Tensor | None, n_other: int, name: str
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Counts, rows by column, and `slots` in the new order."""
    lead = counts.shape[:-1]
    cnt, idx, extra = _host([counts, index, slots])
    rows, width = idx.shape[-2:]
    if cnt.size and (cnt.min() < 0 or cnt.max() > width):
        raise MaskError(
            f"{name} has room for {width} entries a row but a count is {int(cnt.max())} (smallest {int(cnt.min())}): "
            "counts must lie in [0, width]; pad the index list to the largest count"
        )
    listed = np.arange(width, dtype=np.int32) < cnt[..., None]
    column = idx[listed]
    _check_inside(column, n_other, name)
    batches = int(np.prod(cnt.shape[:-1], dtype=np.int64))
    order = _stable_argsort(column)
    new_cnt = np.empty((batches, n_other), dtype=np.int32)
    totals = cnt.reshape(batches, cnt.shape[-1]).sum(1)
    for batch, part in zip(range(batches), np.split(column, np.cumsum(totals)[:-1]), strict=False):  # none of no batch
        new_cnt[batch] = np.bincount(part, minlength=n_other)
    if batches > 1:
        batch_of = np.repeat(np.arange(batches, dtype=np.int32), totals)
        order = order[_stable_argsort(batch_of[order])]
    new_cnt = new_cnt.reshape(*cnt.shape[:-1], n_other)
    row = np.repeat(np.tile(np.arange(rows, dtype=np.int32), batches), cnt.ravel())

    def rearranged(entries: Array) -> Tensor:
        return _give(pad_lists(new_cnt, entries[order]), index.device, lead)

    new_slots = None if extra is None else rearranged(extra[listed])
    return _give(new_cnt, index.device, lead), rearranged(row), new_slots


def _host(tensors: Sequence[Tensor | None]) -> list[Array]:
    """numpy views or copies; leading dimensions along which all are expanded (stride 0) are cut to size 1."""
    given = [t.detach() for t in tensors if t is not None]
    for dim in range(given[0].ndim - 1):
        if given[0].shape[dim] > 1 and all(t.stride(dim) == 0 for t in given):
            given = [t.narrow(dim, 0, 1) for t in given]
    arrays = iter([t.cpu().numpy() for t in given])
    return [None if t is None else next(arrays) for t in tensors]  # type: ignore[misc]


def _give(x: Array, device: torch.device, lead: Sequence[int]) -> Tensor:
    return torch.from_numpy(x).to(device).expand(*lead, *x.shape[len(lead) :])


def _check_inside(column: Array, n_other: int, name: str) -> None:
    if column.size and (column.min() < 0 or column.max() >= n_other):
        bad = int(column.min()) if column.min() < 0 else int(column.max())
        raise MaskError(
            f"{name} lists block {bad}, but there are only {n_other} blocks in that dimension: every listed index must "
            f"lie in [0, {n_other}); check BLOCK_SIZE and seq_lengths"
        )


def _stable_argsort(keys: Array) -> Array:
    """Linear time while the keys fit 16 bits (numpy sorts those by radix)."""
    narrow = keys.astype(np.uint16) if keys.size and keys.max() < 2**16 else keys
    return np.argsort(narrow, kind="stable")
