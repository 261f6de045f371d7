"""Jacobian factors by reverse mode on the graph.

One rule per op gives what the output's adjoint contributes to each operand. Conventions at kinks are torch's:
abs'(0) = 0, `max` and `min` split a tie in halves, roundings and `sign` have derivative zero (torch's clamp and relu,
whose ties go otherwise, are imported as `where`). Loads and inputs are cut points, and `detach` stops.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from .ir import Builder, F, Node, topological

Adjoints = tuple[Node | None, ...]  # one per operand; None: nothing flows
Rule = Callable[["_Reverse", Node, Node], Adjoints]


def jacobians(builder: Builder, root: Node, wrt: Sequence[Node]) -> list[Node]:
    """The factors ∂root/∂w for every w of `wrt`, at fixed values of all other loads and inputs.

    Args:
        builder: owns `root`, and will own the results.
        root: an F node.
        wrt: loads or inputs; a node that `root` does not reach through differentiable ops has factor 0.
    Returns:
        F nodes in the order of `wrt`; those that are structurally 0, 1 or constant are `const` nodes.
    """
    reverse = _Reverse(builder)
    active = _active(root, wrt)
    adjoint: dict[Node, Node] = {root: builder.const(1.0)}
    for node in reversed(list(topological([root]))):
        seed = adjoint.get(node)
        rule = _RULES.get(node.op)
        if seed is None or node not in active or rule is None:
            continue
        for operand, part in zip(node.args, rule(reverse, node, seed), strict=True):
            if part is None or operand not in active or part.is_value(0):
                continue
            adjoint[operand] = builder.emit("add", adjoint[operand], part) if operand in adjoint else part
    zero = builder.const(0.0)
    return [adjoint.get(w, zero) if w in active else zero for w in wrt]


def _active(root: Node, wrt: Sequence[Node]) -> set[Node]:
    """Nodes through which a value of `wrt` reaches `root` differentiably; anything else needs no adjoint."""
    active = {w for w in wrt if w.dtype is F}
    for node in topological([root]):
        if node.op in _RULES and node.dtype is F and any(a in active for a in node.args):
            active.add(node)
    return active


class _Reverse:
    """The few products that rules are made of, kept in the forms that property detection knows."""

    def __init__(self, builder: Builder) -> None:
        self.builder = builder
        self.emit = builder.emit
        self.zero = builder.const(0.0)

    def const(self, value: float) -> Node:
        return self.builder.const(value)

    def times(self, *factors: Node) -> Node:
        """Product from the left; constants gather in front of everything else."""
        product = factors[0]
        for factor in factors[1:]:
            product = self._product(product, factor)
        return product

    def over(self, x: Node, y: Node) -> Node:
        """x / y: exact for a constant over a constant, else x · (1/y), whose 1/y other factors share."""
        if x.is_value(0):
            return self.zero
        if not y.is_const:
            return self.times(x, self.emit("rcp", y))
        if y.value == 0 or not math.isfinite(1.0 / y.value):
            return self.emit("div", x, y)
        if x.is_const:
            return self.const(x.value / y.value)
        c, rest = _split_constant(x)
        if rest is not None and rest is not x:
            return self.times(self.const(c / y.value), rest)
        return self.times(x, self.const(1.0 / y.value))

    def gate(self, cond: Node, x: Node, y: Node) -> Node:
        return self.emit("where", cond, x, y)

    def _product(self, x: Node, y: Node) -> Node:
        if x.is_value(0) or y.is_value(0):
            return self.zero
        (cx, x_rest), (cy, y_rest) = _split_constant(x), _split_constant(y)
        if (x_rest is not x or y_rest is not y) and math.isfinite(cx * cy) and cx * cy != 0:
            rest = x_rest if y_rest is None else y_rest if x_rest is None else self.emit("mul", x_rest, y_rest)
            constant = self.const(cx * cy)
            return constant if rest is None else self.emit("mul", rest, constant)
        return self.emit("mul", x, y)


def _split_constant(x: Node) -> tuple[float, Node | None]:
    """`x` as constant · rest; rest is None for a pure constant, `x` itself where no constant is in sight."""
    if x.is_const:
        return float(x.value), None
    if x.op == "neg":
        c, rest = _split_constant(x.args[0])
        return -c, rest
    if x.op == "mul":
        for factor, other in (x.args, x.args[::-1]):
            if factor.is_const:
                return float(factor.value), other
    return 1.0, x


# -- rules: (reverse, node, adjoint of node) -> adjoints of the operands ----------------------------------------------
def _mul(r: _Reverse, n: Node, g: Node) -> Adjoints:
    x, y = n.args
    return r.times(g, y), r.times(g, x)


def _div(r: _Reverse, n: Node, g: Node) -> Adjoints:
    y = n.args[1]
    return r.over(g, y), None if y.is_const else r.emit("neg", r.times(r.over(g, y), n))


def _pow(r: _Reverse, n: Node, g: Node) -> Adjoints:
    x, p = n.args
    if p.is_const:  # exponents 0, 1 and 2 were rewritten when the node was built
        return r.times(g, p, r.emit("pow", x, r.const(p.value - 1.0))), None
    lower = r.emit("pow", x, r.emit("sub", p, r.const(1.0)))
    dx = r.gate(r.emit("eq", p, r.zero), r.zero, r.times(g, p, lower))
    flat = r.emit("and", r.emit("eq", x, r.zero), r.emit("ge", p, r.zero))
    return dx, r.gate(flat, r.zero, r.times(g, n, r.emit("log", x)))


def _bound(below: str) -> Rule:
    """`max` (below = "lt") or `min` ("gt"): an operand on that side of the other one gets nothing."""

    def rule(r: _Reverse, n: Node, g: Node) -> Adjoints:
        x, y = n.args
        tie, half = r.emit("eq", x, y), r.times(g, r.const(0.5))
        return tuple(r.gate(tie, half, r.gate(r.emit(below, a, b), r.zero, g)) for a, b in ((x, y), (y, x)))

    return rule


def _remainder(quotient: str) -> Rule:
    """x − y · q with q rounded by `quotient`, which has derivative zero."""

    def rule(r: _Reverse, n: Node, g: Node) -> Adjoints:
        x, y = n.args
        return g, None if y.is_const else r.emit("neg", r.times(g, r.emit(quotient, x, y)))

    return rule


def _where(r: _Reverse, n: Node, g: Node) -> Adjoints:
    cond = n.args[0]
    return None, r.gate(cond, g, r.zero), r.gate(cond, r.zero, g)


def _unary(factor: Callable[[_Reverse, Node, Node], Node]) -> Rule:
    """A rule from `factor(reverse, node, operand)`, the local derivative."""
    return lambda r, n, g: (r.times(g, factor(r, n, n.args[0])),)


def _one_minus_square(r: _Reverse, y: Node) -> Node:
    return r.emit("sub", r.const(1.0), r.emit("mul", y, y))


_RULES: dict[str, Rule] = {
    "add": lambda r, n, g: (g, g),
    "sub": lambda r, n, g: (g, r.emit("neg", g)),
    "mul": _mul,
    "div": _div,
    "pow": _pow,
    "max": _bound("lt"),
    "min": _bound("gt"),
    "mod": _remainder("fdiv"),
    "fmod": _remainder("tdiv"),
    "where": _where,
    "neg": lambda r, n, g: (r.emit("neg", g),),
    "abs": _unary(lambda r, y, x: r.emit("sign", x)),
    "exp": _unary(lambda r, y, x: y),
    "exp2": _unary(lambda r, y, x: r.times(y, r.const(math.log(2.0)))),
    "expm1": _unary(lambda r, y, x: r.emit("add", y, r.const(1.0))),
    "log": lambda r, n, g: (r.over(g, n.args[0]),),
    "log2": lambda r, n, g: (r.over(r.times(g, r.const(1.0 / math.log(2.0))), n.args[0]),),
    "log1p": lambda r, n, g: (r.over(g, r.emit("add", n.args[0], r.const(1.0))),),
    "sqrt": lambda r, n, g: (r.over(r.times(g, r.const(0.5)), n),),
    "rsqrt": _unary(lambda r, y, x: r.times(r.const(-0.5), r.emit("mul", y, r.emit("mul", y, y)))),
    "rcp": _unary(lambda r, y, x: r.emit("neg", r.emit("mul", y, y))),
    "tanh": _unary(lambda r, y, x: _one_minus_square(r, y)),
    "sigmoid": _unary(lambda r, y, x: r.emit("mul", y, r.emit("sub", r.const(1.0), y))),
    "sin": _unary(lambda r, y, x: r.emit("cos", x)),
    "cos": _unary(lambda r, y, x: r.emit("neg", r.emit("sin", x))),
    "tan": _unary(lambda r, y, x: r.emit("add", r.const(1.0), r.emit("mul", y, y))),
    "erf": _unary(
        lambda r, y, x: r.times(r.const(2.0 / math.sqrt(math.pi)), r.emit("exp", r.emit("neg", r.emit("mul", x, x))))
    ),
}
