"""Does a block mask agree with itself, with its mask_mod, and with the attention call it is used in?"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from flexbwd.errors import MaskError

from .combine import mask_name
from .evaluate import MaskElements, block_classes
from .lists import EMPTY, FULL, class_grid, narrowed, once, scatter_rows
from .tensors import BlockBits

if TYPE_CHECKING:
    from .block_mask import BlockMask

_STRIP = 2**22  # elements evaluated at a time


# -- use in a call ----------------------------------------------------------------------------------------------------
def validate_for(
    block_mask: BlockMask, B: int, Hq: int, Sq: int, Skv: int, device: torch.device | str | None = None
) -> None:
    """The mask fits an attention call of `query [B, Hq, Sq, D]` and `Skv` keys on `device` (None: any).

    Raises:
        MaskError: lengths, batch, heads or device differ; the message says what to do.
    """
    _check_lengths(block_mask, Sq, Skv)
    _check_lead(block_mask, 0, "batch", "B", B)
    _check_lead(block_mask, 1, "query heads", "H", Hq)
    if device is not None and block_mask.device != torch.device(device):
        raise MaskError(
            f"block_mask is on {block_mask.device} but query is on {device}; move it once with "
            f"block_mask.to({str(device)!r}), or build it there with create_block_mask(..., device=...)"
        )


def _check_lengths(mask: BlockMask, q_len: int, kv_len: int) -> None:
    if mask.seq_lengths == (q_len, kv_len):
        return
    had_q, had_kv = mask.seq_lengths
    if q_len <= had_q and kv_len <= had_kv:
        remedy = f"block_mask.adjust({q_len}, {kv_len}) crops it to the first queries and keys, or create one"
    else:
        remedy = "create one"
    raise MaskError(
        f"block_mask was made for lengths (Sq, Skv) = {mask.seq_lengths}, but query and key have ({q_len}, {kv_len}); "
        f"{remedy} for these lengths with create_block_mask"
    )


def _check_lead(mask: BlockMask, dim: int, what: str, argument: str, size: int) -> None:
    have = mask.shape[dim]
    letter = argument.lower()
    if have == size:
        return
    if have != 1:
        raise MaskError(
            f"block_mask was made for {argument}={have} {what}, but query has {size}; create it with {argument}={size} "
            f"or, if it is the same for all, {argument}=None"
        )
    if letter in mask.bound:
        raise MaskError(
            f"block_mask lists the blocks of one entry of {what} and its mask_mod ({mask_name(mask.mask_mod)}) reads "
            f"`{letter}`, but query has {size}; create it with {argument}={size}"
        )


# -- the mask itself --------------------------------------------------------------------------------------------------
def element_mask(mask: BlockMask) -> Tensor:
    """See `BlockMask.element_mask`."""
    classes = class_grid(mask.q_to_kv, mask.kv_blocks)
    q_block, kv_block = mask.block_size
    q_len, kv_len = mask.seq_lengths
    out = torch.empty(mask.shape, dtype=torch.bool, device=mask.device)
    elements = MaskElements(mask)
    rows = max(1, _STRIP // max(1, out.shape[0] * out.shape[1] * kv_len) // q_block) * q_block
    for start in range(0, q_len, rows):
        stop = min(start + rows, q_len)
        cells = classes[:, :, start // q_block : -(-stop // q_block)]
        cells = cells.repeat_interleave(q_block, 2)[:, :, : stop - start].repeat_interleave(kv_block, 3)[..., :kv_len]
        out[:, :, start:stop] = (cells == FULL) | ((cells != EMPTY) & elements(range(start, stop)))
    return out


def check_lists(mask: BlockMask) -> None:
    """See `BlockMask.check`."""
    given = class_grid(mask.q_to_kv, mask.kv_blocks)
    back = class_grid(mask.kv_to_q, mask.q_blocks).transpose(2, 3)
    differ = torch.ne(*narrowed(given, back))
    if bool(differ.any()):
        at = _first(differ)
        raise MaskError(
            f"{_where(differ)} is {_CLASS[int(given[at])]} in q_to_kv but "
            f"{_CLASS[int(back[at])]} in kv_to_q; both directions must list the same blocks: make the mask with "
            "BlockMask.from_kv_blocks, which derives one from the other"
        )
    if mask.bits is not None:
        _check_slots(mask, mask.bits)
        return
    if mask.mask_mod is None:
        return
    given, wanted = narrowed(given, block_classes(mask).to(given.device))
    _check_covers(mask, given, wanted)
    _check_full(mask, given, wanted)


def _check_slots(mask: BlockMask, bits: BlockBits) -> None:
    """Both directions read the same bits for a block, and these exist."""
    q, kv = once(mask.q_to_kv)[0], once(mask.kv_to_q)[0]
    q_slot = bits.q_to_kv_slot[: q[0].shape[0], : q[0].shape[1]]
    kv_slot = bits.kv_to_q_slot[: kv[0].shape[0], : kv[0].shape[1]]
    slots = scatter_rows(q.mask_block_cnt, q.mask_block_idx, q_slot, mask.kv_blocks, 0)
    back = scatter_rows(kv.mask_block_cnt, kv.mask_block_idx, kv_slot, mask.q_blocks, 0).transpose(2, 3)
    wrong = (slots != back) | (slots < 0) | (slots >= max(1, len(bits.words)))
    if bool(wrong.any()):
        at = _first(wrong)
        raise MaskError(
            f"{_where(wrong)} has bits at slot {int(slots[at])} in q_to_kv and {int(back[at])} in kv_to_q, of "
            f"{len(bits.words)} stored; both must name the same stored block: build the mask with create_block_mask"
        )


_CLASS = ("not listed", "partial", "full")


def _check_covers(mask: BlockMask, given: Tensor, wanted: Tensor) -> None:
    missing = (given == EMPTY) & (wanted != EMPTY)
    if bool(missing.any()):
        kept = "all" if int(wanted[_first(missing)]) == FULL else "some"
        raise MaskError(
            f"{_where(missing)} is not listed, but mask_mod ({mask_name(mask.mask_mod)}) keeps {kept} of its elements; "
            "they would be dropped. List the block, or build the lists with create_block_mask"
        )


def _check_full(mask: BlockMask, given: Tensor, wanted: Tensor) -> None:
    wrong = (given == FULL) & (wanted != FULL)
    if bool(wrong.any()):
        kept = "none" if int(wanted[_first(wrong)]) == EMPTY else "only some"
        raise MaskError(
            f"{_where(wrong)} is listed as full, but mask_mod ({mask_name(mask.mask_mod)}) keeps {kept} of its "
            "elements, and all would be kept. List it as partial, or build the lists with create_block_mask"
        )


def _where(bad: Tensor) -> str:
    b, h, q, kv = _first(bad)
    return f"block (batch {b}, head {h}, q_block {q}, kv_block {kv})"


def _first(bad: Tensor) -> tuple[int, ...]:
    return tuple(bad.nonzero()[0].tolist())
