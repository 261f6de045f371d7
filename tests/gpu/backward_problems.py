"""Problems for the backward kernels: inputs, and the gradients that the fp64 definition gives."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from flexbwd.modgraph.extents import Extents
from flexbwd.modgraph.frontend import ModKind, trace
from flexbwd.modgraph.plan_mods import build_mod_plan
from flexbwd.plan import Gradients, Needs
from flexbwd.reference import attention_reference
from flexbwd.sm90 import Operands, backward
from flexbwd.sm90.backward.tile import BwdTile, backward_tile
from flexbwd.sm90.lists import TileLists
from flexbwd.sm90.mods import NO_MODS, ModConfig, ModUse
from flexbwd.sm90.walks import Band, Dense, Lists, Walk
from flexbwd.testing import poisoned

BUDGET = {torch.bfloat16: 5e-3, torch.float16: 7e-4}  # relative, norm-wise: rounding of P, dS and of the gradient
Mod = Callable[..., Any]


@dataclass(frozen=True)
class Shape:
    """Sizes and numerics of a problem."""

    lengths: tuple[int, int]  # queries, keys
    dims: tuple[int, int] = (64, 64)
    heads: tuple[int, int] = (2, 2)
    batch: int = 2
    dtype: torch.dtype = torch.bfloat16
    scale: float | None = None
    bshd: bool = False

    @property
    def score_scale(self) -> float:
        return 1 / math.sqrt(self.dims[0]) if self.scale is None else self.scale


@dataclass(frozen=True, eq=False)
class Problem:
    op: Operands
    out: Tensor
    lse: Tensor
    grad_out: Tensor
    grad_lse: Tensor | None
    want: tuple[Tensor, ...]


def make(
    shape: Shape,
    keep: Tensor | None = None,
    score_mod: Mod | None = None,
    grad_lse: bool = False,
    learned: tuple[Tensor, ...] = (),
) -> Problem:
    """Random inputs and the fp64 gradients, those of `learned` tensors last; `keep` broadcasts to [B, Hq, Sq, Skv]."""
    generator = torch.Generator("cuda").manual_seed(0)

    def normal(h: int, s: int, d: int) -> Tensor:
        size = (shape.batch, s, h, d) if shape.bshd else (shape.batch, h, s, d)
        t = torch.randn(size, device="cuda", generator=generator).to(shape.dtype)
        return t.transpose(1, 2) if shape.bshd else t

    (q_len, kv_len), (dim, value_dim), (hq, hkv) = shape.lengths, shape.dims, shape.heads
    op = Operands.of(
        normal(hq, q_len, dim), normal(hkv, kv_len, dim), normal(hkv, kv_len, value_dim), shape.score_scale
    )
    grad_out = normal(hq, q_len, value_dim)
    rows = torch.randn(shape.batch, hq, q_len, device="cuda", generator=generator) if grad_lse else None
    leaves = [t.detach().double().requires_grad_() for t in (op.query, op.key, op.value)]
    out, lse = attention_reference(*leaves, score_mod, None, shape.score_scale, keep=keep)
    upstream = [grad_out.double(), torch.zeros_like(lse) if rows is None else rows.double()]
    alive = lse.detach() > -math.inf
    want = torch.autograd.grad(
        [out, torch.where(alive, lse, 0.0)], [*leaves, *learned], upstream, allow_unused=True, materialize_grads=True
    )
    return Problem(op, out.detach().to(shape.dtype), lse.detach().float(), grad_out, rows, tuple(want))


def band_keep(band: Band, lengths: tuple[int, int]) -> Tensor:
    """The scores that a band keeps, [Sq, Skv]."""
    distance = torch.arange(lengths[0], device="cuda")[:, None] - torch.arange(lengths[1], device="cuda")
    keep = torch.ones_like(distance, dtype=torch.bool)
    if band.lo is not None:
        keep &= distance >= band.lo
    if band.hi is not None:
        keep &= distance <= band.hi
    return keep


def tile_lists(keep: Tensor, tile: BwdTile, batch: int, kv_heads: int) -> TileLists:
    """The lists by key tile of `keep` [B|1, H|1, Sq, Skv]; tiles in descending order, to see that any order will do."""
    b, h, q_len, kv_len = keep.shape
    m, n = -(-q_len // tile.tile_m), -(-kv_len // tile.tile_n)
    padded = torch.zeros(b, h, m * tile.tile_m, n * tile.tile_n, dtype=torch.bool, device=keep.device)
    padded[:, :, :q_len, :kv_len] = keep
    inside = torch.zeros_like(padded[:1, :1])
    inside[:, :, :q_len, :kv_len] = True

    def by_tile(t: Tensor) -> Tensor:  # [.., m, n]
        return t.unflatten(3, (n, tile.tile_n)).unflatten(2, (m, tile.tile_m)).transpose(3, 4).flatten(4)

    some = by_tile(padded).any(-1)
    whole = (by_tile(padded) == by_tile(inside)).all(-1)
    ragged = torch.arange(1, n + 1, device=keep.device) * tile.tile_n > kv_len
    kinds = (some & ~whole, whole & some & ragged, whole & some & ~ragged)
    counts = torch.zeros(b, h, n, 4, dtype=torch.int32, device=keep.device)
    tiles = torch.full((b, h, n, m + 3), -7, dtype=torch.int32, device=keep.device)
    for where in range(b * h * n):
        i, j, row = where // (h * n), where // n % h, where % n
        found = [kind[i, j, :, row].nonzero()[:, 0].flip(0) for kind in kinds]
        counts[i, j, row, :3] = torch.tensor([len(f) for f in found], dtype=torch.int32)
        tiles[i, j, row, : sum(len(f) for f in found)] = torch.cat(found).int()
    order = torch.randperm(batch * kv_heads * n, device=keep.device).int()
    return TileLists(counts, tiles, order)


def mods_of(
    problem: Problem, walk: Walk, score_mod: Mod | None, mask_mod: Mod | None, tile: BwdTile | None
) -> tuple[BwdTile, tuple[ModConfig, tuple[Any, ...]], tuple[Tensor, ...]]:
    """The kernel's tile, its mods, and what they capture."""
    op = problem.op
    traced = [
        None if mod is None else trace(mod, kind, device="cuda")
        for mod, kind in ((score_mod, ModKind.SCORE), (mask_mod, ModKind.MASK))
    ]
    captures = tuple(c for t in traced if t is not None for c in t[1])
    plan = build_mod_plan(*(None if t is None else t[0] for t in (traced[0], None, traced[1])))
    if tile is None:
        trained = any(site.jacobian is not None for site in plan.loads)
        tile = backward_tile(op.head_dim, op.value_dim, trained or plan.j_class.value == "nonlinear")
    if score_mod is None and mask_mod is None:
        return tile, (NO_MODS, (0,)), ()
    extents = Extents(op.batch, op.q_heads, op.q_len, op.kv_len)
    use = ModUse(extents, (tile.tile_m, tile.tile_n), backward=True, partial=isinstance(walk, Lists))
    return tile, ModConfig.of(plan, captures, use), captures


def run(
    problem: Problem,
    walk: Walk | Tensor,
    needs: Needs | None = None,
    score_mod: Mod | None = None,
    mask_mod: Mod | None = None,
    tile: BwdTile | None = None,
) -> Gradients:
    """The kernels' gradients; a walk given as `keep` is walked by lists."""
    op = problem.op
    lists = isinstance(walk, Tensor)
    tile, mods, captures = mods_of(problem, Lists(None) if lists else walk, score_mod, mask_mod, tile)  # type: ignore[arg-type]
    if lists:
        walk = Lists(tile_lists(walk, tile, op.batch, op.kv_heads))
    rows = (problem.out, problem.lse, problem.grad_out, problem.grad_lse)
    needs = Needs() if needs is None else needs
    needs = replace(needs, captures=tuple(c.requires_grad for c in captures))
    with poisoned():
        got = backward(op, *rows, needs, walk, mods, tile, captures)
    got.captures = [(c, g) for c, g in zip(captures, got.captures, strict=False) if g is not None]  # type: ignore[misc]
    return got


def check_learned(problem: Problem, learned: tuple[Tensor, ...], walk: Walk | Tensor, **mods: Any) -> None:
    """Gradients of captured tensors, through what the mods' prologue made of them."""
    got = run(problem, walk, **mods)
    captured, grads = zip(*got.captures, strict=True)
    found = torch.autograd.grad(captured, learned, grads)
    for grad, want in zip(found, problem.want[3:], strict=True):
        assert bool(grad.isfinite().all())
        error = float((grad.double() - want.double()).norm() / want.double().norm().clamp_min(1e-9))
        assert error <= 2 * BUDGET[problem.op.query.dtype], f"{error:.2g}"


def check(problem: Problem, walk: Walk | Tensor = Dense(), needs: Needs | None = None, **mods: Any) -> None:  # noqa: B008
    """Run, and compare with fp64 within the budget of rounding."""
    needs = Needs() if needs is None else needs
    got = run(problem, walk, needs, **mods)
    for name, want in zip(("query", "key", "value"), problem.want, strict=False):
        grad = getattr(got, name)
        assert (grad is not None) == getattr(needs, name)
        if grad is not None:
            error = float((grad.double() - want).norm())
            size = float(problem.want[2].norm()) if want.norm() < 1e-3 else float(want.norm())
            assert error <= BUDGET[grad.dtype] * max(size, 1e-9), f"{name}: {error / max(size, 1e-9):.2g}"


__all__ = ["Problem", "Shape", "band_keep", "check", "check_learned", "make", "run", "tile_lists"]
