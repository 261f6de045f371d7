"""What a score tile needs besides matrix products: operands cut to a step, workspace, mods.

A tile of a step is `[matrices, rows, columns]`: matrices are (batch, key head) pairs, rows the query heads of a group
times query rows. Mods and masks see the same memory as `[batch, kv heads, group, q rows, columns]`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from flexbwd.plan import Operands

from .coordinates import Coordinates
from .masks import Masks
from .programs import ModPrograms
from .walk import DEFAULT_BUDGET, Chunk, Grid, Heads, RowStep, walk_of

_LOG2E = math.log2(math.e)
_LARGE_SHIFT = 32.0  # half an fp32 ulp of it, 2e-6, is as much as rounding the LSE itself costs
FEW_RUNS = 8  # runs up to which slices beat an index


class Workspace:
    """Named scratch tensors, allocated once per call and cut to each step's shape."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._flat: dict[str, Tensor] = {}
        self._cut: dict[str, Tensor] = {}

    def get(self, name: str, *shape: int) -> Tensor:
        cut = self._cut.get(name)
        if cut is not None and cut.shape == shape:
            return cut
        size = math.prod(shape)
        flat = self._flat.get(name)
        if flat is None or flat.numel() < size:
            flat = self._flat[name] = torch.empty(size, dtype=self._dtype, device="cpu")
        cut = self._cut[name] = flat[:size].view(shape)
        return cut


class Problem:
    """One call's operands in the form the loops use; to be used with gradients disabled."""

    def __init__(self, op: Operands) -> None:
        batch, q_heads, q_len, _ = op.query.shape
        _, kv_heads, kv_len, self.value_dim = op.value.shape
        self.op, self.scale, self.captures = op, op.scale, op.captures
        self.grid = Grid(batch, kv_heads, q_heads // max(kv_heads, 1), q_len, kv_len)
        self.acc = torch.float64 if op.query.dtype is torch.float64 else torch.float32
        self.query = self.by_group(op.query)
        self.key, self.value = op.key.to(self.acc), op.value.to(self.acc)
        self.programs = ModPrograms.of(op.plan.mods)
        self.walk = walk_of(self.grid, op.blocks, op.plan.block_size, op.plan.tile_elements or DEFAULT_BUDGET)
        self.scratch = Workspace(self.acc)
        self.coordinates = Coordinates(op, self.grid)
        self.masks = Masks(op, self.programs, self.walk, self.coordinates, self.acc)

    def by_group(self, x: Tensor) -> Tensor:
        """`[B, Hq, ...]` as a view `[B, Hkv, group, ...]`."""
        if self.grid.group == 1:
            return x.unsqueeze(2)
        return x.unflatten(1, (self.grid.kv_heads, self.grid.group))

    def step_rows(self, x: Tensor, heads: Heads, step: RowStep) -> Tensor:
        """Step's part of `[B, Hkv, group, Sq, X]`, a view."""
        x = _narrow(_narrow(x, 0, heads.b0, heads.b1), 1, heads.k0, heads.k1)
        return _narrow(_narrow(x, 2, heads.g0, heads.g1), 3, step.q0, step.q1)

    def rows(self, x: Tensor, heads: Heads, step: RowStep) -> Tensor:
        """Step's part of `[B, Hkv, group, Sq, X]` as `[matrices, group * rows, X]`, a view where strides allow."""
        part = self.step_rows(x, heads, step)
        return part.reshape(heads.count, part.shape[2] * part.shape[3], part.shape[4])

    def columns(self, x: Tensor, heads: Heads, chunk: Chunk) -> Tensor:
        """Chunk's keys of `[B, Hkv, Skv, X]` as `[matrices, columns, X]`, a view where they are one run."""
        part = _narrow(_narrow(x, 0, heads.b0, heads.b1), 1, heads.k0, heads.k1)
        if chunk.index is None:
            part = _narrow(part, 2, *chunk.runs[0])
        elif len(chunk.runs) <= FEW_RUNS:
            part = torch.cat([part[:, :, k0:k1] for k0, k1 in chunk.runs], 2)
        else:
            part = part.index_select(2, chunk.index)
        return part.squeeze(0) if part.shape[0] == 1 else part.reshape(heads.count, chunk.columns, part.shape[3])

    def as_mod_tile(self, tile: Tensor, heads: Heads, step: RowStep) -> Tensor:
        """`[matrices, group * rows, columns]` as `[batch, kv heads, group, rows, columns]`."""
        return tile.view(
            heads.b1 - heads.b0, heads.k1 - heads.k0, heads.g1 - heads.g0, step.q1 - step.q0, tile.shape[-1]
        )

    def apply_score_mod(self, score: Tensor, heads: Heads, step: RowStep, chunk: Chunk) -> Tensor:
        """score_mod of a contiguous tile, in the same memory or a new tile that may be overwritten."""
        program = self.programs.score
        if program is None:
            return score
        inputs, origins = self.coordinates.of(heads, step, chunk)
        tile = self.as_mod_tile(score, heads, step)
        (result,) = program({"score": tile, **inputs}, self.captures, self.acc, origins)
        return own_tile(result, program.is_fresh(0), tile).view(score.shape)


def exp_minus(score: Tensor, shift: Tensor) -> Tensor:
    """exp(score − shift), in the score's memory, in two passes, or three where |shift| is large.

    By exp2: torch's exp runs in MKL on CPU, which takes up to 40 ns an element where the result underflows (-inf, and
    everything below -87) against 0.3 ns for exp2 anywhere. Two passes round shift·log2(e), which must not be large: at
    a row of masking constants, -1e9, the result would be off by 2**30, and at -1e30 NaN.
    """
    if float(shift.abs().amax()) > _LARGE_SHIFT:
        return torch.sub(score, shift, out=score).mul_(_LOG2E).exp2_()
    return torch.add(shift * -_LOG2E, score, alpha=_LOG2E, out=score).exp2_()


def own_tile(result: Tensor, fresh: bool, tile: Tensor) -> Tensor:
    """`result` if the caller may overwrite it and it has the tile's layout, else its copy in `tile`."""
    if result is tile or (fresh and result.shape == tile.shape and result.is_contiguous()):
        return result
    return tile.copy_(result)


def _narrow(x: Tensor, dim: int, start: int, end: int) -> Tensor:
    return x if end - start == x.shape[dim] else x.narrow(dim, start, end - start)
