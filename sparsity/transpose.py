"""The other direction of a block mask's lists: kv blocks by q block -> q blocks by kv block, and back."""

from __future__ import annotations

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
    cnt, idx = counts.detach().cpu().numpy(), index.detach().cpu().numpy()
    *lead, rows, width = idx.shape
    if cnt.size and (cnt.min() < 0 or cnt.max() > width):
        raise MaskError(
            f"{name} has room for {width} entries a row but a count is {int(cnt.max())} (smallest {int(cnt.min())}): "
            "counts must lie in [0, width]; pad the index list to the largest count"
        )
    listed = np.arange(width, dtype=np.int32) < cnt[..., None]
    column = idx[listed]
    _check_inside(column, n_other, name)
    row = np.repeat(np.tile(np.arange(rows, dtype=np.int32), max(1, cnt.size // max(rows, 1))), cnt.ravel())
    batches = int(np.prod(lead, dtype=np.int64))
    batch = np.repeat(np.arange(batches), cnt.reshape(batches, -1).sum(1))
    order = _order(batch, row, column, batches)
    new_cnt = np.bincount(batch * n_other + column, minlength=batches * n_other).reshape(*lead, n_other)
    new_cnt = new_cnt.astype(np.int32)
    new_slots = None
    if slots is not None:
        values = slots.detach().cpu().numpy()[listed][order]
        new_slots = torch.from_numpy(pad_lists(new_cnt, values)).to(index.device)
    new_idx = torch.from_numpy(pad_lists(new_cnt, row[order])).to(index.device)
    return torch.from_numpy(new_cnt).to(index.device), new_idx, new_slots


def _check_inside(column: Array, n_other: int, name: str) -> None:
    if column.size and (column.min() < 0 or column.max() >= n_other):
        bad = int(column.min()) if column.min() < 0 else int(column.max())
        raise MaskError(
            f"{name} lists block {bad}, but there are only {n_other} blocks in that dimension: every listed index must "
            f"lie in [0, {n_other}); check BLOCK_SIZE and seq_lengths"
        )


def _order(batch: Array, row: Array, column: Array, batches: int) -> Array:
    """Positions sorted by (batch, column, row); entries come sorted by (batch, row)."""
    order = _stable_argsort(column)
    if batches > 1:
        order = order[_stable_argsort(batch[order])]
    return order


def _stable_argsort(keys: Array) -> Array:
    """Linear time while the keys fit 16 bits (numpy sorts those by radix)."""
    narrow = keys.astype(np.uint16) if keys.size and keys.max() < 2**16 else keys
    return np.argsort(narrow, kind="stable")
