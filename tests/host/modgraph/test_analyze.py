"""Dependences, precision class, Jacobian class, what is kept, load classes and guards."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flexbwd.modgraph.analyze import (
    classify_load,
    depends,
    exactness,
    guard,
    j_class,
    keep_class,
    outside_dims,
    quotient_by,
)
from flexbwd.modgraph.ir import I32, I64, Builder, F, Node
from flexbwd.modgraph.modplan import Guard, JClass, Keep, LoadClass
from tests.host.modgraph.programs import build_int, int_programs, run


@pytest.fixture
def b() -> Builder:
    return Builder()


# -- depends ----------------------------------------------------------------------------------------------------------
def test_dependences_pass_through_load_indices(b):
    document = b.load(0, I32, [b.input("b"), b.input("q_idx")])
    bias = b.load(1, F, [document])
    root = b.arith("add", b.input("score"), bias)
    found = depends([root])
    assert found[bias] == {"b", "q_idx"}
    assert found[root] == {"score", "b", "q_idx"}
    assert depends([b.load(2, F)])[b.load(2, F)] == frozenset()


# -- j_class, keep_class ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("make", "want"),
    [
        (lambda b: b.const(1.0), JClass.ONE),
        (lambda b: b.const(0.0), JClass.CONST),
        (lambda b: b.load(0, F), JClass.CONST),
        (lambda b: b.load(0, F, [b.input("b"), b.input("h")]), JClass.CONST),
        (lambda b: b.load(0, F, [b.input("q_idx")]), JClass.LINEAR),
        (lambda b: b.cast(b.input("kv_idx"), F), JClass.LINEAR),
        (lambda b: b.arith("mul", b.input("score"), b.load(0, F)), JClass.NONLINEAR),
        (lambda b: b.cast(b.compare("gt", b.input("score"), b.const(0.0)), F), JClass.NONLINEAR),
    ],
    ids=["one", "zero", "0-d", "by-bh", "by-q", "by-kv", "score", "step"],
)  # fmt: skip
def test_jacobian_classes(b, make, want):
    assert j_class(make(b)) is want


def test_what_the_backward_keeps(b):
    s, gain, distance = b.input("score"), b.load(0, F, [b.input("h")]), b.cast(b.input("q_idx"), F)
    nonlinear = b.unary("tanh", s)
    assert keep_class(b, b.const(1.0)) is Keep.P
    assert keep_class(b, b.const(1.0), [distance, None]) is Keep.P
    assert keep_class(b, gain, [distance]) is Keep.P
    assert keep_class(b, nonlinear) is Keep.P_J
    assert keep_class(b, nonlinear, [None]) is Keep.P_J
    assert keep_class(b, nonlinear, [nonlinear]) is Keep.P_J  # softcap(score + bias): d bias = ds
    assert keep_class(b, nonlinear, [distance]) is Keep.P_AND_J
    assert keep_class(b, gain, [s]) is Keep.SCORE  # score * gain
    assert keep_class(b, nonlinear, [b.unary("exp", s)]) is Keep.SCORE


def test_factors_of_the_score_jacobian_are_found(b):
    j, distance, gain = b.unary("tanh", b.input("score")), b.cast(b.input("q_idx"), F), b.load(0, F)
    product = b.emit("neg", b.emit("mul", b.emit("mul", j, distance), gain))
    assert quotient_by(b, product, j) is b.emit("neg", b.emit("mul", distance, gain))
    assert keep_class(b, j, [product]) is Keep.P_J  # softcap(score + slope * distance)
    assert quotient_by(b, j, j).is_value(1)
    assert quotient_by(b, b.emit("mul", j, j), j) is None
    assert quotient_by(b, distance, j) is None


# -- exactness --------------------------------------------------------------------------------------------------------
def test_what_reaches_a_step_is_exact_and_nothing_else(b):
    distance = b.cast(b.arith("sub", b.input("q_idx"), b.input("kv_idx")), F)
    log = b.unary("log", b.arith("div", distance, b.const(8.0)))
    scaled = b.arith("mul", log, b.const(2.0))
    bucket = b.cast(scaled, I32)  # T5
    bias = b.load(0, F, [bucket])
    capped = b.unary("tanh", b.input("score"))
    exact = exactness([b.arith("add", capped, bias)])
    assert {distance, log, scaled} <= exact
    assert not exact & {capped, bias, b.input("score")}


@pytest.mark.parametrize(
    "step",
    [
        lambda b, x: b.cast(x, I64),
        lambda b, x: b.cast(b.unary("floor", x), I32),
        lambda b, x: b.cast(b.compare("lt", x, b.const(0.5)), F),
        lambda b, x: b.emit("mod", x, b.const(2.0)),
        lambda b, x: b.emit("fdiv", x, b.const(2.0)),
        lambda b, x: b.unary("round", x),
        lambda b, x: b.emit("sign", x),
    ],
    ids=["cast", "floor", "compare", "mod", "fdiv", "round", "sign"],
)
def test_every_kind_of_step_makes_its_operand_exact(b, step):
    x = b.unary("exp2", b.input("score"))
    assert x in exactness([b.arith("mul", step(b, x), b.const(3.0))])


def test_continuous_ops_stay_fast(b):
    x = b.unary("exp2", b.input("score"))
    assert not exactness([b.emit("max", b.emit("abs", x), b.const(1.0))])


# -- loads ------------------------------------------------------------------------------------------------------------
def index_of(b: Builder, *terms: Node | int) -> Node:
    total = b.const(0)
    for t in terms:
        total = b.arith("add", total, b.const(t) if isinstance(t, int) else t)
    return total


LOADS = {
    "0-d": (lambda b, q, k, h: [], LoadClass.UNIFORM),
    "h": (lambda b, q, k, h: [h], LoadClass.UNIFORM),
    "b,h": (lambda b, q, k, h: [b.input("b"), h], LoadClass.UNIFORM),
    "q": (lambda b, q, k, h: [q], LoadClass.ROW),
    "h,q//2": (lambda b, q, k, h: [h, b.emit("fdiv", q, b.const(2))], LoadClass.ROW),
    "k": (lambda b, q, k, h: [b.cast(k, I64)], LoadClass.COL),
    "doc[k]": (lambda b, q, k, h: [b.load(5, I32, [k])], LoadClass.COL),
    "q-k": (lambda b, q, k, h: [b.arith("sub", q, k)], LoadClass.TOEPLITZ),
    "h,k-q+99": (lambda b, q, k, h: [h, index_of(b, k, b.emit("neg", q), 99)], LoadClass.TOEPLITZ),
    "q-k+off[h]": (lambda b, q, k, h: [index_of(b, q, b.load(5, I32, [h]), b.emit("neg", k))], LoadClass.TOEPLITZ),
    "|q-k|": (lambda b, q, k, h: [b.emit("abs", b.arith("sub", q, k))], LoadClass.TOEPLITZ),
    "bucket[q-k]": (lambda b, q, k, h: [b.load(5, I32, [b.arith("sub", q, k)])], LoadClass.TOEPLITZ),
    "min(q-k,9)+h": (
        lambda b, q, k, h: [b.arith("add", h, b.arith("min", b.arith("sub", q, k), b.const(9)))],
        LoadClass.TOEPLITZ,
    ),
    "q-k,k-q": (lambda b, q, k, h: [b.arith("sub", q, k), b.arith("sub", k, q)], LoadClass.TOEPLITZ),
    "q,k": (lambda b, q, k, h: [q, k], LoadClass.TILE),
    "h,k,q": (lambda b, q, k, h: [h, k, q], LoadClass.TILE),
    "b,2q+1,k": (
        lambda b, q, k, h: [b.input("b"), index_of(b, b.arith("mul", q, b.const(2)), 1), k],
        LoadClass.TILE,
    ),
    "q+k": (lambda b, q, k, h: [b.arith("add", q, k)], LoadClass.GATHER),
    "q,q-k": (lambda b, q, k, h: [q, b.arith("sub", q, k)], LoadClass.GATHER),
    "2q-k": (lambda b, q, k, h: [b.arith("sub", b.arith("mul", q, b.const(2)), k)], LoadClass.GATHER),
    "doc[q],k": (lambda b, q, k, h: [b.load(5, I32, [q]), k], LoadClass.GATHER),
    "q,k,k": (lambda b, q, k, h: [q, k, k], LoadClass.GATHER),
    "q//2-k//2": (
        lambda b, q, k, h: [b.arith("sub", b.emit("fdiv", q, b.const(2)), b.emit("fdiv", k, b.const(2)))],
        LoadClass.GATHER,
    ),
    "score": (lambda b, q, k, h: [b.cast(b.input("score"), I32)], LoadClass.GATHER),
}


@pytest.mark.parametrize("name", LOADS)
def test_load_classes(b, name):
    make, want = LOADS[name]
    assert classify_load(b.load(0, F, make(b, b.input("q_idx"), b.input("kv_idx"), b.input("h")))) is want


@settings(max_examples=150)
@given(
    program=int_programs(("sub", "sub", "add", "const", "abs", "max", "where", "mod", "neg"), size=8),
    h=st.integers(0, 3),
)
def test_toeplitz_indices_are_constant_along_diagonals(program, h):
    b = Builder()
    index = b.cast(build_int(program, b), I64)
    if classify_load(b.load(0, F, [index])) is not LoadClass.TOEPLITZ:
        return
    q = torch.arange(48, dtype=torch.int32)
    along = {"b": torch.tensor(1, dtype=torch.int32), "h": torch.tensor(h, dtype=torch.int32), "q_idx": q}
    (value,) = run([index], {**along, "kv_idx": q + 3}, {})
    assert (value == value[0]).all()


# -- guards -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("interval", "want"),
    [
        ((0, 9), Guard.NONE),
        ((3, 3), Guard.NONE),
        ((-10, 9), Guard.WRAP),
        ((-1, -1), Guard.WRAP),
        ((0, 10), Guard.CLAMP),
        ((-11, 0), Guard.CLAMP),
    ],
)
def test_guards_by_interval(b, interval, want):
    load = b.load(0, F, [b.input("h"), b.input("q_idx")])
    assert guard(load, (4, 10), [(0, 3), interval]) == (Guard.NONE, want)


def test_indices_outside_for_every_element_are_found():
    assert outside_dims((4, 10), [(0, 3), (10, 20)]) == (1,)
    assert outside_dims((4, 10), [(-9, -5), (9, 20)]) == (0,)
    assert outside_dims((), []) == ()
    assert guard(Builder().load(0, F), (), []) == ()
