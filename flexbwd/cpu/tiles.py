"""What a score tile needs besides matrix products: operands cut to a step, coordinates, mods, masks, workspace.

A tile of a step is `[matrices, rows, columns]`: matrices are (batch, key head) pairs, rows the query heads of a group
times query rows. Mods see the same memory as `[batch, kv heads, group, q rows, columns]`.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

from flexbwd.modgraph.ir import Node
from flexbwd.modgraph.modplan import ModPlan
from flexbwd.modgraph.to_torch import TorchProgram
from flexbwd.modgraph.torch_ops import lane_bits, lanes
from flexbwd.plan import Operands

from .walk import DEFAULT_BUDGET, Chunk, Grid, Heads, Partial, RowStep, walk_of

_FEW_RUNS = 8  # runs up to which slices beat an index
_KEPT_MASKS = 1 << 21  # mask elements remembered between the head groups of one row step

Keep = tuple[int, int, Tensor]  # columns [c0, c1) and their lane bits


class ModPrograms:
    """A ModPlan's graphs, compiled for this backend; shared by all calls with the plan."""

    _known: weakref.WeakKeyDictionary[ModPlan, ModPrograms] = weakref.WeakKeyDictionary()

    def __init__(self, mods: ModPlan) -> None:
        self.score = None if mods.is_identity else TorchProgram([mods.forward], consume=("score",))
        self.mask = None if mods.mask is None else TorchProgram([mods.mask])
        self.score_keep = None if mods.score_keep is None else TorchProgram([mods.score_keep])
        self.backward: dict[tuple[bool, ...], object] = {}  # by which captures need a gradient

    @classmethod
    def of(cls, mods: ModPlan) -> ModPrograms:
        found = cls._known.get(mods)
        if found is None:
            found = cls._known[mods] = cls(mods)
        return found


class Workspace:
    """Named scratch tensors, allocated once per call and cut to each step's shape."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._flat: dict[str, Tensor] = {}

    def get(self, name: str, *shape: int) -> Tensor:
        size = math.prod(shape)
        flat = self._flat.get(name)
        if flat is None or flat.numel() < size:
            flat = self._flat[name] = torch.empty(size, dtype=self._dtype)
        return flat[:size].view(shape)


class Problem:
    """One call's operands in the form the loops use. No gradients flow through it."""

    def __init__(self, op: Operands) -> None:
        batch, q_heads, q_len, self.head_dim = op.query.shape
        kv_heads, kv_len, self.value_dim = op.key.shape[1], op.key.shape[2], op.value.shape[3]
        group = q_heads // kv_heads if kv_heads else 1
        self.op, self.mods, self.scale = op, op.plan.mods, op.scale
        self.grid = Grid(batch, kv_heads, group, q_len, kv_len)
        self.acc = torch.float64 if op.query.dtype == torch.float64 else torch.float32
        self.query = self.by_group(op.query)
        self.key = op.key.detach().to(self.acc)
        self.value = op.value.detach().to(self.acc)
        self.captures = tuple(c.detach() for c in op.captures)
        self.programs = ModPrograms.of(self.mods)
        budget = op.plan.tile_elements or DEFAULT_BUDGET
        self.walk = walk_of(self.grid, op.blocks, op.plan.block_size, budget)
        self.scratch = Workspace(self.acc)
        self.coordinates = Coordinates(op, self.grid)
        self._masks: dict[tuple[int, int], Tensor] = {}
        self._masks_of: RowStep | None = None
        self._mask_is_shared = self.programs.mask is not None and not self.programs.mask.inputs & {"b", "h"}

    def by_group(self, x: Tensor) -> Tensor:
        """`[B, Hq, ...]` as a view `[B, Hkv, group, ...]`."""
        return x.detach().unflatten(1, (self.grid.kv_heads, self.grid.group))

    # -- cuts -----------------------------------------------------------------------------------------------------
    def rows(self, x: Tensor, heads: Heads, step: RowStep) -> Tensor:
        """Step's rows of `[B, Hkv, group, Sq, X]` as `[matrices, group * rows, X]`, a view where strides allow."""
        part = x[heads.b0 : heads.b1, heads.k0 : heads.k1, heads.g0 : heads.g1, step.q0 : step.q1]
        return part.reshape(heads.count, -1, x.shape[-1]) if part.numel() else part.new_empty(heads.count, 0, 0)

    def columns(self, x: Tensor, heads: Heads, chunk: Chunk) -> Tensor:
        """Chunk's keys of `[B, Hkv, Skv, X]` as `[matrices, columns, X]`, a view where they are one run."""
        part = x[heads.b0 : heads.b1, heads.k0 : heads.k1]
        if chunk.index is None:
            part = part[:, :, chunk.runs[0][0] : chunk.runs[0][1]]
        elif len(chunk.runs) <= _FEW_RUNS:
            part = torch.cat([part[:, :, k0:k1] for k0, k1 in chunk.runs], 2)
        else:
            part = part.index_select(2, chunk.index)
        return part[0] if heads.b1 - heads.b0 == 1 else part.reshape(heads.count, chunk.columns, x.shape[-1])

    def as_mod_tile(self, tile: Tensor, heads: Heads, step: RowStep) -> Tensor:
        """`[matrices, group * rows, columns]` as `[batch, kv heads, group, rows, columns]`."""
        return tile.view(
            heads.b1 - heads.b0, heads.k1 - heads.k0, heads.g1 - heads.g0, step.q1 - step.q0, tile.shape[-1]
        )

    # -- masks ----------------------------------------------------------------------------------------------------
    def keeps(self, heads: Heads, step: RowStep, chunk: Chunk) -> list[Keep]:
        """Lane bits of every part of the chunk that a mask decides."""
        found: list[Keep] = []
        if self.programs.score_keep is not None:
            keep = self._evaluate(self.programs.score_keep, heads, step, chunk)
            found.append((0, chunk.columns, lane_bits(keep, self.acc)))
        if self._masks_of is not step:
            self._masks_of, self._masks = step, {}
        for part in chunk.partial:
            if part.slot >= 0:
                found.append((part.c0, part.c1, self._stored_bits(step, part)))
            elif self.programs.mask is not None:
                found.append((part.c0, part.c1, self._mask_bits(heads, step, part)))
        return found

    def _mask_bits(self, heads: Heads, step: RowStep, part: Partial) -> Tensor:
        key = (part.k0, part.c1 - part.c0)
        bits = self._masks.get(key)
        if bits is None:
            assert self.programs.mask is not None
            run = Chunk(((part.k0, part.k0 + key[1]),), key[1], (), None)
            bits = lane_bits(self._evaluate(self.programs.mask, heads, step, run), self.acc)
            known = sum(b.numel() for b in self._masks.values())
            if self._mask_is_shared and known + bits.numel() <= _KEPT_MASKS:
                self._masks[key] = bits
        return bits

    def _stored_bits(self, step: RowStep, part: Partial) -> Tensor:
        """A tabulated block's bits as lane bits `[rows, columns]`."""
        assert self.op.blocks is not None and self.op.blocks.bits is not None
        q_block, kv_block = self.op.plan.block_size
        first = part.k0 % kv_block
        row = step.q0 % q_block
        words = self.op.blocks.bits.words[part.slot, row : row + step.q1 - step.q0]
        bits = words.unsqueeze(-1).bitwise_right_shift(torch.arange(32, dtype=torch.int32)).bitwise_and_(1)
        picked = bits.flatten(1)[:, first : first + part.c1 - part.c0]
        return picked.neg().to(torch.int64 if self.acc is torch.float64 else torch.int32)

    def _evaluate(self, program: TorchProgram, heads: Heads, step: RowStep, chunk: Chunk) -> Tensor:
        inputs, origins = self.coordinates.of(heads, step, chunk)
        keep = program(inputs, self.captures, self.acc, origins)[0]
        return keep if keep.dim() else keep.expand(1, 1)

    # -- mods -----------------------------------------------------------------------------------------------------
    def apply_score_mod(self, score: Tensor, heads: Heads, step: RowStep, chunk: Chunk) -> Tensor:
        """score_mod of a contiguous tile, in the same memory or a new tile that may be overwritten."""
        program = self.programs.score
        if program is None:
            return score
        inputs, origins = self.coordinates.of(heads, step, chunk)
        tile = self.as_mod_tile(score, heads, step)
        (result,) = program({"score": tile, **inputs}, self.captures, self.acc, origins)
        return own_tile(result, program.is_fresh(0), tile).view(score.shape)


def own_tile(result: Tensor, fresh: bool, tile: Tensor) -> Tensor:
    """`result` if the caller may overwrite it and it has the tile's layout, else its copy in `tile`."""
    if result is tile or (fresh and result.shape == tile.shape and result.is_contiguous()):
        return result
    return tile.copy_(result)


def keep_only(tile: Tensor, keeps: Sequence[Keep]) -> None:
    """Set what the masks hide to +0, whatever was there, NaN included. `tile` is a mod tile."""
    for c0, c1, bits in keeps:
        part = tile if c1 - c0 == tile.shape[-1] else tile[..., c0:c1]
        lanes(part).bitwise_and_(bits)


def hide(tile: Tensor, keeps: Sequence[Keep]) -> None:
    """Set what the masks hide to -inf, whatever was there. `tile` is a mod tile."""
    keep_only(tile, keeps)
    minus_inf = lanes(torch.tensor(-math.inf, dtype=tile.dtype))
    for c0, c1, bits in keeps:
        part = tile if c1 - c0 == tile.shape[-1] else tile[..., c0:c1]
        lanes(part).bitwise_or_(bits.bitwise_not().bitwise_and_(minus_inf))


class Coordinates:
    """The integer inputs of mods, global: local index plus the call's IndexBase."""

    def __init__(self, op: Operands, grid: Grid) -> None:
        base, self._grid = op.base, grid
        self._b_off, self._h_off = (base.b_off, base.h_off) if base is not None else (0, 0)
        q_block, kv_block = base.block_size if base is not None else (1, 1)
        if base is not None and op.blocks is not None:
            q_block, kv_block = op.plan.block_size
        self._q_base = None if base is None else base.q_base
        self._kv_base = None if base is None else base.kv_base
        self._blocks = (q_block, kv_block)
        self._ready: tuple[Tensor, Tensor, Tensor, Tensor] | None = None
        self._last: tuple[tuple, tuple[dict[str, Tensor], dict[str, int]]] | None = None

    def _axes(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """b [B,1,1,1,1], h [Hkv,group,1,1], q [Sq,1], kv [Skv]."""
        if self._ready is None:
            grid = self._grid
            b = torch.arange(self._b_off, self._b_off + grid.batch, dtype=torch.int32)
            h = torch.arange(self._h_off, self._h_off + grid.kv_heads * grid.group, dtype=torch.int32)
            self._ready = (
                b.view(-1, 1, 1, 1, 1),
                h.view(grid.kv_heads, grid.group, 1, 1),
                _axis(grid.q_len, self._q_base, self._blocks[0]).view(-1, 1),
                _axis(grid.kv_len, self._kv_base, self._blocks[1]),
            )
        return self._ready

    def of(self, heads: Heads, step: RowStep, chunk: Chunk) -> tuple[dict[str, Tensor], dict[str, int]]:
        """Inputs of a mod over a tile, and the first value of those that count up by one."""
        key = (heads, step.q0, step.q1, chunk.runs)
        if self._last is not None and self._last[0] == key:
            return self._last[1]
        b, h, q, kv = self._axes()
        k0, k1 = chunk.runs[0]
        inputs = {
            "b": b[heads.b0 : heads.b1],
            "h": h[heads.k0 : heads.k1, heads.g0 : heads.g1],
            "q_idx": q[step.q0 : step.q1],
            "kv_idx": kv[k0:k1] if chunk.index is None else kv.index_select(0, chunk.index),
        }
        origins = {
            "b": heads.b0 + self._b_off,
            "h": heads.k0 * self._grid.group + heads.g0 + self._h_off,
        }
        if self._q_base is None:
            origins["q_idx"] = step.q0
        if self._kv_base is None and chunk.index is None:
            origins["kv_idx"] = k0
        self._last = (key, (inputs, origins))
        return inputs, origins


def _axis(length: int, base: Tensor | None, block: int) -> Tensor:
    local = torch.arange(length, dtype=torch.int32)
    return local if base is None else local + base.repeat_interleave(block)[:length]


def constant_value(node: Node) -> float | None:
    """The number a node always is, or None."""
    return float(node.value) if node.is_const else None


def like_strides(x: Tensor, last: int, dtype: torch.dtype, zero: bool = False) -> Tensor:
    """A dense tensor of `x`'s shape with `last` columns, its dimensions laid out in the order of `x`'s strides."""
    shape = (*x.shape[:-1], last)
    order = sorted(range(x.dim()), key=lambda d: -x.stride(d)) if x.numel() else list(range(x.dim()))
    make = torch.zeros if zero else torch.empty
    dense = make([shape[d] for d in order], dtype=dtype)
    return dense.permute([order.index(d) for d in range(x.dim())])
