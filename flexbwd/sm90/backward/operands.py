"""Tensors of the backward kernel, by role. Matrices are (rows, columns, heads, batch) views for the copy engine."""

from dataclasses import dataclass

import cutlass.cute as cute
from cutlass import Int32


@dataclass(frozen=True)
class Matrix:
    """A matrix per head, moved by TMA in tiles."""

    atom: cute.CopyAtom
    m: cute.Tensor  # (rows, columns, heads, batch)


@dataclass(frozen=True)
class Inputs:
    q: Matrix
    do: Matrix
    k: Matrix
    v: Matrix
    lse: cute.Tensor  # [B*Hq, padded Sq] fp32, log2 domain; +inf on dead and padding rows
    delta: cute.Tensor  # [B*Hq, padded Sq] fp32


@dataclass(frozen=True)
class Outputs:
    dk: Matrix
    dv: Matrix
    dq_acc: cute.Tensor  # [B*Hq*m_blocks, warpgroups, floats] fp32, in fragment order


@dataclass(frozen=True)
class Work:
    """What one CTA does: key tile `n_block` of key head `kv_head`, for query heads [q_head, q_head + group)."""

    n_block: Int32
    kv_head: Int32
    q_head: Int32
    batch: Int32
    group: Int32
    q_heads: Int32
