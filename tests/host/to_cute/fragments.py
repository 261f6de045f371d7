"""Runs mods over fragments with the DSL's CPU JIT: every "thread" of every tile in turn, in both orientations."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

os.environ.setdefault("CUTE_DSL_ARCH", "sm_90a")

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Float32, Int32
from cutlass.cute.runtime import from_dlpack
from torch import Tensor

from flexbwd.modgraph.extents import Extents
from flexbwd.modgraph.frontend import ModKind, trace
from flexbwd.modgraph.modplan import ModPlan
from flexbwd.modgraph.plan_mods import build_mod_plan
from flexbwd.modgraph.to_torch import evaluate
from flexbwd.sm90.mods import Axis, Limits, ModConfig, ModUse
from flexbwd.sm90.numerics import column_of
from flexbwd.sparsity.tensors import IndexBase

LOG2_E = math.log2(math.e)
ROWS = 16  # of a tile: two rows each of eight threads
SCALE = 0.7


_NO_LIMITS = Limits()


@dataclass(frozen=True)
class Outputs:
    """Tensors `[B*H, rows, columns]` by query and key: in `scores` raw q·k, out s' * log2(e) or -inf."""

    scores: cute.Tensor
    factors: cute.Tensor
    jacobians: cute.Tensor  # [sites, B*H, rows, columns]
    places: cute.Tensor  # int32, the same: offset of the entry in its contiguous capture


@cute.jit
def run(
    config: cutlass.Constexpr[Any],
    held: cutlass.Constexpr[int],
    by_query: Outputs,
    by_key: Outputs,
    arguments: tuple,
    scale_log2: Float32,
    heads: Int32,
    limited: cutlass.Constexpr[tuple],
    ends: tuple,
):
    """Both orientations over all elements; a thread holds `held` columns. `limited`: which of `ends` are limits."""
    limits = Limits(*(e if used else None for e, used in zip(ends, limited, strict=True)))
    for orientation in cutlass.range_constexpr(2):
        out = by_query if cutlass.const_expr(orientation == 0) else by_key
        rows_are = "q" if cutlass.const_expr(orientation == 0) else "kv"
        offsets = tuple(column_of(j) for j in range(held))
        down, across = cute.size(out.scores, mode=[1 + orientation]), cute.size(out.scores, mode=[2 - orientation])
        for bh in cutlass.range(cute.size(out.scores, mode=[0])):
            head = config.head(arguments, bh // heads, bh % heads, scale_log2)
            for row in cutlass.range(down // 2):
                first = (row // 8) * ROWS + row % 8
                rows = head.rows(Axis(first, (0, 8)), rows_are)
                for col in cutlass.range(across // held):
                    start = (col // 4) * (4 * held) + 2 * (col % 4)
                    tile = rows.tile(Axis(start, offsets))
                    visit(tile, out, bh, first, start, orientation, limits)


@cute.jit
def visit(
    tile: cutlass.Constexpr[Any],
    out: Outputs,
    bh: Int32,
    first: Int32,
    start: Int32,
    orientation: cutlass.Constexpr[int],
    limits: cutlass.Constexpr[Limits],
):
    """One thread's fragment."""
    held = len(tile.axis.offsets)
    frag = cute.make_rmem_tensor((2, held), Float32)
    factor = cute.make_rmem_tensor((2, held), Float32)
    for r in cutlass.range_constexpr(2):
        for j in cutlass.range_constexpr(held):
            row, col = first + 8 * r, start + tile.axis.offsets[j]
            q, kv = (row, col) if orientation == 0 else (col, row)
            frag[r, j] = out.scores[bh, q, kv]
            for s, site in enumerate(tile.sites):
                out.jacobians[s, bh, q, kv] = site.jacobian(r, j, frag[r, j])
                place = Int32(0)
                for i, n in zip(site.index(r, j), site.shape, strict=False):
                    place = place * n + i
                out.places[s, bh, q, kv] = place
    tile.score_and_factor(frag, factor)
    tile.mask(frag, True, limits)
    for r in cutlass.range_constexpr(2):
        for j in cutlass.range_constexpr(held):
            row, col = first + 8 * r, start + tile.axis.offsets[j]
            q, kv = (row, col) if orientation == 0 else (col, row)
            out.scores[bh, q, kv] = frag[r, j]
            out.factors[bh, q, kv] = factor[r, j]


@dataclass
class Result:
    """What came out over the real elements, `[B, H, Sq, Skv]`, and what fp64 gives."""

    score: Tensor
    factor: Tensor
    jacobians: Tensor
    places: Tensor


def plan_of(score: Any = None, mask: Any = None) -> tuple[ModPlan, tuple[Tensor, ...]]:
    """Two callables traced and joined, and their captured tensors."""
    s, score_captures = _traced(score, ModKind.SCORE)
    m, mask_captures = _traced(mask, ModKind.MASK)
    return build_mod_plan(s, None, m), (*score_captures, *mask_captures)


def _traced(mod: Any, kind: ModKind) -> tuple[Any, tuple[Tensor, ...]]:
    if mod is None:
        return None, ()
    found, tensors = trace(mod, kind, device="cpu")
    return found, tuple(t.detach() for t in found.prologue.run(tensors))


def raw_scores(extents: Extents, held: int = 4) -> Tensor:
    """q·k of whole tiles, `[B*H, rows, columns]`; what pads is 1e4, and must reach nothing."""
    rows, columns = (-(-n // (4 * held)) * 4 * held for n in (extents.q_idx, extents.kv_idx))
    rows, columns = (-(-n // ROWS) * ROWS for n in (rows, columns))
    found = torch.full((extents.b * extents.h, rows, columns), 1e4)
    found[:, : extents.q_idx, : extents.kv_idx] = 2 * torch.randn(extents.b * extents.h, extents.q_idx, extents.kv_idx)
    return found


def on_host(
    plan: ModPlan,
    captures: Sequence[Tensor],
    extents: Extents,
    raw: Tensor,
    precision: str = "fast",
    base: IndexBase | None = None,
    held: int = 4,
    limits: Limits = _NO_LIMITS,
    whole: bool = False,
) -> tuple[Result, Result]:
    """The kernel's code on the CPU, rows = queries and rows = keys; `whole`: with the lanes that pad."""
    use = ModUse(extents, (raw.shape[1], raw.shape[2]), backward=True, precision=precision, host=True)
    use = use if base is None else ModUse(extents, (ROWS, 4 * held), True, True, precision, True)
    config, arguments = ModConfig.of(plan, captures, use, base)
    sites = max(1, len(config.graph.sites) if config.graph is not None else 0)

    def outputs() -> tuple[Tensor, ...]:
        wide = (sites, *raw.shape)
        return raw.clone(), torch.zeros_like(raw), torch.zeros(wide), torch.zeros(wide, dtype=torch.int32)

    both = outputs(), outputs()
    packed = [Outputs(*(from_dlpack(t) for t in one)) for one in both]
    numbers = (Float32(SCALE * LOG2_E), Int32(extents.h))
    limited, ends = tuple(x is not None for x in limits), tuple(Int32(x or 0) for x in limits)
    values = tuple(_argument(a) for a in arguments)
    compiled = cute.compile(run, config, held, *packed, values, *numbers, limited, ends)
    compiled(*packed, values, *numbers, ends)
    shown = Extents(extents.b, extents.h, *raw.shape[1:]) if whole else extents
    return tuple(_real(one, shown) for one in both)  # type: ignore[return-value]


def _argument(value: Any) -> Any:
    if isinstance(value, Tensor):
        return from_dlpack(value)
    return Float32(value) if isinstance(value, float) else Int32(int(value))


def _real(tensors: tuple[Tensor, ...], e: Extents) -> Result:
    def cut(t: Tensor) -> Tensor:
        t = t[..., : e.q_idx, : e.kv_idx]
        return t.view(*t.shape[:-3], e.b, e.h, e.q_idx, e.kv_idx)

    return Result(*(cut(t.contiguous()[..., : e.q_idx, : e.kv_idx].contiguous()) for t in tensors))


def expected(
    plan: ModPlan, captures: Sequence[Tensor], extents: Extents, raw: Tensor, dtype: torch.dtype,
    base: IndexBase | None = None,
) -> Result:  # fmt: skip
    """The same by torch, in `dtype`."""
    e = extents
    shape = (e.b, e.h, e.q_idx, e.kv_idx)
    inputs = coordinates(e, base)
    inputs["score"] = raw[:, : e.q_idx, : e.kv_idx].view(shape).to(dtype) * SCALE
    sites = [s for s in plan.loads if s.jacobian is not None]
    roots = [plan.forward, plan.j_score, *(s.jacobian for s in sites)]
    score, factor, *jacobians = (v.expand(shape) for v in evaluate(roots, inputs, captures, dtype))
    keep = torch.ones(shape, dtype=torch.bool)
    for predicate in (plan.mask, plan.score_keep):
        if predicate is not None:
            keep = keep & evaluate([predicate], inputs, captures, dtype)[0]
    places = [_places(s.node, inputs, captures, shape) for s in sites]
    score = (score * LOG2_E).masked_fill(~keep, -math.inf)
    none = torch.zeros((1, *shape))
    return Result(
        score, factor, torch.stack(jacobians) if sites else none, torch.stack(places) if sites else none.int()
    )


def coordinates(e: Extents, base: IndexBase | None) -> dict[str, Tensor]:
    b, h, q, kv = (torch.arange(n, dtype=torch.int32) for n in e)
    if base is not None:
        b, h = b + base.b_off, h + base.h_off
        if base.q_base is not None:
            q = q + base.q_base.repeat_interleave(base.block_size[0])[: q.numel()]
        if base.kv_base is not None:
            kv = kv + base.kv_base.repeat_interleave(base.block_size[1])[: kv.numel()]
    return {"b": b.view(-1, 1, 1, 1), "h": h.view(-1, 1, 1), "q_idx": q.view(-1, 1), "kv_idx": kv}


def _places(load: Any, inputs: dict[str, Tensor], captures: Sequence[Tensor], shape: tuple[int, ...]) -> Tensor:
    place = torch.zeros(shape, dtype=torch.int64)
    for index, n in zip(
        evaluate(load.args, inputs, captures, torch.float64), captures[int(load.attr)].shape, strict=False
    ):
        index = torch.where(index < 0, index + n, index).clamp(0, n - 1)
        place = place * n + index
    return place.int()


def assert_same(got: Result, want: Result, rough: Result, sites: int) -> None:
    """Masks bit for bit; values within a few times the error of eager fp32, or 3e-6 of the largest value."""
    hidden = want.score == -math.inf
    assert torch.equal(got.score == -math.inf, hidden)
    pairs = [("score", got.score, want.score, rough.score), ("factor", got.factor, want.factor, rough.factor)]
    pairs += [(f"site {s}", got.jacobians[s], want.jacobians[s], rough.jacobians[s]) for s in range(sites)]
    for name, g, w, r in pairs:
        g, w, r = (x.double()[~hidden] for x in (g, w, r))
        if not w.numel():
            continue
        budget = 4 * (r - w).abs() + 3e-6 * (1 + w.abs().max())
        worst = ((g - w).abs() - budget).max()
        assert worst <= 0, f"{name} is off by {float((g - w).abs().max())}"
    if sites:
        assert torch.equal(got.places[:, ~hidden], want.places[:, ~hidden])
