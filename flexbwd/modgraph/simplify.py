"""Local rewrites applied to each node as it is built.

Only what property detection needs: constants fold, identities vanish, `where`s on one condition merge and products
sink into them, so that a Jacobian that is structurally 1, constant or independent of the score also *looks* so. `x·0`
becomes 0 although x may be NaN or inf: a derivative that is structurally zero carries nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from .ir import BOOL, COMPARE, DType, F, Node, Number

if TYPE_CHECKING:
    from .ir import Builder


def simplify(build: Builder, op: str, args: tuple[Node, ...]) -> Node | None:
    """A simpler node equal to `op(*args)`, or None."""
    if all(a.is_const for a in args) and op != "load":
        folded = _fold(build, op, args)
        if folded is not None:
            return folded
    rule = _RULES.get(op)
    found = rule(build, *args) if rule else None
    if found is None and op in COMPARE and args[0] is args[1] and args[0].dtype is not F:
        found = build.const(op in ("eq", "le", "ge"))
    return found


# -- constant folding ------------------------------------------------------------------------------------------------
def _fold(build: Builder, op: str, args: tuple[Node, ...]) -> Node | None:
    evaluate = _EVALUATE.get(op)
    if evaluate is None:
        return None
    try:
        value = evaluate(*(a.value for a in args))
    except (ArithmeticError, ValueError):
        return None
    if isinstance(value, complex):
        return None
    dtype = BOOL if op in COMPARE else args[1].dtype if op == "where" else args[0].dtype
    if dtype.is_int and not -(2**63) <= value < 2**63:
        return None
    return build.const(value, dtype)


def _trunc_div(x: Number, y: Number) -> Number:
    if isinstance(x, int) and isinstance(y, int):
        return (abs(x) // abs(y)) * (1 if (x < 0) == (y < 0) else -1)
    return float(math.trunc(x / y))


_EVALUATE: dict[str, Callable[..., Number]] = {
    "add": lambda x, y: x + y,
    "sub": lambda x, y: x - y,
    "mul": lambda x, y: x * y,
    "div": lambda x, y: x / y,
    "fdiv": lambda x, y: x // y,
    "tdiv": _trunc_div,
    "mod": lambda x, y: x % y,
    "fmod": lambda x, y: x - y * _trunc_div(x, y) if isinstance(x, int) else math.fmod(x, y),
    "pow": lambda x, y: x**y,
    "max": lambda x, y: math.nan if x != x or y != y else max(x, y),
    "min": lambda x, y: math.nan if x != x or y != y else min(x, y),
    "eq": lambda x, y: x == y,
    "ne": lambda x, y: x != y,
    "lt": lambda x, y: x < y,
    "le": lambda x, y: x <= y,
    "gt": lambda x, y: x > y,
    "ge": lambda x, y: x >= y,
    "and": lambda x, y: x & y,
    "or": lambda x, y: x | y,
    "xor": lambda x, y: x ^ y,
    "shl": lambda x, y: x << y,
    "shr": lambda x, y: x >> y,
    "where": lambda c, x, y: x if c else y,
    "neg": lambda x: -x,
    "abs": abs,
    "sign": lambda x: (x > 0) - (x < 0),
    "not": lambda x: not x if isinstance(x, bool) else ~x,
    "exp": math.exp,
    "exp2": lambda x: 2.0**x,
    "log": math.log,
    "log2": math.log2,
    "log1p": math.log1p,
    "expm1": math.expm1,
    "sqrt": math.sqrt,
    "rsqrt": lambda x: 1.0 / math.sqrt(x),
    "rcp": lambda x: 1.0 / x,
    "tanh": math.tanh,
    "sigmoid": lambda x: 1.0 / (1.0 + math.exp(-x)),
    "sin": math.sin,
    "cos": math.cos,
    "tan": math.tan,
    "erf": math.erf,
    "floor": math.floor,
    "ceil": math.ceil,
    "trunc": math.trunc,
    "round": round,
    "detach": lambda x: x,
}


# -- identities -----------------------------------------------------------------------------------------------------
def _add(build: Builder, x: Node, y: Node) -> Node | None:
    for a, b in ((x, y), (y, x)):
        if b.is_value(0):
            return a
        if a.dtype.is_int and b.is_const and a.op == "add":  # (z + c1) + c2
            for z, c in (a.args, a.args[::-1]):
                if c.is_const:
                    return build.emit("add", z, build.emit("add", c, b))
    same_condition = x.op == "where" and y.op == "where" and x.args[0] is y.args[0]
    if same_condition and any(w.args[k].is_value(0) for w in (x, y) for k in (1, 2)):
        (c, x1, x2), (_, y1, y2) = x.args, y.args
        return build.emit("where", c, build.emit("add", x1, y1), build.emit("add", x2, y2))
    return None


def _sub(build: Builder, x: Node, y: Node) -> Node | None:
    if y.is_value(0):
        return x
    if x is y and x.dtype.is_int:
        return build.const(0, x.dtype)
    if x.is_value(0):
        return build.emit("neg", y)
    if y.is_const and x.dtype.is_int:
        return build.emit("add", x, build.const(-y.value, y.dtype))
    return None


def _mul(build: Builder, x: Node, y: Node) -> Node | None:
    for a, b in ((x, y), (y, x)):
        if b.is_value(1):
            return a
        if b.is_value(0):
            return b
        if b.is_value(-1):
            return build.emit("neg", a)
        if a.op == "neg" and b.op == "neg":
            return build.emit("mul", a.args[0], b.args[0])
        if a.op == "where":
            c, u, v = a.args
            if not ((u.is_const and v.is_const) or u.is_value(0) or v.is_value(0)):
                continue
            return build.emit("where", c, build.emit("mul", u, b), build.emit("mul", v, b))
        if a.dtype is F and b.is_const and a.op == "mul":  # (z * c1) * c2
            for z, c in (a.args, a.args[::-1]):
                if c.is_const:
                    return build.emit("mul", z, build.emit("mul", c, b))
    return None


def _div(build: Builder, x: Node, y: Node) -> Node | None:
    return x if y.is_value(1) else None


def _floor_div(build: Builder, x: Node, y: Node) -> Node | None:
    return x if y.is_value(1) and x.dtype.is_int else None


def _mod(build: Builder, x: Node, y: Node) -> Node | None:
    return build.const(0, x.dtype) if y.is_value(1) and x.dtype.is_int else None


def _shift(build: Builder, x: Node, y: Node) -> Node | None:
    return x if y.is_value(0) else None


def _pow(build: Builder, x: Node, y: Node) -> Node | None:
    if y.is_value(1):
        return x
    if y.is_value(0):
        return build.const(1, x.dtype)
    return build.emit("mul", x, x) if y.is_value(2) else None


def _and(build: Builder, x: Node, y: Node) -> Node | None:
    return _lattice(x, y, unit=True)


def _or(build: Builder, x: Node, y: Node) -> Node | None:
    return _lattice(x, y, unit=False)


def _lattice(x: Node, y: Node, unit: bool) -> Node | None:
    if x is y:
        return x
    if x.dtype is BOOL:
        for a, b in ((x, y), (y, x)):
            if b.is_const:
                return a if b.value is unit else b
    return None


def _same(build: Builder, x: Node, y: Node) -> Node | None:
    return x if x is y else None


def _where(build: Builder, c: Node, x: Node, y: Node) -> Node | None:
    if c.is_const:
        return x if c.value else y
    if x is y:
        return x
    if c.op == "not":
        return build.emit("where", c.args[0], y, x)
    if x.dtype is BOOL and x.is_const and y.is_const:
        return c if x.value else build.emit("not", c)
    if x.op == "where" and x.args[0] is c:
        return build.emit("where", c, x.args[1], y)
    if y.op == "where" and y.args[0] is c:
        return build.emit("where", c, x, y.args[2])
    return None


_NEGATED = {"eq": "ne", "ne": "eq", "lt": "ge", "le": "gt", "gt": "le", "ge": "lt"}


def _not(build: Builder, x: Node) -> Node | None:
    if x.op == "not":
        return x.args[0]
    if x.op in _NEGATED and x.args[0].dtype is not F:  # on floats NaN makes both false
        return build.emit(_NEGATED[x.op], *x.args)
    return None


def _neg(build: Builder, x: Node) -> Node | None:
    if x.op == "neg":
        return x.args[0]
    if x.op == "sub" and x.dtype.is_int:
        return build.emit("sub", x.args[1], x.args[0])
    return None


def _rounding(build: Builder, x: Node) -> Node | None:
    return x if x.op == "cast" and x.args[0].dtype is not DType.F else None


_RULES: dict[str, Callable[..., Node | None]] = {
    "add": _add, "sub": _sub, "mul": _mul, "div": _div, "fdiv": _floor_div, "tdiv": _floor_div, "mod": _mod,
    "fmod": _mod, "shl": _shift, "shr": _shift, "pow": _pow, "and": _and, "or": _or, "max": _same, "min": _same,
    "where": _where, "not": _not, "neg": _neg, "floor": _rounding, "ceil": _rounding, "trunc": _rounding,
    "round": _rounding,
}  # fmt: skip
