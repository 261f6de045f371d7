"""Block lists from outside: kv-block lists as torch users write them, torch's own BlockMask, and back to it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import flex_attention as torch_flex
from torch.nn.attention.flex_attention import BlockMask as TorchBlockMask

from flexbwd.errors import MaskError

from .combine import MaskMod
from .grid import check_block_size
from .lists import both_directions, ceil_div, listed, once, scatter_rows, widen
from .tensors import BlockBits, BlockLists, BlockSparseTensors

if TYPE_CHECKING:
    from .block_mask import BlockMask

_TORCH_PLACEHOLDER = 1 << 30  # BLOCK_SIZE of the mask that torch makes up when none is given


class Parts(NamedTuple):
    """What a BlockMask is made of."""

    lists: BlockLists
    block_size: tuple[int, int]
    seq_lengths: tuple[int, int]
    mask_mod: MaskMod | None
    bound: frozenset[str] = frozenset()


# -- kv-block lists ---------------------------------------------------------------------------------------------------
def parts_from_kv_blocks(
    partial: tuple[Tensor, Tensor],
    full: tuple[Tensor | None, Tensor | None],
    block_size: int | tuple[int, int],
    seq_lengths: tuple[int, int] | None,
    mask_mod: MaskMod | None,
) -> Parts:
    """Validated lists in both directions; see `BlockMask.from_kv_blocks`."""
    size = check_block_size(block_size)
    if mask_mod is not None and not callable(mask_mod):
        raise MaskError(
            f"mask_mod is a {type(mask_mod).__name__}; it must be a function of (b, h, q_idx, kv_idx) or None"
        )
    cnt, idx = _pair("kv_num_blocks", partial[0], "kv_indices", partial[1])
    rows, width = idx.shape[-2:]
    if seq_lengths is None:
        seq_lengths = (rows * size[0], width * size[1])
    lengths = _lengths(seq_lengths, rows, size)
    columns = ceil_div(lengths[1], size[1])
    names = ("kv_num_blocks", "kv_indices")
    _check_entries(names, *_once(cnt, idx), columns)
    if (full[0] is None) != (full[1] is None):
        given, missing = ("full_kv_num_blocks", "full_kv_indices")[:: -1 if full[0] is None else 1]
        raise MaskError(f"{given} is given without {missing}; full blocks need both, or neither")
    if full[0] is None or full[1] is None:
        return Parts(both_directions(BlockSparseTensors(cnt, idx), columns), size, lengths, mask_mod)
    full_names = ("full_kv_num_blocks", "full_kv_indices")
    full_cnt, full_idx = _pair(full_names[0], full[0], full_names[1], full[1])
    _check_same_rows(cnt, full_cnt)
    _check_entries(full_names, *_once(full_cnt, full_idx), columns)
    lead = torch.broadcast_shapes(cnt.shape[:2], full_cnt.shape[:2])
    lists = BlockSparseTensors(*(t.expand(*lead, *t.shape[2:]) for t in (cnt, idx, full_cnt, full_idx)))
    _check_disjoint(once(lists)[0], columns)
    return Parts(both_directions(lists, columns), size, lengths, mask_mod)


def _pair(cnt_name: str, cnt: Any, idx_name: str, idx: Any) -> tuple[Tensor, Tensor]:
    """A count and an index tensor as int32 `[B, H, rows]` and `[B, H, rows, width]`."""
    for name, t in ((cnt_name, cnt), (idx_name, idx)):
        if not isinstance(t, Tensor):
            raise MaskError(
                f"{name} is a {type(t).__name__}; it must be an int32 tensor: torch.tensor(..., dtype=torch.int32)"
            )
        if t.dtype not in (torch.int32, torch.int64):
            raise MaskError(
                f"{name} has dtype {t.dtype}; it must be int32 (or int64): cast it with {name}.to(torch.int32)"
            )
    if not 2 <= idx.dim() <= 4 or cnt.shape != idx.shape[:-1]:
        raise MaskError(
            f"{cnt_name} has shape {list(cnt.shape)} and {idx_name} {list(idx.shape)}; they must be "
            "[B|1, H|1, q blocks] and [B|1, H|1, q blocks, width]: one list of kv blocks for every q block"
        )
    if cnt.device != idx.device:
        raise MaskError(f"{cnt_name} is on {cnt.device} but {idx_name} on {idx.device}; move one with .to(device)")
    missing = (1,) * (4 - idx.dim())
    cnt, idx = cnt.reshape(*missing, *cnt.shape), idx.reshape(*missing, *idx.shape)
    if idx.shape[-1] == 0:
        idx = idx.new_zeros(*idx.shape[:-1], 1)
    return cnt.to(torch.int32), idx.to(torch.int32)


def _once(cnt: Tensor, idx: Tensor) -> tuple[Tensor, Tensor]:
    return once(BlockSparseTensors(cnt, idx))[0][:2]


def _lengths(seq_lengths: Any, rows: int, size: tuple[int, int]) -> tuple[int, int]:
    ok = isinstance(seq_lengths, (tuple, list)) and len(seq_lengths) == 2
    if not ok or any(isinstance(n, bool) or not isinstance(n, int) or n < 0 for n in seq_lengths):
        raise MaskError(f"seq_lengths={seq_lengths!r}: it must be two integers >= 0, (Sq, Skv)")
    q_len, kv_len = seq_lengths
    if ceil_div(q_len, size[0]) != rows:
        raise MaskError(
            f"kv_indices has {rows} rows but seq_lengths={tuple(seq_lengths)} with q blocks of {size[0]} make "
            f"{ceil_div(q_len, size[0])}; give one row per q block, or the right BLOCK_SIZE and seq_lengths"
        )
    return q_len, kv_len


def _check_entries(names: tuple[str, str], cnt: Tensor, idx: Tensor, columns: int) -> None:
    """Counts fit their lists; listed blocks exist and appear once."""
    cnt_name, idx_name = names
    bad = (cnt < 0) | (cnt > idx.shape[-1])
    if bool(bad.any()):
        at = _first(bad)
        raise MaskError(
            f"{cnt_name}{list(at)} = {int(cnt[at])}, but {idx_name} has room for {idx.shape[-1]} entries a row; counts "
            "must lie between 0 and that width: widen the index list, or correct the count"
        )
    inside = listed(cnt, idx)
    bad = inside & ((idx < 0) | (idx >= columns))
    if bool(bad.any()):
        at = _first(bad)
        raise MaskError(
            f"{idx_name}{list(at)} = {int(idx[at])}, but there are {columns} kv blocks; listed blocks must lie in "
            f"[0, {columns}). Check BLOCK_SIZE, or pass seq_lengths when lists are narrower than the key length"
        )
    ordered, twice = _repeats(_distinct(cnt, idx, columns))
    if bool(twice.any()):
        b, h, row, _ = at = _first(twice)
        col = int(ordered[at])
        raise MaskError(
            f"{idx_name}[{b}, {h}, {row}] lists kv block {col} more than once; list every block at most once"
        )


def _distinct(cnt: Tensor, idx: Tensor, free: int) -> Tensor:
    """`idx` with the entries past the counts made distinct numbers from `free` on."""
    return torch.where(listed(cnt, idx), idx, torch.arange(free, free + idx.shape[-1], device=idx.device))


def _repeats(entries: Tensor) -> tuple[Tensor, Tensor]:
    """The entries of each row in order, and which of them equal the next."""
    ordered = entries.sort(-1).values
    return ordered, ordered[..., 1:] == ordered[..., :-1]


def _check_same_rows(cnt: Tensor, full_cnt: Tensor) -> None:
    fits = all(x == y or 1 in (x, y) for x, y in zip(cnt.shape[:2], full_cnt.shape[:2], strict=True))
    if not fits or cnt.shape[2] != full_cnt.shape[2]:
        raise MaskError(
            f"kv_num_blocks has shape {list(cnt.shape)} and full_kv_num_blocks {list(full_cnt.shape)}; both must have "
            "the same batch entries, heads and q blocks (batch and heads may be 1)"
        )
    if cnt.device != full_cnt.device:
        raise MaskError(f"kv_num_blocks is on {cnt.device} but full_kv_num_blocks on {full_cnt.device}; move one")


def _check_disjoint(lists: BlockSparseTensors, columns: int) -> None:
    assert lists.full_block_cnt is not None
    assert lists.full_block_idx is not None
    partial = _distinct(lists.mask_block_cnt, lists.mask_block_idx, columns)
    full = _distinct(lists.full_block_cnt, lists.full_block_idx, columns + partial.shape[-1])
    ordered, both = _repeats(torch.cat([partial, full], -1))
    if bool(both.any()):
        b, h, row, _ = at = _first(both)
        col = int(ordered[at])
        raise MaskError(
            f"kv block {col} of q block {row} (batch {b}, head {h}) is listed in both kv_indices and full_kv_indices; "
            "a block is either partial or full: drop it from one"
        )


def _first(bad: Tensor) -> tuple[int, ...]:
    """Coordinates of the first true element."""
    return tuple(bad.nonzero()[0].tolist())


# -- torch ------------------------------------------------------------------------------------------------------------
def parts_from_torch(mask: Any) -> Parts:
    """See `BlockMask.from_torch`. Inside a traced graph the tensors are wrapped as they are, their values unseen."""
    if not isinstance(mask, TorchBlockMask):
        raise MaskError(
            f"from_torch got a {type(mask).__name__}; it must be a torch.nn.attention.flex_attention.BlockMask"
        )
    q_block, kv_block = mask.BLOCK_SIZE
    if q_block == kv_block == _TORCH_PLACEHOLDER:
        raise MaskError(
            "this torch BlockMask is the placeholder for no mask at all (BLOCK_SIZE=2**30); pass block_mask=None"
        )
    mod = _torch_mask_mod(mask.mask_mod)
    rows, lengths = mask.kv_indices.shape[-2], (mask.seq_lengths[0], mask.seq_lengths[1])
    if ceil_div(mask.seq_lengths[0], q_block) != rows:
        raise MaskError(
            f"this torch BlockMask has {rows} rows of q blocks but seq_lengths={mask.seq_lengths}: it was sliced along "
            "q, which torch does not record. Convert first and slice then: BlockMask.from_torch(mask)[:, :, index]"
        )
    q_lists = (mask.q_num_blocks, mask.q_indices, mask.full_q_num_blocks, mask.full_q_indices)
    if torch.compiler.is_compiling() and mask.kv_indices.dim() == 4 and q_lists[0] is not None:
        q_to_kv = BlockSparseTensors(mask.kv_num_blocks, mask.kv_indices, mask.full_kv_num_blocks, mask.full_kv_indices)
        kv_to_q = BlockSparseTensors(*q_lists)  # type: ignore[arg-type]
        lists = BlockLists(q_to_kv, kv_to_q)
        return Parts(lists, check_block_size((q_block, kv_block)), lengths, mod)
    return parts_from_kv_blocks(
        (mask.kv_num_blocks, mask.kv_indices),
        (mask.full_kv_num_blocks, mask.full_kv_indices),
        (q_block, kv_block),
        lengths,
        mod,
    )


def _torch_mask_mod(mod: Any) -> MaskMod | None:
    if mod is torch_flex.noop_mask:
        return None
    if getattr(mod, "__name__", "") == "_sliced_mask_mod_error":
        raise MaskError(
            "this torch BlockMask was sliced, which drops its mask_mod. Convert first and slice then: "
            "BlockMask.from_torch(mask)[b, h, q_blocks]; or set sliced.mask_mod to one for the sliced coordinates"
        )
    return mod


def to_torch(mask: BlockMask) -> TorchBlockMask:
    """See `BlockMask.to_torch`."""
    columns = ceil_div(mask.seq_lengths[1], mask.block_size[1])
    cnt, idx, full_cnt, full_idx = mask.q_to_kv
    idx = widen(idx, cnt, columns)
    if full_cnt is not None and full_idx is not None:
        full_idx = widen(full_idx, full_cnt, columns)
    return TorchBlockMask.from_kv_blocks(
        cnt,
        idx,
        full_cnt,
        full_idx,
        BLOCK_SIZE=mask.block_size,
        mask_mod=_mod_for_torch(mask),
        seq_lengths=mask.seq_lengths,
    )


def _mod_for_torch(mask: BlockMask) -> Any:
    """A mask_mod in local coordinates: torch knows no index_base and no bits."""
    if mask.bits is not None:
        return bits_mask_mod(mask.q_to_kv, mask.bits, mask.block_size, mask.seq_lengths[1])
    return mask.global_mask_mod()


def bits_mask_mod(lists: BlockSparseTensors, bits: BlockBits, block_size: tuple[int, int], kv_len: int) -> MaskMod:
    """The element bits of partial blocks as a mask_mod; full blocks are kept, unlisted ones dropped."""
    columns = ceil_div(kv_len, block_size[1])
    all_kept, none_kept = bits.words.shape[0], bits.words.shape[0] + 1
    slots = scatter_rows(lists.mask_block_cnt, lists.mask_block_idx, bits.q_to_kv_slot, columns, none_kept)
    if lists.full_block_cnt is not None and lists.full_block_idx is not None:
        full = scatter_rows(lists.full_block_cnt, lists.full_block_idx, 1, columns, 0)
        slots = torch.where(full == 1, all_kept, slots)
    shape = (1, *bits.words.shape[1:])
    words = torch.cat([bits.words, bits.words.new_full(shape, -1), bits.words.new_zeros(shape)])
    q_block, kv_block = block_size
    per_batch, per_head = (n > 1 for n in lists.mask_block_cnt.shape[:2])

    def tabulated_mask(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        batch, head = (b if per_batch else b * 0), (h if per_head else h * 0)
        slot = slots[batch, head, q_idx // q_block, kv_idx // kv_block]
        column = kv_idx % kv_block
        return ((words[slot, q_idx % q_block, column // 32] >> (column % 32)) & 1) == 1

    return tabulated_mask
