"""Preparation of graphs, without the DSL: same values, less to do per element."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flexbwd import mods
from flexbwd.modgraph.analyze import depends, exactness
from flexbwd.modgraph.extents import Extents
from flexbwd.modgraph.frontend import ModKind, trace
from flexbwd.modgraph.ir import I32, I64, Builder, Node, topological
from flexbwd.modgraph.plan_mods import build_mod_plan
from flexbwd.modgraph.to_cute.fold import decompose, fold
from flexbwd.modgraph.to_cute.kinds import Kind, KindTable, LoweringBuilder
from flexbwd.modgraph.to_cute.lanes import GUARD_HIGH, GUARD_LOW, Integers, guard_of, lane_bounds
from flexbwd.modgraph.to_cute.prepare import Lowering, ModGraph, prepare
from flexbwd.modgraph.to_cute.summary import summary
from flexbwd.modgraph.to_cute.words import Runs
from tests.host.modgraph.programs import LANES, build, float_leaves, float_programs, run

EXTENTS = Extents(2, 8, 256, 384)
USE = Lowering(EXTENTS, (64, 128), backward=True)


def prepared(name: str, use: Lowering = USE) -> ModGraph:
    entry = mods.get(name)
    kind = ModKind.SCORE if entry.kind == "score" else ModKind.MASK
    found, tensors = trace(entry.example(*use.extents), kind, device="cpu")
    captures = found.prologue.run(tensors)
    plan = build_mod_plan(found, None, None) if kind is ModKind.SCORE else build_mod_plan(None, None, found)
    return prepare(plan, captures, use)


def per_element(graph: ModGraph, *roots: Node) -> list[str]:
    """Ops computed for every single element."""
    return sorted(
        n.op for n in topological(roots) if graph.kinds[n] in (Kind.PAIR, Kind.SCORE) and n.op not in ("in", "const")
    )


@given(st.lists(float_programs(), min_size=1, max_size=3))
@settings(max_examples=150)
def test_folding_changes_rounding_only(programs):
    leaves, inputs = float_leaves(5)
    builder = LoweringBuilder()
    roots = [build(p, builder)[0] for p in programs]
    loads = {}
    table = KindTable()
    folded = decompose(builder, roots, exactness(roots), table)
    folded = fold(builder, folded, exactness(folded), table)
    for n in topological([*roots, *folded]):
        if n.op == "load":
            loads[n] = leaves[1] if n.attr == 0 else leaves[2]
    values = {**inputs, "score": leaves[0]}
    for want, got in zip(run(roots, values, loads), run(folded, values, loads), strict=True):
        want, got = want.double(), got.double()
        fine = (want.abs() < 1e4) & (got.abs() < 1e4)
        bad = fine & ((got - want).abs() > 1e-8 * (1 + want.abs()))
        assert bad.sum() <= LANES // 8  # beside a step or a pole


@pytest.mark.parametrize(
    ("name", "ops"),
    [
        ("alibi", ["add", "mul"]),
        ("head_temperature", ["mul"]),
        ("relative_bias", ["add", "mul"]),
        ("softcap", ["mul", "mul", "tanh"]),
        ("ssmax", ["mul"]),
        ("sigmoid_gate", ["mul"]),
        ("key_bias", ["add", "mul"]),
    ],
)
def test_what_is_left_per_element(name, ops):
    graph = prepared(name)
    assert per_element(graph, graph.score) == ops


def test_score_and_factor_share_the_tanh():
    graph = prepared("softcap")
    assert per_element(graph, graph.score, graph.factor).count("tanh") == 1


@pytest.mark.parametrize("name", ["causal", "sliding_window", "prefix_lm_batch", "chunked_causal", "frame_causal"])
def test_runs_cover_the_usual_masks(name):
    graph = prepared(name)
    for column in ("q_idx", "kv_idx"):
        reads = depends([graph.mask])
        compares = {n for n in reads if n.op in ("lt", "le", "gt", "ge", "eq") and column in reads[n]}
        assert compares == set(graph.runs[column])


def test_a_comparison_that_may_wrap_is_no_run():
    b = LoweringBuilder()
    q, kv = b.input("q_idx"), b.input("kv_idx")
    wraps = b.compare("lt", b.arith("mul", kv, b.const(2**30)), q)
    far = b.compare("lt", b.arith("add", kv, b.const(2**31 - 5)), q)
    bounds = lane_bounds([wraps, far], EXTENTS, based=False)
    assert not Runs(b, [wraps, far], "kv_idx", bounds).found


@pytest.mark.parametrize(
    ("extents", "bits"), [((256, 384), 0), ((250, 384), GUARD_LOW), ((256, 380), GUARD_HIGH)], ids=str
)
def test_guards_follow_from_the_padded_lengths(extents, bits):
    """table[kv - q + Sq - 1] of kv + Sq entries: lanes past the queries read before it, past the keys after it."""
    q_len, kv_len = extents
    table = torch.zeros(q_len + kv_len - 1)
    found, tensors = trace(lambda s, b, h, q, kv: s + table[kv - q + q_len - 1], ModKind.SCORE, device="cpu")
    use = Lowering(Extents(1, 1, q_len, kv_len), (64, 128))
    graph = prepare(build_mod_plan(found, None, None), found.prologue.run(tensors), use)
    assert list(graph.guards.values()) == [(bits,)]


def test_wraps_of_negative_indices_go_where_lengths_allow():
    b = Builder()
    q, size = b.input("q_idx"), b.const(256)
    index = b.arith("sub", q, b.const(0))
    x = b.arith("sub", b.arith("add", q, b.const(3)), b.input("b"))
    wrapped = b.where(b.compare("lt", x, b.const(0)), b.arith("add", x, size), x)
    bounds = lane_bounds([wrapped, index], EXTENTS, based=False)
    assert Integers(b, bounds).rebuild([wrapped]) == [x]
    shifted = b.arith("sub", q, b.const(100))
    wrapped = b.where(b.compare("lt", shifted, b.const(0)), b.arith("add", shifted, size), shifted)
    bounds = lane_bounds([wrapped], EXTENTS, based=False)
    assert Integers(b, bounds).rebuild([wrapped]) == [wrapped]
    assert guard_of(wrapped, 256, bounds) == 0


def test_comparisons_with_wide_integers_become_narrow():
    b = LoweringBuilder()
    limit = b.load(0, I64, [b.input("b")])
    kept = b.compare("lt", b.cast(b.input("kv_idx"), I64), limit)
    (narrow,) = Integers(b, lane_bounds([kept], EXTENTS, based=False)).rebuild([kept])
    assert [a.dtype for a in narrow.args] == [I32, I32]
    clamped = next(a for a in narrow.args if a.op == "cast")
    consts = sorted(n.value for n in topological([clamped]) if n.is_const)
    assert consts == [-1, EXTENTS.kv_idx]


def test_kinds():
    b = LoweringBuilder()
    q, kv, h = b.input("q_idx"), b.input("kv_idx"), b.input("h")
    difference = b.arith("sub", b.arith("add", q, h), kv)
    cases = {
        h: Kind.UNIFORM, q: Kind.Q, b.load(0, I32, [kv]): Kind.KV, difference: Kind.DIFFERENCE,
        b.emit("abs", difference): Kind.DIFFERENCE, b.arith("mul", difference, q): Kind.PAIR,
        b.arith("add", q, kv): Kind.PAIR, b.input("raw"): Kind.SCORE,
    }  # fmt: skip
    table = KindTable()
    assert {n: table[n] for n in cases} == cases
    assert (table.step(difference), table.step(h)) == ((1, -1), None)


def test_very_deep_graphs_are_left_as_they_are():
    b = LoweringBuilder()
    x = b.input("raw")
    for k in range(3000):
        x = b.emit("add", x, b.load(k, x.dtype, [b.input("h")]))
    assert fold(b, [x], set(), KindTable()) == [x]


def test_constants_survive_folding():
    b = LoweringBuilder()
    x = b.emit("add", b.input("raw"), b.const(-math.inf))
    y = b.emit("sub", b.const(2.0), b.emit("mul", b.input("raw"), b.const(-3.0)))
    folded = fold(b, [x, y], set(), KindTable())
    values = run_lanes(folded)
    assert (values[0] == -math.inf).all()
    assert torch.equal(values[1], 2 + 3 * RAW)


RAW = torch.linspace(-2, 2, LANES, dtype=torch.float64)


def run_lanes(roots: list[Node]) -> list[torch.Tensor]:
    return run(roots, {"raw": RAW}, {})


def test_the_summary_says_what_runs_how_often():
    assert summary(prepared("softcap")) == ["per element: 3 mul, sub, tanh", "per head: mul"]
    assert summary(prepared("document_causal")) == [
        "per element: and, eq",
        "per key: 1 load",
        "per query: 1 load",
        "as words of 32 elements: 1 comparison",
    ]
