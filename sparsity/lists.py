"""Small operations on block lists that every part of `sparsity` shares. All O(blocks); none reads past a count."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .tensors import BlockBits, BlockLists, BlockSparseTensors
from .transpose import transpose, transpose_slots

EMPTY, PARTIAL, FULL = 0, 1, 2  # block classes of `class_grid`


def ceil_div(length: int, block: int) -> int:
    """Blocks of `block` that cover `length` positions."""
    return -(-length // block)


def listed(count: Tensor, index: Tensor) -> Tensor:
    """Which entries of `index [..., rows, width]` lie within `count [..., rows]`: bool, like `index`."""
    return torch.arange(index.shape[-1], device=index.device) < count[..., None]


def scatter_rows(count: Tensor, index: Tensor, values: Tensor | int, columns: int, fill: int) -> Tensor:
    """`out[..., row, index[..., row, p]] = values[..., row, p]` for listed p, else `fill`: int32 `[..., columns]`."""
    target = torch.where(listed(count, index), index, columns).long()  # entries past the count land in a spare column
    out = torch.full((*index.shape[:-1], columns + 1), fill, dtype=torch.int32, device=index.device)
    out.scatter_(-1, target, values)  # type: ignore[arg-type]
    return out[..., :columns]


def map_lists(lists: BlockSparseTensors, change: Callable[[Tensor], Tensor]) -> BlockSparseTensors:
    """`change` of every tensor that is there."""
    return BlockSparseTensors(*(t if t is None else change(t) for t in lists))  # type: ignore[arg-type]


def class_grid(lists: BlockSparseTensors, columns: int) -> Tensor:
    """Class of every block, `EMPTY`, `PARTIAL` or `FULL`: int32 `[B, H, rows, columns]`."""
    grid = scatter_rows(lists.mask_block_cnt, lists.mask_block_idx, PARTIAL, columns, EMPTY)
    if lists.full_block_cnt is None or lists.full_block_idx is None:
        return grid
    return grid.maximum(scatter_rows(lists.full_block_cnt, lists.full_block_idx, FULL, columns, EMPTY))


def both_directions(q_to_kv: BlockSparseTensors, kv_blocks: int, bits: BlockBits | None = None) -> BlockLists:
    """The lists with their transpose; `bits.kv_to_q_slot` is made anew."""
    kv_to_q = transpose(q_to_kv, kv_blocks)
    if bits is not None:
        slots = transpose_slots(q_to_kv, bits.q_to_kv_slot, kv_blocks)
        bits = BlockBits(bits.words, bits.q_to_kv_slot, slots)
    return BlockLists(q_to_kv, kv_to_q, bits)


def select(lists: BlockLists, pick: tuple[Tensor, Tensor, Tensor], kv_blocks: int) -> BlockLists:
    """The lists of chosen batches, heads and q blocks (int64 positions, one vector each)."""

    def take(t: Tensor) -> Tensor:
        for dim, positions in enumerate(pick):
            t = t.index_select(dim, positions)
        return t

    taken = map_lists(lists.q_to_kv, take)
    bits = lists.bits and BlockBits(lists.bits.words, take(lists.bits.q_to_kv_slot), lists.bits.kv_to_q_slot)
    return both_directions(taken, kv_blocks, bits)


def crop(lists: BlockLists, q_blocks: int, kv_blocks: int) -> BlockLists:
    """The lists of the upper left `q_blocks` x `kv_blocks` blocks."""
    q_to_kv, slots = _crop(lists.q_to_kv, lists.bits and lists.bits.q_to_kv_slot, q_blocks, kv_blocks)
    bits = None if slots is None or lists.bits is None else BlockBits(lists.bits.words, slots, slots)
    return both_directions(q_to_kv, kv_blocks, bits)


def _crop(
    lists: BlockSparseTensors, slots: Tensor | None, rows: int, columns: int
) -> tuple[BlockSparseTensors, Tensor | None]:
    count, index, slots = _crop_one(lists.mask_block_cnt, lists.mask_block_idx, slots, rows, columns)
    if lists.full_block_cnt is None or lists.full_block_idx is None:
        return BlockSparseTensors(count, index), slots
    full_count, full_index, _ = _crop_one(lists.full_block_cnt, lists.full_block_idx, None, rows, columns)
    return BlockSparseTensors(count, index, full_count, full_index), slots


def _crop_one(
    count: Tensor, index: Tensor, slots: Tensor | None, rows: int, columns: int
) -> tuple[Tensor, Tensor, Tensor | None]:
    count, index = count[:, :, :rows], index[:, :, :rows]
    keep = listed(count, index) & (index < columns)
    order = torch.argsort((~keep).to(torch.int8), dim=-1, stable=True)
    count = keep.sum(-1, dtype=torch.int32)
    width = max(1, int(count.max())) if count.numel() else 1
    order = order[..., :width]
    if slots is not None:
        slots = slots[:, :, :rows].gather(-1, order)
    return count, index.gather(-1, order), slots


def widen(index: Tensor, count: Tensor, width: int) -> Tensor:
    """`index` with exactly `width` entries a row, 0 past the counts."""
    index = index.masked_fill(~listed(count, index), 0)[..., :width]
    return torch.nn.functional.pad(index, (0, width - index.shape[-1]))
