"""Simplification changes how a graph looks, never what it means."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flexbwd.modgraph.ir import BOOL, I32, I64, Builder, F
from tests.host.modgraph.programs import (
    build,
    build_int,
    float_leaves,
    float_programs,
    int_inputs,
    int_programs,
    run,
    run_in_torch,
    run_int,
)


@settings(max_examples=300)
@given(program=float_programs(), seed=st.integers(0, 3))
def test_float_programs_keep_every_bit(program, seed):
    leaves, inputs = float_leaves(seed)
    want, fine = run_in_torch(program, leaves)
    b = Builder()
    root, (_, u, v) = build(program, b)
    got = run([root], {"score": leaves[0], **inputs}, {u: leaves[1], v: leaves[2]})[0]
    assert torch.equal(got[fine], want[fine])


@settings(max_examples=300)
@given(program=int_programs(), seed=st.integers(0, 3))
def test_integer_programs_keep_every_bit_and_type(program, seed):
    inputs = int_inputs(seed)
    want = run_int(program, inputs)
    got = run([build_int(program, Builder())], inputs, {})[0]
    assert got.dtype == want.dtype
    assert torch.equal(got, want)


@pytest.fixture
def b() -> Builder:
    return Builder()


@pytest.mark.parametrize(
    ("op", "x", "y", "want"),
    [
        ("add", 2**31 - 1, 1, -(2**31)),
        ("sub", -(2**31), 1, 2**31 - 1),
        ("mul", 2**30, 6, -(2**31)),
        ("shl", 3, 31, -(2**31)),
        ("pow", 10, 10**9, 0),
        ("pow", -2, 31, -(2**31)),
        ("pow", 2, -1, 0),
        ("pow", -1, -3, -1),
        ("mod", -3, 4, 1),
        ("fmod", -3, 4, -3),
        ("fdiv", -7, 2, -4),
        ("tdiv", -7, 2, -3),
        ("shr", -5, 1, -3),
    ],
)
def test_i32_constants_fold_as_torch_computes_them(b, op, x, y, want):
    node = b.emit(op, b.const(x, I32), b.const(y, I32))
    assert node.is_const
    assert node.value == want
    assert node.dtype is I32


@pytest.mark.parametrize(
    ("op", "x", "y"),
    [("fdiv", 1, 0), ("mod", 1, 0), ("shl", 1, 40), ("shl", 1, 10**9), ("shr", 1, -1), ("pow", 0, -1)],
)
def test_meaningless_integer_constants_are_left_alone(b, op, x, y):
    assert not b.emit(op, b.const(x, I32), b.const(y, I32)).is_const


@pytest.mark.parametrize(
    ("op", "args", "want"),
    [
        ("sub", (math.inf, math.inf), math.nan),
        ("add", (math.inf, 1.0), math.inf),
        ("mul", (math.inf, -2.0), -math.inf),
        ("mul", (math.inf, 0.0), math.nan),
        ("max", (math.nan, 1.0), math.nan),
        ("round", (2.5,), 2.0),
        ("mod", (-5.0, math.inf), math.inf),
        ("sign", (math.nan,), 0.0),
        ("neg", (0.0,), -0.0),
        ("fdiv", (-7.5, 2.0), -4.0),
    ],
)
def test_float_constants_fold_as_torch_computes_them(b, op, args, want):
    node = b.emit(op, *map(b.const, args))
    assert node.is_const
    assert repr(node.value) == repr(want)


@pytest.mark.parametrize(
    ("op", "args"),
    [("div", (1.0, 0.0)), ("log", (-1.0,)), ("exp", (1e4,)), ("floor", (math.inf,)), ("pow", (-8.0, 1 / 3)),
     ("fmod", (math.inf, 3.0)), ("round", (math.nan,)), ("sqrt", (-1.0,)), ("pow", (1e300, 2.5))],
)  # fmt: skip
def test_float_constants_that_python_refuses_do_not_raise(b, op, args):
    b.emit(op, *map(b.const, args))


def test_minus_zero_and_zero_are_two_constants(b):
    assert b.const(0.0) is not b.const(-0.0)
    assert b.const(math.nan) is b.const(math.nan)


def test_constants_wrap_when_cast_to_a_narrow_type(b):
    assert b.cast(b.const(2**40 + 7), I32).value == 7
    assert b.const(2**31, I32).value == -(2**31)
    assert b.cast(b.const(-2.9), I32).value == -2
    assert not b.cast(b.const(3e9), I32).is_const  # undefined in C: nothing to fold


def test_float_factors_are_not_joined_because_floor_would_see_it(b):
    x = b.input("score")
    node = b.emit("mul", b.emit("mul", x, b.const(0.1)), b.const(10.0))
    assert node is not x
    assert {a.op for a in node.args} == {"mul", "const"}


def test_integer_offsets_are_joined(b):
    q = b.input("q_idx")
    assert b.arith("sub", b.arith("add", q, b.const(3)), b.const(3)) is q
    assert b.arith("sub", q, b.const(-(2**31))).dtype is I32


def test_products_with_zero_vanish_also_beside_infinity(b):
    c, x = b.compare("lt", b.input("q_idx"), b.input("kv_idx")), b.input("score")
    assert b.emit("mul", x, b.const(0.0)).is_value(0)
    gate = b.where(c, b.const(1.0), b.const(0.0))
    assert b.emit("mul", gate, b.const(math.inf)) is b.where(c, b.const(math.inf), b.const(0.0))


def test_wheres_on_one_condition_merge(b):
    c, x, y = b.compare("lt", b.input("q_idx"), b.input("kv_idx")), b.input("score"), b.load(0, F)
    zero = b.const(0.0)
    assert b.emit("add", b.where(c, x, zero), b.where(c, zero, y)) is b.where(c, x, y)
    assert b.where(b.emit("not", c), x, y) is b.where(c, y, x)
    assert b.where(c, b.where(c, x, zero), y) is b.where(c, x, y)
    assert b.where(c, x, b.where(c, zero, y)) is b.where(c, x, y)


def test_a_where_of_two_numbers_is_not_multiplied_twice(b):
    c, x = b.compare("lt", b.input("q_idx"), b.input("kv_idx")), b.input("score")
    node = b.emit("mul", b.where(c, b.const(2.0), b.const(3.0)), x)
    assert node.op == "mul"


def test_casts_through_wider_types_vanish(b):
    q, c = b.input("q_idx"), b.compare("lt", b.input("q_idx"), b.input("kv_idx"))
    assert b.cast(b.cast(q, I64), I32) is q
    assert b.cast(b.cast(c, F), BOOL) is c
    assert b.cast(b.cast(q, I64), F) is b.cast(q, F)
    assert b.cast(b.cast(q, F), I32) is not q  # fp32 does not hold every i32


def test_comparisons_of_widened_numbers_are_narrow(b):
    q, k = b.input("q_idx"), b.input("kv_idx")
    assert b.compare("lt", b.cast(q, I64), b.cast(k, I64)) is b.compare("lt", q, k)
    assert b.compare("lt", b.cast(q, I64), b.const(5, I64)) is b.compare("lt", q, b.const(5))
    wide = b.compare("lt", b.cast(q, I64), b.const(2**40))
    assert wide.args[0].dtype is I64


def test_bools_compared_with_numbers_are_bools(b):
    c = b.compare("lt", b.input("q_idx"), b.input("kv_idx"))
    assert b.compare("eq", c, b.const(True)) is c
    assert b.compare("ne", b.cast(c, I32), b.const(0)) is c
    assert b.compare("eq", b.const(0), b.cast(c, I64)) is b.emit("not", c)
    assert b.emit("xor", c, b.const(True)) is b.emit("not", c)
    assert b.emit("not", c).op == "ge"


def test_float_comparisons_keep_nan(b):
    x, y = b.input("score"), b.load(0, F)
    assert b.compare("eq", x, x).op == "eq"
    assert b.emit("not", b.compare("lt", x, y)).op == "not"
    assert b.emit("sub", x, x).op == "sub"
