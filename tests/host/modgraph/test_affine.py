"""Affine forms are the expressions they stand for."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flexbwd.modgraph.affine import affine, affine_forms
from flexbwd.modgraph.ir import I32, I64, Builder, F, topological
from tests.host.modgraph.programs import build_int, int_inputs, int_programs, run

SUMS = ("const", "add", "sub", "add", "sub", "neg", "mul", "shl", "to_i64", "mod", "max", "where")


@settings(max_examples=200)
@given(program=int_programs(SUMS), seed=st.integers(0, 3))
def test_forms_equal_the_expression_modulo_its_width(program, seed):
    root = build_int(program, Builder())
    inputs = int_inputs(seed)
    forms = affine_forms([root])
    for node in topological([root]):
        if node not in forms:
            continue
        form = forms[node]
        terms = list(form.terms)
        values = run([node, *terms], inputs, {})
        total = form.const + form.q * inputs["q_idx"].long() + form.kv * inputs["kv_idx"].long()
        for term, value in zip(terms, values[1:], strict=True):
            total = total + form.terms[term] * value.long()
        assert torch.equal(total.to(values[0].dtype), values[0])


@pytest.fixture
def b() -> Builder:
    return Builder()


def test_sums_of_positions_heads_and_captured_offsets(b):
    q, k, h = b.input("q_idx"), b.input("kv_idx"), b.input("h")
    offset = b.load(0, I32, [h])
    node = b.arith("sub", b.arith("mul", b.const(3), b.arith("add", q, offset)), b.arith("sub", k, b.const(5)))
    form = affine(node)
    assert (form.const, form.q, form.kv) == (5, 3, -1)
    assert dict(form.terms) == {offset: 3}
    assert not form.is_difference


def test_differences_are_recognised_through_casts_and_negation(b):
    q, k = b.input("q_idx"), b.input("kv_idx")
    node = b.emit("neg", b.arith("sub", b.cast(k, I64), b.arith("add", q, b.const(7))))
    form = affine(node)
    assert form.is_difference
    assert (form.const, form.q, form.kv) == (7, 1, -1)


def test_uniform_values_of_any_kind_are_terms(b):
    q, h = b.input("q_idx"), b.input("h")
    rest = b.emit("mod", h, b.const(3))
    form = affine(b.arith("add", q, rest))
    assert dict(form.terms) == {rest: 1}
    product = b.arith("mul", h, b.input("b"))
    assert dict(affine(b.arith("sub", q, product)).terms) == {product: -1}


@pytest.mark.parametrize(
    "make",
    [
        lambda b, q, k: b.emit("fdiv", q, b.const(2)),
        lambda b, q, k: b.arith("mul", q, k),
        lambda b, q, k: b.arith("mul", q, b.input("h")),
        lambda b, q, k: b.load(0, I32, [q]),
        lambda b, q, k: b.arith("max", q, k),
        lambda b, q, k: b.cast(b.unary("floor", b.input("score")), I32),
        lambda b, q, k: b.cast(b.compare("lt", q, k), I32),
        lambda b, q, k: b.input("score"),
        lambda b, q, k: b.cast(q, F),
    ],
    ids=["q//2", "q*k", "q*h", "t[q]", "max", "of-score", "of-bool", "float", "cast-to-float"],
)
def test_anything_else_has_no_form(b, make):
    assert affine(make(b, b.input("q_idx"), b.input("kv_idx"))) is None


def test_terms_that_cancel_disappear(b):
    q, h = b.input("q_idx"), b.input("h")
    form = affine(b.arith("sub", b.arith("add", q, h), b.arith("add", b.const(1), h)))
    assert not form.terms
    assert form.const == -1
