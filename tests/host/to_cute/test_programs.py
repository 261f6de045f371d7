"""Random graphs and random mods as kernel code, on the CPU."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from flexbwd.modgraph.extents import Extents
from flexbwd.modgraph.ir import I32, I64, Builder, F, topological

if find_spec("cutlass") is None:
    pytest.skip("the CuTe DSL has wheels for Linux only", allow_module_level=True)

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64
from cutlass.cute.runtime import from_dlpack

from flexbwd.modgraph.analyze import exactness
from flexbwd.modgraph.to_cute.evaluate import Evaluator
from flexbwd.modgraph.to_cute.kinds import LoweringBuilder
from flexbwd.modgraph.to_cute.loads import Captures
from flexbwd.modgraph.to_cute.ops import Emit
from flexbwd.modgraph.to_cute.prepare import ModGraph
from tests.host.grid.programs import captured, compiled
from tests.host.grid.programs import programs as mod_programs
from tests.host.modgraph.programs import (
    LANES,
    build,
    build_int,
    float_leaves,
    float_programs,
    int_inputs,
    int_programs,
    run_in_torch,
    run_int,
)  # fmt: skip
from tests.host.to_cute.fragments import assert_same, expected, on_host, plan_of, raw_scores

_DSL = {F: Float32, I32: Int32, I64: Int64}


@cute.jit
def evaluate_lanes(graph: cutlass.Constexpr[Any], roots: cutlass.Constexpr[Any], leaves: tuple, out: tuple):
    """out[k][lane] = root k, of the leaves' lanes; leaves: score, u, v, and the four indices."""
    for lane in cutlass.range(LANES):
        names = ("score", "scale", "scale_log2", "b", "h", "q_idx", "kv_idx")
        values = {name: leaf[lane].ir_value() for name, leaf in zip(names, leaves, strict=True)}
        at = Evaluator(graph, Emit(host=True), Captures(Emit(host=True), {}), values)
        for k, root in enumerate(roots):
            value = at.value(root, 0, 0)
            kind = _DSL.get(root.dtype, Boolean)
            out[k][lane] = out[k].element_type(kind(value))


def run_graphs(roots: list, leaves: list[torch.Tensor], kinds: list[torch.dtype]) -> list[torch.Tensor]:
    graph = ModGraph(None, None, None, None, exact=frozenset(exactness(roots)))
    out = [torch.zeros(LANES, dtype=k) for k in kinds]
    packed = tuple(from_dlpack(t) for t in leaves), tuple(from_dlpack(t) for t in out)
    cute.compile(evaluate_lanes, graph, roots, *packed)(*packed)
    return out


@given(st.lists(int_programs(), min_size=40, max_size=40))
@settings(max_examples=3, phases=[Phase.generate])
def test_integer_graphs_are_exact(programs):
    inputs = int_inputs(1)
    builder = LoweringBuilder()
    want = [run_int(p, inputs).expand(LANES) for p in programs]
    zero = torch.zeros(LANES)
    leaves = [zero, zero, zero, *(inputs[n] for n in ("b", "h", "q_idx", "kv_idx"))]
    kinds = [torch.int8 if w.dtype is torch.bool else w.dtype for w in want]
    for got, w in zip(run_graphs([build_int(p, builder) for p in programs], leaves, kinds), want, strict=True):
        assert torch.equal(got.to(w.dtype), w)


@given(st.lists(float_programs(), min_size=40, max_size=40))
@settings(max_examples=3, phases=[Phase.generate])
def test_float_graphs_are_as_near_as_eager_fp32(programs):
    (score, u, v, d), inputs = float_leaves(3)
    builder, roots = LoweringBuilder(), []
    for program in programs:
        plain = Builder()
        root, (_, first, second) = build(program, plain)
        replace = {first: builder.input("scale"), second: builder.input("scale_log2")}
        roots += builder.substitute([root], replace)
    leaves = [t.float() for t in (score, u, v)] + [inputs[n] for n in ("b", "h", "q_idx", "kv_idx")]
    found = run_graphs(roots, leaves, [torch.float32] * len(roots))
    for program, got in zip(programs, found, strict=True):
        exact, fine = run_in_torch(program, [score.float().double(), u.float().double(), v.float().double(), d])
        rough, _ = run_in_torch(program, [score.float(), u.float(), v.float(), d.float()])
        error = (got.double() - exact).abs()
        budget = 8 * (rough.double() - exact).abs() + 1e-5 * (1 + exact.abs())
        bad = fine & ~(error <= budget)
        # next to a step, or where a cancellation amplifies, either result is right
        assert bad.sum() <= 3, (program, got[bad], exact[bad])


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("op", ["fdiv", "tdiv", "mod", "fmod", "shl", "shr", "pow"])
def test_run_time_divisors_and_shifts(op, dtype):
    from tests.host.modgraph.programs import TORCH

    g = torch.Generator().manual_seed(4)
    x, y = torch.randint(-50, 50, (LANES,), generator=g), torch.randint(-7, 8, (LANES,), generator=g)
    if op in ("shl", "shr", "pow"):
        y = y.abs()
    y[y == 0] = 3
    builder = LoweringBuilder()
    nodes = [builder.cast(builder.input(n), I64 if dtype is torch.int64 else I32) for n in ("q_idx", "kv_idx")]
    zero, none = torch.zeros(LANES), torch.zeros(LANES, dtype=torch.int32)
    leaves = [zero, zero, zero, none, none, x.int(), y.int()]
    (got,) = run_graphs([builder.emit(op, *nodes)], leaves, [dtype])
    assert torch.equal(got, TORCH[op](x.to(dtype), y.to(dtype)))


def test_what_traps_in_hardware_does_not():
    builder = LoweringBuilder()
    x, y = builder.input("q_idx"), builder.input("kv_idx")
    least = torch.full((LANES,), -(2**31), dtype=torch.int32)
    by = (torch.arange(LANES) % 2 - 1).int()  # -1, 0, -1, …
    zero, none = torch.zeros(LANES), torch.zeros(LANES, dtype=torch.int32)
    roots = [builder.emit(op, x, d) for op in ("fdiv", "tdiv", "mod", "fmod") for d in (y, builder.const(-1))]
    found = run_graphs(roots, [zero, zero, zero, none, none, least, by], [torch.int32] * len(roots))
    for root, got in zip(roots, found, strict=True):
        assert (got[::2] == (-(2**31) if root.op in ("fdiv", "tdiv") else 0)).all()


@given(mod_programs, st.sampled_from(["fast", "accurate"]))
@settings(max_examples=14, phases=[Phase.generate])  # a compile each: no shrinking
def test_random_mods_match_torch(program, precision):
    score, mask = compiled(program, captured(5))
    extents = Extents(2, 4, 26, 31)
    plan, captures = plan_of(score, mask)
    raw = raw_scores(extents)
    want, rough = (expected(plan, captures, extents, raw, t) for t in (torch.float64, torch.float32))
    sites = sum(s.jacobian is not None for s in plan.loads)
    for got in on_host(plan, captures, extents, raw, precision):
        assert_same(got, want, rough, sites)


def test_graphs_of_programs_hold_all_ops():
    """The strategies above reach every op that is no load."""
    from flexbwd.modgraph.ir import ARITY

    builder = LoweringBuilder()
    seen = {"in", "const", "load", "detach", "where", "cast"}
    from tests.host.modgraph.programs import BINARY, INT_BINARY, INT_UNARY, SMOOTH, STEPS

    seen |= {*BINARY, *INT_BINARY, *INT_UNARY, *SMOOTH, *STEPS, "eq", "ne", "lt", "le", "gt", "ge"}
    assert set(ARITY) <= seen
    assert list(topological([builder.input("raw")]))
