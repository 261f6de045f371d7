"""Local rewrites applied to each node as it is built.

Only what property detection needs: constants fold, identities vanish, `where`s on one condition merge and products
sink into them, so that a Jacobian that is structurally 1, constant or independent of the score also *looks* so. `x·0`
becomes 0 although x may be NaN or inf: a derivative that is structurally zero carries nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from .ir import BOOL, COMPARE, I32, I64, DType, F, Node, Number, wrap

if TYPE_CHECKING:
    from .ir import Builder


def simplify(build: Builder, op: str, args: tuple[Node, ...]) -> Node | None:
    """A simpler node equal to `op(*args)`, or None."""
    if all(a.is_const for a in args):
        folded = _fold(build, op, args)
        if folded is not None:
            return folded
    rule = _RULES.get(op)
    if rule is not None:
        return rule(build, *args)
    return _compare(build, op, *args) if op in COMPARE else None


# -- constant folding ------------------------------------------------------------------------------------------------
def _fold(build: Builder, op: str, args: tuple[Node, ...]) -> Node | None:
    evaluate = _EVALUATE.get(op)
    if evaluate is None:
        return None
    try:
        value = evaluate(*(a.value for a in args))
    except (ArithmeticError, ValueError):
        return None
    if value is None or isinstance(value, complex):
        return None
    dtype = BOOL if op in COMPARE else args[1].dtype if op == "where" else args[0].dtype
    return build.const(value, dtype)


def _power(x: Number, y: Number) -> Number:
    if isinstance(x, int) and isinstance(y, int):
        return pow(x, y, 2**64) if y >= 0 else math.trunc(float(x) ** y)  # const wraps to the type's width
    return x**y


def _shifted(left: bool) -> Callable[[int, int], int | None]:
    """Shifts by 0 to 31; what others mean is the backend's."""

    def shift(x: int, y: int) -> int | None:
        if not 0 <= y < 32:
            return None
        return x << y if left else x >> y

    return shift


def _trunc_div(x: Number, y: Number) -> Number:
    if isinstance(x, int) and isinstance(y, int):
        return (abs(x) // abs(y)) * (1 if (x < 0) == (y < 0) else -1)
    return float(math.trunc(x / y))


_EVALUATE: dict[str, Callable[..., Number | None]] = {
    "add": lambda x, y: x + y,
    "sub": lambda x, y: x - y,
    "mul": lambda x, y: x * y,
    "div": lambda x, y: x / y,
    "fdiv": lambda x, y: x // y,
    "tdiv": _trunc_div,
    "mod": lambda x, y: x % y,
    "fmod": lambda x, y: x - y * _trunc_div(x, y) if isinstance(x, int) else math.fmod(x, y),
    "pow": _power,
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
    "shl": _shifted(left=True),
    "shr": _shifted(left=False),
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
        if a.op == "where" and _sinks(b, *a.args[1:]):
            c, u, v = a.args
            return build.emit("where", c, _product(build, u, b), _product(build, v, b))
    return None


def _sinks(factor: Node, u: Node, v: Node) -> bool:
    """Does `factor · where(c, u, v)` need no more products once it sinks into the branches?"""
    if any(x.is_value(0) for x in (u, v)):
        return True
    return u.is_const and v.is_const and (factor.is_const or any(abs(x.value) == 1 for x in (u, v)))


def _product(build: Builder, x: Node, y: Node) -> Node:
    """x · y; a branch that is 0 stays 0, also beside a constant infinity."""
    for a in (x, y):
        if a.is_value(0):
            return a
    return build.emit("mul", x, y)


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


def _xor(build: Builder, x: Node, y: Node) -> Node | None:
    if x.dtype is BOOL:
        for a, b in ((x, y), (y, x)):
            if b.is_const:
                return build.emit("not", a) if b.value else a
    return build.const(0, x.dtype) if x is y else None


def _max(build: Builder, x: Node, y: Node) -> Node | None:
    return _bound(x, y, -math.inf)


def _min(build: Builder, x: Node, y: Node) -> Node | None:
    return _bound(x, y, math.inf)


def _bound(x: Node, y: Node, unit: float) -> Node | None:
    if x is y or y.is_value(unit):
        return x
    return y if x.is_value(unit) else None


def _compare(build: Builder, op: str, x: Node, y: Node) -> Node | None:
    if x is y and x.dtype is not F:
        return build.const(op in ("eq", "le", "ge"))
    if x.dtype is BOOL and op in ("eq", "ne"):
        for a, b in ((x, y), (y, x)):
            if b.is_const:
                return a if b.value is (op == "eq") else build.emit("not", a)
    if x.dtype is I64:  # numbers that are i32 compare as i32
        narrow_x, narrow_y = _as_i32(build, x), _as_i32(build, y)
        if narrow_x is not None and narrow_y is not None:
            return build.emit(op, narrow_x, narrow_y)
    if op in ("eq", "ne"):
        for a, b in ((x, y), (y, x)):
            if b.is_value(0) and a.op == "cast" and a.args[0].dtype is BOOL:  # how torch says bool(a)
                return a.args[0] if op == "ne" else build.emit("not", a.args[0])
    return None


def _as_i32(build: Builder, x: Node) -> Node | None:
    """An i64 node as the i32 it was, or None."""
    if x.op == "cast" and x.args[0].dtype is I32:
        return x.args[0]
    return build.const(x.value, I32) if x.is_const and wrap(int(x.value), I32) == x.value else None


def _where(build: Builder, c: Node, x: Node, y: Node) -> Node | None:
    if c.is_const:
        return x if c.value else y
    if x is y:
        return x
    if c.op in ("not", "ne", "ge", "gt"):  # one of two opposite conditions, so that both merge
        opposite = build.emit("not", c)
        if opposite.op != "not":
            return build.emit("where", opposite, y, x)
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
    "fmod": _mod, "shl": _shift, "shr": _shift, "pow": _pow, "and": _and, "or": _or, "max": _max, "min": _min,
    "xor": _xor, "where": _where, "not": _not, "neg": _neg, "floor": _rounding, "ceil": _rounding, "trunc": _rounding,
    "round": _rounding,
}  # fmt: skip
