"""Derived Jacobian factors are torch autograd's, kinks included."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flexbwd.modgraph.derive import jacobians
from flexbwd.modgraph.ir import I32, Builder, F, topological
from tests.host.modgraph.programs import (
    BINARY,
    LANES,
    SMOOTH,
    STEPS,
    Step,
    build,
    float_leaves,
    float_programs,
    run,
    run_in_torch,
)


def assert_derived_equals_autograd(program: list[Step], seed: int) -> int:
    """Compares on lanes where all is finite; the number of those lanes."""
    leaves, inputs = float_leaves(seed)
    lanes = [x.clone().requires_grad_() for x in leaves[:3]]
    out, fine = run_in_torch(program, [*lanes, leaves[3]])
    want = torch.autograd.grad(out.sum(), lanes, allow_unused=True) if out.requires_grad else (None,) * 3
    b = Builder()
    root, wrt = build(program, b)
    got = run(jacobians(b, root, wrt), {"score": leaves[0], **inputs}, {wrt[1]: leaves[1], wrt[2]: leaves[2]})
    for g, w in zip(got, want, strict=True):
        w = torch.zeros(LANES, dtype=torch.float64) if w is None else w
        ok = fine & (w.abs() < 1e6)
        torch.testing.assert_close(g[ok], w[ok], rtol=1e-8, atol=1e-8)
    return int(fine.sum())


@settings(max_examples=400)
@given(program=float_programs(), seed=st.integers(0, 3))
def test_jacobians_of_random_programs(program, seed):
    assert_derived_equals_autograd(program, seed)


@pytest.mark.parametrize("op", [*SMOOTH, *STEPS])
def test_unary_rules(op):
    assert assert_derived_equals_autograd([Step(op, (0,))], 0) > 5


@pytest.mark.parametrize("op", BINARY)
@pytest.mark.parametrize("args", [(0, 1), (0, 0), (1, 3)], ids=str)
def test_binary_rules(op, args):
    assert assert_derived_equals_autograd([Step(op, args)], 0) > 5


@pytest.mark.parametrize("op", BINARY)
@pytest.mark.parametrize("number", [0.5, 2.0, -1.5, 3.0])
@pytest.mark.parametrize("side", ["left", "right"])
def test_binary_rules_beside_a_constant(op, number, side):
    constant = Step("const", (), number)
    args = (-1, 0) if side == "left" else (0, -1)
    assert assert_derived_equals_autograd([constant, Step(op, args)], 0) > 5


@pytest.mark.parametrize("op", ["max", "min"])
def test_ties_split_in_halves(op):
    b = Builder()
    s, u = b.input("score"), b.load(0, F)
    factors = jacobians(b, b.emit(op, s, u), [s, u])
    same = torch.full((LANES,), 2.0, dtype=torch.float64)
    for value in run(factors, {"score": same}, {u: same}):
        assert (value == 0.5).all()


# -- structure --------------------------------------------------------------------------------------------------------
@pytest.fixture
def b() -> Builder:
    return Builder()


def score_factor(b, root):
    return jacobians(b, root, [b.input("score")])[0]


def test_additive_mods_have_factor_one(b):
    distance = b.cast(b.arith("sub", b.input("q_idx"), b.input("kv_idx")), F)
    root = b.arith("add", b.input("score"), b.arith("mul", b.load(0, F, [b.input("h")]), distance))
    one, slope = jacobians(b, root, [b.input("score"), b.load(0, F, [b.input("h")])])
    assert one.is_value(1)
    assert slope is distance


@pytest.mark.parametrize("cap", [20.0, 30.0, 49.0, 50.0, 1 / 3])
def test_softcap_is_one_minus_tanh_squared(b, cap):
    t = b.unary("tanh", b.arith("div", b.input("score"), b.const(cap)))
    j = score_factor(b, b.arith("mul", b.const(cap), t))
    assert j is b.emit("sub", b.const(1.0), b.emit("mul", t, t))


def test_scalings_that_cancel_have_factor_one(b):
    half = b.emit("mul", b.input("score"), b.const(0.5))
    assert score_factor(b, b.emit("mul", half, b.const(2.0))).is_value(1)


def test_a_mod_that_ignores_the_score_has_factor_zero(b):
    table = b.load(0, F, [b.input("q_idx"), b.input("kv_idx")])
    zero, one = jacobians(b, table, [b.input("score"), table])
    assert zero.is_value(0)
    assert one.is_value(1)


def test_one_parameter_read_at_two_places_is_two_factors(b):
    row, col = b.load(0, F, [b.input("q_idx")]), b.load(0, F, [b.input("kv_idx")])
    root = b.emit("mul", b.emit("mul", row, col), b.input("score"))
    d_row, d_col = jacobians(b, root, [row, col])
    assert d_row is b.emit("mul", b.input("score"), col)
    assert d_col is b.emit("mul", b.input("score"), row)


def test_one_load_used_twice_adds_up(b):
    gain = b.load(0, F)
    root = b.emit("add", b.emit("mul", gain, b.input("score")), gain)
    (factor,) = jacobians(b, root, [gain])
    assert factor is b.emit("add", b.input("score"), b.const(1.0))


def test_a_load_found_through_another_load_is_a_cut_point(b):
    bucket = b.load(0, I32, [b.input("kv_idx")])
    value = b.load(1, F, [bucket])
    root = b.arith("mul", value, b.input("score"))
    zero, factor = jacobians(b, root, [bucket, value])
    assert zero.is_value(0)
    assert factor is b.input("score")


def test_a_float_that_becomes_an_index_gets_no_gradient(b):
    step = b.load(0, F)
    index = b.cast(b.unary("floor", b.arith("mul", step, b.cast(b.input("kv_idx"), F))), I32)
    value = b.load(1, F, [index])
    (factor,) = jacobians(b, b.arith("add", b.input("score"), value), [step])
    assert factor.is_value(0)


def test_detach_stops(b):
    s, gain = b.input("score"), b.load(0, F)
    root = b.emit("mul", b.emit("detach", b.emit("mul", s, gain)), s)
    d_score, d_gain = jacobians(b, root, [s, gain])
    assert d_score.op == "detach"
    assert d_gain.is_value(0)


def test_other_inputs_and_unreached_loads_have_factor_zero(b):
    wrt = [b.load(3, F), b.input("q_idx")]
    assert all(j.is_value(0) for j in jacobians(b, b.input("score"), wrt))


def test_the_branch_not_taken_cannot_spoil_the_factor(b):
    """where(s > 0, sqrt(s), 0) at s < 0: sqrt'(s) is NaN, the factor is 0; torch gives NaN."""
    s, zero = b.input("score"), b.const(0.0)
    root = b.where(b.compare("gt", s, zero), b.unary("sqrt", s), zero)
    lanes = torch.linspace(-2, 2, LANES, dtype=torch.float64)
    (value,) = run([score_factor(b, root)], {"score": lanes}, {})
    assert value[lanes < 0].eq(0).all()
    assert value[lanes > 0].isfinite().all()


def test_infinite_constants_in_other_branches_leave_no_nan(b):
    c, s = b.compare("lt", b.input("q_idx"), b.input("kv_idx")), b.input("score")
    root = b.where(c, b.const(-math.inf), b.emit("mul", s, s))
    nodes = list(topological([score_factor(b, root)]))
    assert not any(n.is_const and math.isnan(n.value) for n in nodes)


def test_nodes_without_a_path_get_no_adjoint(b):
    """The factor of a cheap leaf does not carry the derivative of what it never meets."""
    s, u = b.input("score"), b.load(0, F)
    root = b.emit("mul", b.unary("tanh", s), u)
    (factor,) = jacobians(b, root, [u])
    assert factor is b.unary("tanh", s)
    assert score_factor(b, root).op == "mul"


def test_deep_chains_need_no_recursion(b):
    node = b.input("score")
    for _ in range(3000):
        node = b.emit("tanh", node)
    assert score_factor(b, node).op == "mul"
