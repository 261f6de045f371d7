"""The integer inputs of mods, global: local index plus the call's IndexBase."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from flexbwd.plan import Operands

from .walk import Chunk, Grid, Heads, RowStep

Inputs = dict[str, Tensor]
Origins = dict[str, int]  # first value of each input that counts up by one


class _Axes(NamedTuple):
    b: Tensor  # [B, 1, 1, 1, 1]
    h: Tensor  # [Hkv, group, 1, 1]
    q: Tensor  # [Sq, 1]
    kv: Tensor  # [Skv]


@functools.lru_cache(maxsize=16)
def _local_axes(grid: Grid) -> _Axes:
    b, h, q, kv = (
        torch.arange(n, dtype=torch.int32, device="cpu")
        for n in (grid.batch, grid.kv_heads * grid.group, grid.q_len, grid.kv_len)
    )
    return _Axes(b.view(-1, 1, 1, 1, 1), h.view(grid.kv_heads, grid.group, 1, 1), q.view(-1, 1), kv)


class Coordinates:
    def __init__(self, op: Operands, grid: Grid) -> None:
        self._grid, self._base = grid, op.base
        self._block_size = op.plan.block_size if op.blocks is not None or op.base is None else op.base.block_size
        self._axes: _Axes | None = None
        self._last: tuple[object, object, object, tuple[Inputs, Origins]] | None = None

    def _global_axes(self) -> _Axes:
        local, base = _local_axes(self._grid), self._base
        if base is None:
            return local
        q = local.q if base.q_base is None else local.q + _per_element(base.q_base, self._block_size[0], local.q)
        kv = local.kv if base.kv_base is None else local.kv + _per_element(base.kv_base, self._block_size[1], local.kv)
        return _Axes(local.b + base.b_off, local.h + base.h_off, q, kv)

    def of(self, heads: Heads, step: RowStep, chunk: Chunk) -> tuple[Inputs, Origins]:
        """Inputs of a mod over a tile, and the first value of those that count up by one."""
        last = self._last
        if last is not None and last[0] is heads and last[1] is step and last[2] is chunk:
            return last[3]
        if self._axes is None:
            self._axes = self._global_axes()
        b, h, q, kv = self._axes
        k0, k1 = chunk.runs[0]
        inputs = {
            "b": b[heads.b0 : heads.b1],
            "h": h[heads.k0 : heads.k1, heads.g0 : heads.g1],
            "q_idx": q[step.q0 : step.q1],
            "kv_idx": kv[k0:k1] if chunk.index is None else kv.index_select(0, chunk.index),
        }
        base = self._base
        origins = {
            "b": heads.b0 + (base.b_off if base is not None else 0),
            "h": heads.k0 * self._grid.group + heads.g0 + (base.h_off if base is not None else 0),
        }
        if base is None or base.q_base is None:
            origins["q_idx"] = step.q0
        if (base is None or base.kv_base is None) and chunk.index is None:
            origins["kv_idx"] = k0
        self._last = (heads, step, chunk, (inputs, origins))
        return inputs, origins


def _per_element(base: Tensor, block: int, local: Tensor) -> Tensor:
    """A per-block offset for every element, shaped like `local`."""
    return base.repeat_interleave(block)[: local.shape[0]].to(torch.int32).view(local.shape)
