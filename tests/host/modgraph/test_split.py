"""Masks written as -inf are split off, exactly where they are."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flexbwd.modgraph.ir import BOOL, Builder, F, Node, topological
from flexbwd.modgraph.split import split_neg_inf
from tests.host.modgraph.programs import LANES, float_leaves, run

INF = math.inf


class Case:
    """A Builder with the usual suspects."""

    def __init__(self) -> None:
        self.b = Builder()
        self.s, self.q, self.k = (self.b.input(n) for n in ("score", "q_idx", "kv_idx"))
        self.causal = self.b.compare("le", self.k, self.q)
        self.near = self.b.compare("lt", self.b.arith("sub", self.q, self.k), self.b.const(4))
        self.dead = self.b.const(-INF)
        self.bias = self.b.load(0, F, [self.b.input("h")])
        self.biased = self.b.emit("add", self.s, self.bias)

    def no(self, c: Node) -> Node:
        return self.b.emit("not", c)

    def both(self) -> Node:
        return self.b.emit("and", self.causal, self.near)


def add_zero(c: Case, cond: Node) -> Node:
    return c.b.where(cond, c.b.const(0.0), c.dead)


FORMS = {
    "where(c, X, -inf)": (lambda c: c.b.where(c.causal, c.biased, c.dead), lambda c: c.causal),
    "where(~c, -inf, X)": (lambda c: c.b.where(c.no(c.causal), c.dead, c.biased), lambda c: c.causal),
    "masked_fill": (lambda c: c.b.where(c.b.compare("gt", c.k, c.q), c.dead, c.biased), lambda c: c.causal),
    "X + where(c, 0, -inf)": (lambda c: c.b.emit("add", c.biased, add_zero(c, c.causal)), lambda c: c.causal),
    "where(c, 0, -inf) + X": (lambda c: c.b.emit("add", add_zero(c, c.causal), c.biased), lambda c: c.causal),
    "X - where(c, 0, inf)": (
        lambda c: c.b.emit("sub", c.biased, c.b.where(c.causal, c.b.const(0.0), c.b.const(INF))),
        lambda c: c.causal,
    ),
    "nested": (
        lambda c: c.b.where(c.causal, c.b.where(c.near, c.biased, c.dead), c.dead),
        lambda c: c.both(),
    ),
    "two sums": (
        lambda c: c.b.emit("add", c.b.emit("add", c.biased, add_zero(c, c.causal)), add_zero(c, c.near)),
        lambda c: c.both(),
    ),
    "min(X, where(c, inf, -inf))": (
        lambda c: c.b.emit("min", c.biased, c.b.where(c.causal, c.b.const(INF), c.dead)),
        lambda c: c.causal,
    ),
    "2 * where(c, X, -inf)": (
        lambda c: c.b.emit("mul", c.b.where(c.causal, c.biased, c.dead), c.b.const(2.0)),
        lambda c: c.causal,
    ),
    "-(where(c, X, inf))": (
        lambda c: c.b.emit("neg", c.b.where(c.causal, c.biased, c.b.const(INF))),
        lambda c: c.causal,
    ),
    "where(c, X, inf) / -2": (
        lambda c: c.b.emit("div", c.b.where(c.causal, c.biased, c.b.const(INF)), c.b.const(-2.0)),
        lambda c: c.causal,
    ),
    "detach": (lambda c: c.b.emit("add", c.s, c.b.emit("detach", add_zero(c, c.near))), lambda c: c.near),
}


@pytest.mark.parametrize("name", FORMS)
def test_forms_that_are_split(name):
    c = Case()
    make, want = FORMS[name]
    value, keep = split_neg_inf(c.b, make(c))
    assert keep is want(c)
    assert not any(n.is_const and math.isinf(n.value) for n in topological([value]))


@pytest.mark.parametrize("form", ["where(c, X, -inf)", "where(~c, -inf, X)", "masked_fill", "X + where(c, 0, -inf)"])
def test_what_remains_is_the_score_alone(form):
    c = Case()
    value, _ = split_neg_inf(c.b, FORMS[form][0](c))
    assert value is c.biased


def test_a_mask_in_one_branch_only_keeps_the_other():
    c = Case()
    value, keep = split_neg_inf(c.b, c.b.where(c.causal, c.biased, c.b.where(c.near, c.s, c.dead)))
    assert keep is c.b.emit("or", c.causal, c.near)
    assert value is c.b.where(c.causal, c.biased, c.s)
    value, keep = split_neg_inf(c.b, c.b.where(c.causal, c.b.where(c.near, c.s, c.dead), c.biased))
    assert keep is c.b.emit("or", c.no(c.causal), c.near)
    assert value is c.b.where(c.causal, c.s, c.biased)


def test_a_captured_mask_is_split():
    c = Case()
    kept = c.b.load(3, BOOL, [c.b.input("b"), c.k])
    value, keep = split_neg_inf(c.b, c.b.where(kept, c.s, c.dead))
    assert value is c.s
    assert keep is kept


def test_everything_masked():
    c = Case()
    _, keep = split_neg_inf(c.b, c.dead)
    assert keep.is_value(False)
    _, keep = split_neg_inf(c.b, c.b.where(c.causal, c.dead, c.b.emit("add", c.s, c.dead)))
    assert keep.is_value(False)


CONSERVATIVE = {
    "no mask": lambda c: c.biased,
    "finite": lambda c: c.b.where(c.causal, c.s, c.b.const(-1e30)),
    "finfo.min": lambda c: c.b.where(c.causal, c.s, c.b.const(torch.finfo(torch.float32).min)),
    "plus inf": lambda c: c.b.where(c.causal, c.s, c.b.const(INF)),
    "condition reads the score": lambda c: c.b.where(c.b.compare("gt", c.s, c.b.const(0.0)), c.s, c.dead),
    "after tanh": lambda c: c.b.unary("tanh", c.b.where(c.causal, c.s, c.dead)),
    "max": lambda c: c.b.emit("max", c.s, c.b.where(c.causal, c.s, c.dead)),
    "times a captured value": lambda c: c.b.emit("mul", c.bias, c.b.where(c.causal, c.s, c.dead)),
    "minus -inf": lambda c: c.b.emit("sub", c.s, c.b.where(c.causal, c.s, c.dead)),
}


@pytest.mark.parametrize("name", CONSERVATIVE)
def test_anything_else_is_left_alone(name):
    c = Case()
    root = CONSERVATIVE[name](c)
    assert split_neg_inf(c.b, root) == (root, None)


# -- property ---------------------------------------------------------------------------------------------------------
@st.composite
def masked_scores(draw: st.DrawFn) -> tuple[Case, Node]:
    """Random nests of where, sums, products and negations over finite scores and both infinities."""
    c = Case()
    conditions = [c.causal, c.near, c.no(c.causal), c.b.compare("gt", c.s, c.b.const(0.0))]
    values = [c.s, c.bias, c.b.const(0.0), c.dead, c.b.const(INF), c.b.const(1.5)]
    for _ in range(draw(st.integers(1, 10))):
        x, y = (values[-1 - draw(st.integers(0, len(values) - 1))] for _ in range(2))
        op = draw(st.sampled_from(["where", "where", "where", "add", "sub", "neg", "min", "max", "mul", "detach"]))
        if op == "where":
            values.append(c.b.where(draw(st.sampled_from(conditions)), x, y))
        elif op in ("neg", "detach"):
            values.append(c.b.emit(op, x))
        elif op == "mul":
            values.append(c.b.emit("mul", x, c.b.const(draw(st.sampled_from([2.0, -3.0])))))
        else:
            values.append(c.b.emit(op, x, y))
    return c, values[-1]


@settings(max_examples=400)
@given(made=masked_scores(), seed=st.integers(0, 2))
def test_the_split_says_the_same(made, seed):
    c, root = made
    value, keep = split_neg_inf(c.b, root)
    keep = keep or c.b.const(True)
    leaves, inputs = float_leaves(seed)
    got, kept, want = run([value, keep, root], {"score": leaves[0], **inputs}, {c.bias: leaves[1]})
    joined = torch.where(kept, got, torch.full((LANES,), -INF, dtype=torch.float64))
    plain = ~want.isnan()
    assert torch.equal(joined[plain], want[plain])
