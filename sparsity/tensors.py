"""The block lists themselves: plain int32 tensors, what kernels and backends read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor


class BlockSparseTensors(NamedTuple):
    """One direction of a block mask. `rows` are q blocks (forward, dQ) or kv blocks (dK, dV).

    Lists may be in any order; entries past the count mean nothing and are never read. All int32.
    """

    mask_block_cnt: Tensor  # [B|1, H|1, rows]        partial blocks: mask_mod is evaluated
    mask_block_idx: Tensor  # [B|1, H|1, rows, max]
    full_block_cnt: Tensor | None = None  # full blocks: kept whole
    full_block_idx: Tensor | None = None


class BlockBits(NamedTuple):
    """Element bits of the partial blocks of a tabulated mask, read in place of mask_mod.

    Bit `j % 32` of `words[slot, i, j // 32]` tells whether element (i, j) of the block is kept. `*_slot` run parallel
    to `mask_block_idx` of the same direction.
    """

    words: Tensor  # int32 [blocks, q_block, ceil(kv_block / 32)]
    q_to_kv_slot: Tensor  # int32, shaped like q_to_kv.mask_block_idx
    kv_to_q_slot: Tensor  # int32, shaped like kv_to_q.mask_block_idx


class BlockLists(NamedTuple):
    """The tensors of a BlockMask, both directions."""

    q_to_kv: BlockSparseTensors
    kv_to_q: BlockSparseTensors
    bits: BlockBits | None = None


@dataclass(frozen=True)
class IndexBase:
    """Where a local problem lies in a global one, so that mods see global coordinates (context parallelism).

    Mods get `b + b_off`, `h + h_off`, `i + q_base[i // q_block]`, `j + kv_base[j // kv_block]`; the block sizes are
    those of the block mask, or `block_size` when there is none.
    """

    b_off: int = 0
    h_off: int = 0
    q_base: Tensor | None = None  # int32 [ceil(Sq / q_block)]
    kv_base: Tensor | None = None  # int32 [ceil(Skv / kv_block)]
    block_size: tuple[int, int] = (128, 128)
