"""Parts of a block mask: chosen batches, heads and q blocks, with a mask_mod that still means the same elements.

torch drops the mask_mod of a sliced mask. Here it is wrapped: coordinates of the slice are translated to those of the
original before it is asked.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flexbwd.errors import MaskError

from .combine import MaskMod, mask_name
from .convert import Parts
from .grid import check_sizes
from .lists import ceil_div, crop, select
from .tensors import BlockLists, IndexBase

if TYPE_CHECKING:
    from .block_mask import BlockMask

_NAMES = ("batch", "head", "q_block")


class TranslatedMask:
    """`mask_mod` asked at translated coordinates.

    Args:
        batch, head: None (as they are), ("add", n), ("is", n), or an int32 table of positions.
        q_idx: ("add", n), or an int32 table by q block of what is added.  q_block: that granule.
    """

    def __init__(self, mask_mod: MaskMod, batch: Any, head: Any, q_idx: Any, q_block: int) -> None:
        self.mask_mod = mask_mod
        self.batch = batch
        self.head = head
        self.q_idx = q_idx
        self.q_block = q_block

    @property
    def __name__(self) -> str:
        return f"{mask_name(self.mask_mod)}[sliced]"

    def __repr__(self) -> str:
        return self.__name__

    def __call__(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        if isinstance(self.q_idx, Tensor):
            q_idx = q_idx + self.q_idx[q_idx // self.q_block]
        elif self.q_idx is not None:
            q_idx = q_idx + self.q_idx[1]
        return self.mask_mod(_translate(b, self.batch), _translate(h, self.head), q_idx, kv_idx)


def _translate(x: Tensor, how: Any) -> Tensor:
    if how is None:
        return x
    if isinstance(how, Tensor):
        return how[x]
    return x + how[1] if how[0] == "add" else x * 0 + how[1]


def sliced_parts(mask: BlockMask, index: Any) -> Parts:
    """See `BlockMask.__getitem__`."""
    if mask.index_base is not None:
        raise MaskError(
            "this mask was built with an index_base, whose block offsets a slice would not follow; build the part you "
            "want with create_block_mask(..., index_base=...) of its own"
        )
    index = index if isinstance(index, tuple) else (index,)
    if len(index) > 3:
        raise MaskError(
            f"index has {len(index)} entries; a block mask takes at most three: mask[batch, head, q_block]. Keys are "
            "cut with mask.adjust(q_len, kv_len)"
        )
    sizes = mask.q_to_kv.mask_block_cnt.shape
    index = (*index, *(slice(None),) * (3 - len(index)))
    picks = [_positions(name, i, size) for name, i, size in zip(_NAMES, index, sizes, strict=True)]
    q_len = _picked_length(picks[2], mask.seq_lengths[0], mask.block_size[0], sizes[2])
    device = mask.device
    vectors = [torch.tensor(p, dtype=torch.int64, device=device) for p in picks]
    lists = select(mask.lists, (vectors[0], vectors[1], vectors[2]), mask.kv_blocks)
    mod = _sliced_mod(mask, picks) if mask.mask_mod is not None else None
    return Parts(lists, mask.block_size, (q_len, mask.seq_lengths[1]), mod, mask.bound)


def _positions(name: str, index: Any, size: int) -> list[int]:
    """The chosen positions along one dimension, in [0, size)."""
    if isinstance(index, slice):
        return list(range(size))[index]
    if isinstance(index, Tensor):
        if index.dtype == torch.bool and index.shape == (size,):
            index = index.nonzero()[:, 0]
        if index.dim() > 1 or index.is_floating_point() or index.dtype == torch.bool:
            raise MaskError(
                f"{name} index is {index.dtype} {list(index.shape)}; it must be a vector of integers or of {size} bools"
            )
        index = index.tolist()
    positions = list(index) if isinstance(index, (list, tuple, range)) else [index]
    for p in positions:
        if isinstance(p, bool) or not hasattr(p, "__index__"):
            raise MaskError(f"{name} index {index!r} must be an integer, a slice, or a vector of integers")
        if not -size <= p < size:
            shared = "; the mask is the same for all of them: leave that dimension out with `:`" if size == 1 else ""
            raise MaskError(f"{name} index {p} is outside [-{size}, {size}){shared}")
    return [int(p) % size for p in positions]


def _picked_length(picked: list[int], q_len: int, q_block: int, rows: int) -> int:
    """Query rows of the chosen q blocks; only the last may be ragged."""
    ragged = q_len - (rows - 1) * q_block if rows else 0
    if ragged != q_block and rows - 1 in picked[:-1]:
        raise MaskError(
            f"q_block index puts block {rows - 1}, which has only {ragged} of {q_block} rows, before others; a ragged "
            "block can only come last"
        )
    tail = ragged if picked and picked[-1] == rows - 1 else q_block
    return (len(picked) - 1) * q_block + tail if picked else 0


def _sliced_mod(mask: BlockMask, picks: list[list[int]]) -> MaskMod:
    assert mask.mask_mod is not None
    sizes, device = mask.q_to_kv.mask_block_cnt.shape, mask.device
    batch = _lead_translation(picks[0], sizes[0], device)
    head = _lead_translation(picks[1], sizes[1], device)
    q_idx: Any = None
    if picks[2] != list(range(len(picks[2]))):
        start = picks[2][0]
        if picks[2] == list(range(start, start + len(picks[2]))):
            q_idx = ("add", start * mask.block_size[0])
        else:
            jumps = [(p - at) * mask.block_size[0] for at, p in enumerate(picks[2])]
            q_idx = torch.tensor(jumps, dtype=torch.int32, device=device)
    if batch is None and head is None and q_idx is None:
        return mask.mask_mod
    return TranslatedMask(mask.mask_mod, batch, head, q_idx, mask.block_size[0])


def _lead_translation(picked: list[int], size: int, device: torch.device) -> Any:
    """One chosen entry of several is pinned: the slice then serves any batch or head count, as its lists do."""
    if picked == list(range(size)):
        return None
    if len(picked) == 1:
        return ("is", picked[0])
    if picked == list(range(len(picked))):
        return None
    if picked and picked == list(range(picked[0], picked[0] + len(picked))):
        return ("add", picked[0])
    return torch.tensor(picked, dtype=torch.int32, device=device)


class BasedMask:
    """`mask_mod` asked at the global coordinates that an `IndexBase` gives to local ones."""

    def __init__(self, mask_mod: MaskMod, base: IndexBase, block_size: tuple[int, int]) -> None:
        self.mask_mod = mask_mod
        self.b_off, self.h_off = base.b_off, base.h_off
        self.q_base, self.kv_base = base.q_base, base.kv_base
        self.q_block, self.kv_block = block_size

    @property
    def __name__(self) -> str:
        return f"{mask_name(self.mask_mod)}[based]"

    def __call__(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        if self.q_base is not None:
            q_idx = q_idx + self.q_base[q_idx // self.q_block]
        if self.kv_base is not None:
            kv_idx = kv_idx + self.kv_base[kv_idx // self.kv_block]
        return self.mask_mod(b + self.b_off, h + self.h_off, q_idx, kv_idx)


def adjusted(mask: BlockMask, q_len: int, kv_len: int) -> BlockMask:
    """See `BlockMask.adjust`."""
    from .block_mask import BlockMask
    from .create import create_block_mask

    check_sizes(None, None, q_len, kv_len)
    if (q_len, kv_len) == mask.seq_lengths:
        return mask
    size = mask.block_size
    if q_len <= mask.seq_lengths[0] and kv_len <= mask.seq_lengths[1]:
        lists = crop(mask.lists, ceil_div(q_len, size[0]), ceil_div(kv_len, size[1]))
        base = _cropped_base(mask.index_base, lists)
        return BlockMask(
            lists, size, (q_len, kv_len), mask.mask_mod, index_base=base, built=mask.built, bound=mask.bound
        )
    if not mask.built or mask.mask_mod is None or mask.index_base is not None:
        why = "it has an index_base" if mask.index_base is not None else "its lists did not come from a mask_mod"
        raise MaskError(
            f"adjust({q_len}, {kv_len}) of a mask of lengths {mask.seq_lengths}: nothing is known beyond those, "
            f"because {why}; build a mask of the longer lengths with create_block_mask"
        )
    batch, heads = mask.shape[:2]
    return create_block_mask(mask.mask_mod, batch, heads, q_len, kv_len, mask.device, size)


def _cropped_base(base: IndexBase | None, lists: BlockLists) -> IndexBase | None:
    if base is None:
        return None
    rows, columns = lists.q_to_kv.mask_block_cnt.shape[2], lists.kv_to_q.mask_block_cnt.shape[2]
    q_base, kv_base = base.q_base, base.kv_base
    return replace(
        base,
        q_base=None if q_base is None else q_base[:rows],
        kv_base=None if kv_base is None else kv_base[:columns],
    )
