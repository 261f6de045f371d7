"""Masks that have no graph: a dense tensor, or a Python callable that cannot be traced.

Every element is evaluated once, in strips of block rows. Empty and full blocks become plain list entries; partial
blocks keep their own bits, which backends read in place of mask_mod.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor

from flexbwd.errors import MaskError

from .assemble import Classes, Strip, hand_out, lists_from_classes
from .eager_mask import EagerMask
from .grid import BlockGrid, check_block_size, check_sizes
from .tensors import BlockLists, IndexBase

Array = np.ndarray

_STRIP_ELEMENTS = 2**22


def tabulate_tensor(
    mask: Tensor,
    B: int | None,
    H: int | None,
    Q_LEN: int,
    KV_LEN: int,
    block_size: int | tuple[int, int] = 128,
    device: torch.device | str | None = None,
) -> BlockLists:
    """Block lists and bits of a dense mask: true is kept.

    Args:
        mask: bool, broadcastable to `[B, H, Q_LEN, KV_LEN]`; any device.
        B, H, block_size, device: as for `build_lists`.
    Raises:
        MaskError: dtype is not bool, or the shape does not broadcast; differs along B or H where that is None.
    """
    check_sizes(B, H, Q_LEN, KV_LEN)
    if mask.dtype is not torch.bool:
        raise MaskError(f"the mask tensor is {mask.dtype}: it must be bool, true where kept; compare it, as mask != 0")
    want = (1 if B is None else B, 1 if H is None else H, Q_LEN, KV_LEN)
    shape = (1,) * (4 - mask.ndim) + tuple(mask.shape)
    if mask.ndim < 2 or mask.ndim > 4 or any(have not in (1, size) for have, size in zip(shape, want, strict=True)):
        raise MaskError(
            f"the mask tensor has shape {tuple(mask.shape)}, which does not broadcast to [B={B}, H={H}, Q_LEN={Q_LEN}, "
            f"KV_LEN={KV_LEN}]: pass [Q_LEN, KV_LEN] or [B or 1, H or 1, Q_LEN, KV_LEN], and B and H where it differs"
        )
    dense = mask.detach().reshape(shape).expand(*shape[:2], Q_LEN, KV_LEN)
    grid = BlockGrid.make((B, shape[0] > 1), (H, shape[1] > 1), (Q_LEN, KV_LEN), check_block_size(block_size), None)

    def elements(lead: slice, rows: slice) -> Array:
        pairs = torch.arange(lead.start, lead.stop, device="cpu")
        heads = max(1, dense.shape[1])
        q = slice(rows.start * grid.q.block, rows.stop * grid.q.block)
        return dense[:, :, q][pairs // heads, pairs % heads].cpu().numpy()

    return _tabulate(grid, elements, device)


def tabulate_callable(
    mask_mod: Callable,
    B: int | None,
    H: int | None,
    Q_LEN: int,
    KV_LEN: int,
    block_size: int | tuple[int, int] = 128,
    index_base: IndexBase | None = None,
    device: torch.device | str | None = None,
) -> BlockLists:
    """Block lists and bits of a mask_mod that cannot be traced, evaluated eagerly on every element.

    It is vectorised by torch.vmap; where that fails (Python `if`, `.item()`) it is called once per element with 0-dim
    int32 tensors, for up to `eager_mask.MAX_CALLS` elements.

    Raises:
        MaskError: the callable raises, does not yield a bool, reads `b` or `h` while B or H is None, or would have to
            be called too often.
    """
    check_sizes(B, H, Q_LEN, KV_LEN)
    mask = EagerMask(mask_mod, device or "cpu")
    by_batch, by_head = mask.differs(B, H)
    grid = BlockGrid.make((B, by_batch), (H, by_head), (Q_LEN, KV_LEN), check_block_size(block_size), index_base)
    mask.total = grid.lead * Q_LEN * KV_LEN
    kv_idx = grid.kv.positions(slice(0, grid.kv.blocks))

    def elements(lead: slice, rows: slice) -> Array:
        return mask(grid.b[lead], grid.h[lead], grid.q.positions(rows), kv_idx)

    return _tabulate(grid, elements, device)


def _tabulate(
    grid: BlockGrid, elements: Callable[[slice, slice], Array], device: torch.device | str | None
) -> BlockLists:
    """`elements(lead, rows)`: bool `[lead, q positions of those block rows, KV_LEN]`."""
    strips = list(grid.strips(max(1, _STRIP_ELEMENTS // (grid.q.block * grid.kv.block))))
    words: list[Array] = []
    q_to_kv = lists_from_classes(grid, strips, _classes(grid, strips, elements, words))
    if not words:  # at least one block, so that a padded slot is in range
        words.append(pack_bits(np.zeros((1, grid.q.block, grid.kv.block), dtype=bool)))
    return hand_out(grid, q_to_kv, torch.from_numpy(np.concatenate(words)), device)


def _classes(
    grid: BlockGrid, strips: list[Strip], elements: Callable[[slice, slice], Array], words: list[Array]
) -> Iterator[Classes]:
    """Classes of each strip; the bits of its partial blocks are appended to `words`."""
    q, kv = grid.q, grid.kv
    for lead, rows in strips:
        count = (lead.stop - lead.start, rows.stop - rows.start)
        if not kv.blocks or not count[0]:
            yield np.zeros((*count, kv.blocks), dtype=bool), np.zeros((*count, kv.blocks), dtype=bool)
            continue
        found = elements(lead, rows)
        padded = np.zeros((count[0], count[1] * q.block, kv.blocks * kv.block), dtype=bool)
        padded[:, : found.shape[1], : kv.length] = found
        blocks = padded.reshape(count[0], count[1], q.block, kv.blocks, kv.block)
        kept = blocks.sum(axis=4, dtype=np.int32).sum(axis=2, dtype=np.int64)
        real = q.sizes[rows][:, None] * kv.sizes
        partial = (kept > 0) & (kept < real)
        if partial.any():
            words.append(pack_bits(blocks.transpose(0, 1, 3, 2, 4)[partial]))
        yield partial, kept == real


def pack_bits(elements: Array) -> Array:
    """bool `[n, q_block, kv_block]` as int32 words: bit `j % 32` of `words[n, i, j // 32]`."""
    packed = np.packbits(elements, axis=-1, bitorder="little")
    pad = -packed.shape[-1] % 4
    if pad:
        packed = np.concatenate([packed, np.zeros((*packed.shape[:-1], pad), dtype=np.uint8)], axis=-1)
    return np.ascontiguousarray(packed).view("<i4").astype(np.int32, copy=False)


def unpack_bits(words: Tensor, slots: Tensor, kv_block: int) -> Tensor:
    """Elements of the blocks at `slots`: bool `[*slots.shape, q_block, kv_block]`, true where kept.

    Args:
        words: int32 `[blocks, q_block, ceil(kv_block / 32)]`.  slots: integers of any shape, same device.
    """
    chosen = words[slots.long()].contiguous().view(torch.uint8)  # little-endian hosts and GPUs
    mask = torch.tensor([1 << bit for bit in range(8)], dtype=torch.uint8, device=words.device)
    return (chosen.unsqueeze(-1).bitwise_and(mask) != 0).flatten(-2)[..., :kv_block]
