"""A hand-written backward is accepted when its structure shows that it is linear in grad, and only then."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flexbwd.errors import ModBackwardError
from flexbwd.modgraph.ir import Builder, F, Node, topological
from flexbwd.modgraph.linear import check_linear, linear_factor
from tests.host.modgraph.programs import LANES, float_leaves, run


class Case:
    def __init__(self) -> None:
        self.b = Builder()
        self.g, self.s = self.b.input("grad"), self.b.input("score")
        self.load = self.b.load(0, F, [self.b.input("h")])
        self.causal = self.b.compare("le", self.b.input("kv_idx"), self.b.input("q_idx"))
        self.zero, self.two = self.b.const(0.0), self.b.const(2.0)


LINEAR = {
    "grad": lambda c: (c.g, c.b.const(1.0)),
    "2 * grad": lambda c: (c.b.emit("mul", c.two, c.g), c.two),
    "grad * score": lambda c: (c.b.emit("mul", c.g, c.s), c.s),
    "grad / score": lambda c: (c.b.emit("div", c.g, c.s), c.b.emit("div", c.b.const(1.0), c.s)),
    "-grad": lambda c: (c.b.emit("neg", c.g), c.b.const(-1.0)),
    "zero": lambda c: (c.zero, c.zero),
    "where(c, grad, 0)": lambda c: (
        c.b.where(c.causal, c.g, c.zero),
        c.b.where(c.causal, c.b.const(1.0), c.zero),
    ),
    "where(s > 0, grad, grad * 2)": lambda c: (
        c.b.where(c.b.compare("gt", c.s, c.zero), c.g, c.b.emit("mul", c.g, c.two)),
        c.b.where(c.b.compare("gt", c.s, c.zero), c.b.const(1.0), c.two),
    ),
    "grad + grad * score": lambda c: (
        c.b.emit("add", c.g, c.b.emit("mul", c.g, c.s)),
        c.b.emit("add", c.b.const(1.0), c.s),
    ),
    "detach": lambda c: (c.b.emit("detach", c.g), c.b.const(1.0)),
}


@pytest.mark.parametrize("name", LINEAR)
def test_linear_backwards_give_their_factor(name):
    c = Case()
    root, want = LINEAR[name](c)
    factor = linear_factor(c.b, root)
    assert factor is want
    assert not any(n.attr == "grad" for n in topological([factor]) if n.op == "in")


REFUSED = {
    "grad * grad": (lambda c: c.b.emit("mul", c.g, c.g), "multiplied"),
    "grad + 1": (lambda c: c.b.emit("add", c.g, c.b.const(1.0)), "added"),
    "score - grad": (lambda c: c.b.emit("sub", c.s, c.g), "added"),
    "score": (lambda c: c.s, "does not contain grad"),
    "1 / grad": (lambda c: c.b.emit("div", c.s, c.g), "divisor"),
    "tanh(grad)": (lambda c: c.b.unary("tanh", c.g), "tanh is applied"),
    "|grad|": (lambda c: c.b.emit("abs", c.g), "abs is applied"),
    "max(grad, 0)": (lambda c: c.b.emit("max", c.g, c.zero), "max is applied"),
    "where(grad > 0, grad, 0)": (
        lambda c: c.b.where(c.b.compare("gt", c.g, c.zero), c.g, c.zero),
        "gt is applied",
    ),
    "where(c, grad, 1)": (lambda c: c.b.where(c.causal, c.g, c.b.const(1.0)), "one branch"),
    "where(c, grad, score)": (lambda c: c.b.where(c.causal, c.g, c.s), "one branch"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_backwards_are_refused_with_the_reason(name):
    c = Case()
    make, reason = REFUSED[name]
    with pytest.raises(ModBackwardError, match=reason) as error:
        linear_factor(c.b, make(c), mod="my_bwd", where="mine.py:7")
    assert str(error.value).startswith("my_bwd (mine.py:7): ")
    assert "grad * f(" in error.value.remedy


def test_the_error_names_the_line_at_fault():
    c = Case()
    square = c.b.emit("mul", c.g, c.g)
    root = c.b.emit("mul", square, c.s)
    with pytest.raises(ModBackwardError, match=r"mine\.py:9") as error:
        check_linear(root, where="mine.py:7", lines={square: "mine.py:9"})
    assert error.value.op == "mul"


def test_a_factor_may_be_made_in_another_builder():
    c, other = Case(), Builder()
    assert linear_factor(other, c.b.emit("mul", c.g, c.s)) is other.input("score")


@st.composite
def backwards(draw: st.DrawFn) -> tuple[Case, Node]:
    """Random graphs over grad, score, a load and 0, linear or not."""
    c = Case()
    values = [c.s, c.zero, c.load, c.g]
    for _ in range(draw(st.integers(1, 8))):
        x, y = (values[-1 - draw(st.integers(0, min(3, len(values) - 1)))] for _ in range(2))
        op = draw(st.sampled_from(["mul", "mul", "add", "sub", "where", "neg", "div", "tanh"]))
        operands = (x,) if op in ("neg", "tanh") else (x, y)
        values.append(c.b.where(c.causal, x, y) if op == "where" else c.b.emit(op, *operands))
    return c, values[-1]


@settings(max_examples=300)
@given(made=backwards(), seed=st.integers(0, 2))
def test_what_is_accepted_is_the_factor_times_grad(made, seed):
    c, root = made
    try:
        factor = linear_factor(c.b, root)
    except ModBackwardError:
        return
    leaves, inputs = float_leaves(seed)
    env = {"score": leaves[0], "grad": leaves[1], **inputs}
    want, got = run([root, factor], env, {c.load: leaves[2]})
    fine = want.isfinite() & got.isfinite()
    torch.testing.assert_close((got * leaves[1])[fine], want[fine], rtol=1e-9, atol=1e-9)
    assert got.shape == (LANES,)
