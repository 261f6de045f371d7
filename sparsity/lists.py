"""Small operations on block lists that every part of `sparsity` shares. All O(blocks); none reads past a count.

Lists that are the same for all batches or heads are often expanded (stride 0); that is kept, and worked on once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

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


def class_grid(lists: BlockSparseTensors, columns: int) -> Tensor:
    """Class of every block, `EMPTY`, `PARTIAL` or `FULL`: int32 `[B, H, rows, columns]`."""
    one, restore = once(lists)
    grid = scatter_rows(one.mask_block_cnt, one.mask_block_idx, PARTIAL, columns, EMPTY)
    if one.full_block_cnt is not None and one.full_block_idx is not None:
        grid = grid.maximum(scatter_rows(one.full_block_cnt, one.full_block_idx, FULL, columns, EMPTY))
    return restore(grid)


# -- what is shared by expanding --------------------------------------------------------------------------------------
def map_lists(lists: BlockSparseTensors, change: Callable[[Tensor], Tensor]) -> BlockSparseTensors:
    """`change` of every tensor that is there."""
    return BlockSparseTensors(*(t if t is None else change(t) for t in lists))  # type: ignore[arg-type]


def once(lists: BlockSparseTensors) -> tuple[BlockSparseTensors, Callable[[Tensor], Tensor]]:
    """The lists without their expanded batch and head dimensions, and what expands such a tensor again."""
    batch, heads = lists.mask_block_cnt.shape[:2]
    dims = _expanded_dims(t for t in lists if t is not None)

    def restore(t: Tensor) -> Tensor:
        return t.expand(batch if 0 in dims else -1, heads if 1 in dims else -1, *(-1,) * (t.dim() - 2))

    return map_lists(lists, lambda t: _first_of(t, dims)), restore


def narrowed(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors without the batch and head dimensions that are expanded in all of them."""
    dims = _expanded_dims(tensors)
    return tuple(_first_of(t, dims) for t in tensors)


def _expanded_dims(tensors: Iterable[Tensor]) -> set[int]:
    dims = {0, 1}
    for t in tensors:
        dims &= {d for d in dims if t.shape[d] > 1 and t.stride(d) == 0}
    return dims


def _first_of(t: Tensor, dims: Iterable[int]) -> Tensor:
    for d in dims:
        t = t.narrow(d, 0, 1)
    return t


# -- whole masks ------------------------------------------------------------------------------------------------------
def both_directions(q_to_kv: BlockSparseTensors, kv_blocks: int, bits: BlockBits | None = None) -> BlockLists:
    """The lists with their transpose; `bits.kv_to_q_slot` is made anew."""
    one, restore = once(q_to_kv)
    kv_to_q = map_lists(transpose(one, kv_blocks), restore)
    if bits is not None:
        slots = _like(bits.q_to_kv_slot, one.mask_block_idx)
        bits = BlockBits(bits.words, bits.q_to_kv_slot, restore(transpose_slots(one, slots, kv_blocks)))
    return BlockLists(q_to_kv, kv_to_q, bits)


def _like(t: Tensor, narrowed: Tensor) -> Tensor:
    """`t` with the leading dimensions of `narrowed`."""
    return t[: narrowed.shape[0], : narrowed.shape[1]]


def select(lists: BlockLists, pick: tuple[Tensor, Tensor, Tensor], kv_blocks: int) -> BlockLists:
    """The lists of chosen batches, heads and q blocks (int64 positions, one vector each)."""

    def take(t: Tensor) -> Tensor:
        for dim, positions in enumerate(pick):
            if dim < 2 and t.stride(dim) == 0 and t.shape[dim] > 1 and len(positions):
                size = [-1] * t.dim()
                size[dim] = len(positions)
                t = t.narrow(dim, 0, 1).expand(size)
            else:
                t = _take(t, dim, positions)
        return t

    bits = lists.bits and BlockBits(lists.bits.words, take(lists.bits.q_to_kv_slot), lists.bits.kv_to_q_slot)
    return both_directions(map_lists(lists.q_to_kv, take), kv_blocks, bits)


def _take(t: Tensor, dim: int, positions: Tensor) -> Tensor:
    """`index_select` that leaves expanded batch and head dimensions expanded."""
    dims = _expanded_dims([t])
    return _first_of(t, dims).index_select(dim, positions).expand([*t.shape[:dim], -1, *t.shape[dim + 1 :]])


def crop(lists: BlockLists, q_blocks: int, kv_blocks: int) -> BlockLists:
    """The lists of the upper left `q_blocks` x `kv_blocks` blocks."""
    one, restore = once(lists.q_to_kv)
    slots = None if lists.bits is None else _like(lists.bits.q_to_kv_slot, one.mask_block_idx)
    count, index, slots = _crop(one.mask_block_cnt, one.mask_block_idx, slots, (q_blocks, kv_blocks))
    full: tuple[Tensor, ...] = ()
    if one.full_block_cnt is not None and one.full_block_idx is not None:
        full = _crop(one.full_block_cnt, one.full_block_idx, None, (q_blocks, kv_blocks))[:2]
    bits = None
    if lists.bits is not None and slots is not None:
        bits = BlockBits(lists.bits.words, restore(slots), restore(slots))
    return both_directions(map_lists(BlockSparseTensors(count, index, *full), restore), kv_blocks, bits)


def _crop(
    count: Tensor, index: Tensor, slots: Tensor | None, blocks: tuple[int, int]
) -> tuple[Tensor, Tensor, Tensor | None]:
    rows, columns = blocks
    count, index = count[:, :, :rows], index[:, :, :rows]
    keep = listed(count, index) & (index < columns)
    order = torch.argsort((~keep).to(torch.int8), dim=-1, stable=True)
    count = keep.sum(-1, dtype=torch.int32)
    order = order[..., : max(1, int(count.max())) if count.numel() else 1]
    if slots is not None:
        slots = slots[:, :, :rows].gather(-1, order)
    return count, index.gather(-1, order), slots


def widen(index: Tensor, count: Tensor, width: int) -> Tensor:
    """`index` with exactly `width` entries a row, 0 past the counts."""
    index = index.masked_fill(~listed(count, index), 0)[..., :width]
    return torch.nn.functional.pad(index, (0, width - index.shape[-1]))
