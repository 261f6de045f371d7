"""Plan: what is compiled together, and the plain groups of tensors that cross the backend boundary."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from flexbwd.modgraph.modplan import ModPlan
from flexbwd.sparsity.tensors import BlockBits, BlockSparseTensors, IndexBase


class BlockLists(NamedTuple):
    """The tensors of a BlockMask, both directions."""

    q_to_kv: BlockSparseTensors
    kv_to_q: BlockSparseTensors
    bits: BlockBits | None = None


@dataclass(frozen=True, eq=False)
class Plan:
    """Everything static that a backend compiles: mods, mask block size, numerics. Shapes and values stay outside."""

    mods: ModPlan
    block_size: tuple[int, int] = (128, 128)  # (q, kv) granule of the block lists
    precision: str = "fast"
    tile_elements: int | None = None  # score elements the CPU backend holds at a time; None: its own choice


@dataclass(frozen=True, eq=False)
class Operands:
    """One attention problem as a backend sees it."""

    query: Tensor  # [B, Hq, Sq, D], any strides
    key: Tensor  # [B, Hkv, Skv, D]
    value: Tensor  # [B, Hkv, Skv, Dv]
    captures: tuple[Tensor, ...]  # by load slot of plan.mods
    blocks: BlockLists | None  # None: every block is kept whole
    base: IndexBase | None
    scale: float
    plan: Plan


@dataclass(frozen=True)
class Needs:
    """Which gradients somebody asked for."""

    query: bool = True
    key: bool = True
    value: bool = True
    captures: tuple[bool, ...] = ()


@dataclass
class Gradients:
    """Gradients by operand; None where not needed."""

    query: Tensor | None = None
    key: Tensor | None = None
    value: Tensor | None = None
    captures: list[Tensor | None] = field(default_factory=list)
