"""Masks as lane bits: integers as wide as a score, all ones where an element is kept and 0 where it is not.

A bitwise and selects exactly, NaN included, and is vectorised; torch's `where` and `masked_fill` are not.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from flexbwd.modgraph.recorder import plain_torch
from flexbwd.modgraph.torch_ops import lane_bits, lanes
from flexbwd.plan import Operands

from .coordinates import Coordinates
from .programs import KeepProgram, ModPrograms
from .remember import Memory
from .walk import Chunk, Heads, Partial, RowStep

Keep = tuple[int, int, Tensor]  # columns [c0, c1) and their lane bits, broadcastable to the mod tile
_STORE_ELEMENTS = 1 << 21  # mask elements remembered per mask: 8 MiB in fp32
with plain_torch():  # this module may be imported under a FakeTensorMode
    _WORDS = torch.arange(32, dtype=torch.int32, device="cpu")
    _MINUS_INF = {d: lanes(torch.tensor(-math.inf, dtype=d, device="cpu")) for d in (torch.float32, torch.float64)}


class _Store:
    """Lane bits of one mask, walk and set of captured tensors; serves the backward and later calls."""

    def __init__(self, *owners: object) -> None:
        self._owners = owners  # their ids are part of the keys
        self.bits: dict[Hashable, Tensor] = {}
        self._elements = 0

    def add(self, key: Hashable, bits: Tensor) -> bool:
        """Remember, if there is room."""
        if self._elements + bits.numel() > _STORE_ELEMENTS:
            return False
        self._elements += bits.numel()
        self.bits[key] = bits
        return True


_stores: Memory[_Store] = Memory(4)


class Masks:
    """What decides the elements of a call's listed blocks."""

    def __init__(
        self, op: Operands, programs: ModPrograms, walk: Sequence[RowStep], where: Coordinates, acc: torch.dtype
    ) -> None:
        self._op, self._acc, self._where = op, acc, where
        self._score_keep, self._mask = programs.score_keep, programs.mask
        self._store = _Store()
        if op.base is None and (self._mask or self._score_keep):
            slots = sorted({s for p in (self._mask, self._score_keep) if p for s in p.slots})
            read = [op.captures[s] for s in slots]
            self._store = _stores.get((id(walk), id(programs), acc), read, lambda: _Store(walk, programs))
        self._row: tuple[RowStep | None, dict[Hashable, Tensor]] = (None, {})

    def keeps(self, heads: Heads, step: RowStep, chunk: Chunk) -> list[Keep]:
        """Lane bits of every part of the chunk in which some element may be hidden."""
        found: list[Keep] = []
        if self._score_keep is not None:
            bits = self._bits(self._score_keep, heads, step, chunk, (id(chunk),))
            found.append((0, chunk.columns, bits))
        for part in chunk.partial:
            if part.slot >= 0:
                found.append((part.c0, part.c1, self._stored_bits(step, part)))
            elif self._mask is not None:
                run = Chunk(((part.k0, part.k0 + part.c1 - part.c0),), part.c1 - part.c0, (), None)
                found.append((part.c0, part.c1, self._bits(self._mask, heads, step, run, run.runs[0])))
        return found

    def _bits(self, keep: KeepProgram, heads: Heads, step: RowStep, chunk: Chunk, place: tuple) -> Tensor:
        key = (id(step), place, heads if keep.per_head else None)
        bits = self._store.bits.get(key)
        if bits is not None:
            return bits
        if self._row[0] is not step:
            self._row = (step, {})
        bits = self._row[1].get(key)
        if bits is None:
            inputs, origins = self._where.of(heads, step, chunk)
            kept = keep.program(inputs, self._op.captures, self._acc, origins)[0]
            bits = lane_bits(kept if kept.dim() else kept.view(1, 1), self._acc)
            if not self._store.add(key, bits) and not keep.per_head:
                self._row[1][key] = bits  # at least for the step's other heads
        return bits

    def _stored_bits(self, step: RowStep, part: Partial) -> Tensor:
        """A tabulated block's bits as lane bits `[rows, columns]`."""
        assert self._op.blocks is not None and self._op.blocks.bits is not None
        q_block, kv_block = self._op.plan.block_size
        row, first = step.q0 % q_block, part.k0 % kv_block
        words = self._op.blocks.bits.words[part.slot, row : row + step.q1 - step.q0]
        bits = words.unsqueeze(-1).bitwise_right_shift(_WORDS).bitwise_and_(1).flatten(1)
        return bits[:, first : first + part.c1 - part.c0].neg().to(_MINUS_INF[self._acc].dtype)


def keep_only(tile: Tensor, keeps: Sequence[Keep]) -> None:
    """Set what is hidden to +0, whatever was there, NaN included. `tile` is a mod tile."""
    for c0, c1, bits in keeps:
        lanes(_part(tile, c0, c1)).bitwise_and_(bits)


def hide(tile: Tensor, keeps: Sequence[Keep]) -> None:
    """Set what is hidden to -inf, whatever was there. `tile` is a mod tile."""
    keep_only(tile, keeps)
    for c0, c1, bits in keeps:
        minus_inf = bits.bitwise_not().bitwise_and_(_MINUS_INF[tile.dtype])
        lanes(_part(tile, c0, c1)).bitwise_or_(minus_inf)


def _part(tile: Tensor, c0: int, c1: int) -> Tensor:
    return tile if c1 - c0 == tile.shape[-1] else tile.narrow(-1, c0, c1 - c0)
