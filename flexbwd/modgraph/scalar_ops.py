"""aten's elementwise operators as graph nodes: the table, and the formulas of what the graph has no node for.

Each entry takes an `Emit` and the operands as scalar nodes (numbers arrive as constants, options as they are) and gives
the result. Where a formula has a kink, the branch at the kink is the one torch's own backward takes: relu'(0) = 0,
clamp'(bound) = 1, hardtanh'(bound) = 0. A NaN operand gives NaN, as in torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from .ir import BOOL, Builder, DType, F, Node


@dataclass(frozen=True)
class Emit:
    """Makes the nodes of one operator call.

    Attributes:
        out: type of the result.  common: type that comparisons are made in (torch.result_type of the operands).
    """

    builder: Builder
    out: DType
    common: DType

    def num(self, value: float | int, dtype: DType | None = None) -> Node:
        return self.builder.const(value, dtype or self.out)

    def op(self, name: str, x: Node, y: Node) -> Node:
        """Binary arithmetic in the result's type."""
        return self.builder.emit(name, self.builder.cast(x, self.out), self.builder.cast(y, self.out))

    def add(self, x: Node, y: Node) -> Node:
        return self.op("add", x, y)

    def sub(self, x: Node, y: Node) -> Node:
        return self.op("sub", x, y)

    def mul(self, x: Node, y: Node) -> Node:
        return self.op("mul", x, y)

    def div(self, x: Node, y: Node) -> Node:
        return self.builder.arith("div", x, y)

    def neg(self, x: Node) -> Node:
        return self.builder.emit("neg", self.builder.cast(x, self.out))

    def f(self, name: str, x: Node) -> Node:
        """A unary function of a float."""
        return self.builder.unary(name, x)

    def cmp(self, name: str, x: Node, y: Node) -> Node:
        return self.builder.emit(name, self.builder.cast(x, self.common), self.builder.cast(y, self.common))

    def where(self, c: Node, x: Node, y: Node) -> Node:
        b = self.builder
        return b.emit("where", b.cast(c, BOOL), b.cast(x, self.out), b.cast(y, self.out))

    def true(self, x: Node) -> Node:
        """x != 0, as a bool."""
        return x if x.dtype is BOOL else self.builder.emit("ne", x, self.builder.const(0, x.dtype))


Operator = Callable[..., Node]


# -- arithmetic ------------------------------------------------------------------------------------------------------
def _add(e: Emit, x: Node, y: Node, alpha: Node | None = None) -> Node:
    if e.out is BOOL:
        return e.op("or", x, y)
    return e.add(x, y if alpha is None else e.mul(alpha, y))


def _sub(e: Emit, x: Node, y: Node, alpha: Node | None = None) -> Node:
    return e.sub(x, y if alpha is None else e.mul(alpha, y))


def _rsub(e: Emit, x: Node, y: Node, alpha: Node | None = None) -> Node:
    return _sub(e, y, x, alpha)


def _mul(e: Emit, x: Node, y: Node) -> Node:
    return e.op("and" if e.out is BOOL else "mul", x, y)


def _div(e: Emit, x: Node, y: Node, rounding_mode: str | None = None) -> Node:
    if rounding_mode is None:
        return e.div(x, y)
    return e.op("fdiv" if rounding_mode == "floor" else "tdiv", x, y)


def _pow(e: Emit, x: Node, y: Node) -> Node:
    if y.is_const:
        n = y.value
        if float(n).is_integer() and 1 <= abs(n) <= 8 and (n > 0 or e.out is F):
            x = e.builder.cast(x, e.out)
            power = x
            for _ in range(abs(int(n)) - 1):
                power = e.mul(power, x)
            return power if n > 0 else e.f("rcp", power)
        if abs(n) == 0.5 and e.out is F:
            return e.f("sqrt" if n > 0 else "rsqrt", x)
    if x.is_value(2) and e.out is F:
        return e.f("exp2", y)
    return e.op("pow", x, y)


def _neg(e: Emit, x: Node) -> Node:
    return e.neg(x)


def _abs(e: Emit, x: Node) -> Node:
    return x if x.dtype is BOOL else e.builder.emit("abs", x)


def _sign(e: Emit, x: Node) -> Node:
    return x if x.dtype is BOOL else e.builder.emit("sign", x)


def _rounding(name: str) -> Operator:
    def rounding(e: Emit, x: Node, decimals: Node | None = None) -> Node:
        if x.dtype is not F:
            return x
        if decimals is None or decimals.is_value(0):
            return e.f(name, x)
        unit = e.num(10.0 ** int(decimals.value))
        return e.div(e.f(name, e.mul(x, unit)), unit)

    return rounding


def _frac(e: Emit, x: Node) -> Node:
    return e.sub(x, e.f("trunc", x))


def _lerp(e: Emit, x: Node, y: Node, weight: Node) -> Node:
    return e.add(x, e.mul(weight, e.sub(y, x)))


def _addcmul(e: Emit, x: Node, y: Node, z: Node, value: Node | None = None) -> Node:
    product = e.mul(y, z)
    return e.add(x, product if value is None else e.mul(value, product))


def _addcdiv(e: Emit, x: Node, y: Node, z: Node, value: Node | None = None) -> Node:
    quotient = e.div(y, z)
    return e.add(x, quotient if value is None else e.mul(value, quotient))


# -- bounds ----------------------------------------------------------------------------------------------------------
def _clamp_min(e: Emit, x: Node, low: Node) -> Node:
    if e.out is not F:
        return e.op("max", x, low)
    return e.where(e.builder.compare("lt", x, low), low, x)


def _clamp_max(e: Emit, x: Node, high: Node) -> Node:
    if e.out is not F:
        return e.op("min", x, high)
    return e.where(e.builder.compare("gt", x, high), high, x)


def _clamp(e: Emit, x: Node, low: Node | None = None, high: Node | None = None) -> Node:
    x = e.builder.cast(x, e.out)
    if low is not None:
        x = _clamp_min(e, x, low)
    return x if high is None else _clamp_max(e, x, high)


def _hardtanh(e: Emit, x: Node, low: Node | None = None, high: Node | None = None) -> Node:
    low, high = low or e.num(-1), high or e.num(1)
    above = e.where(e.builder.compare("ge", x, high), high, x)
    return e.where(e.builder.compare("le", x, low), low, above)


def _relu(e: Emit, x: Node) -> Node:
    if e.out is not F:
        return e.op("max", x, e.num(0))
    return e.where(e.builder.compare("le", x, e.num(0)), e.num(0), x)


def _relu6(e: Emit, x: Node) -> Node:
    return _hardtanh(e, x, e.num(0), e.num(6))


def _threshold(e: Emit, x: Node, threshold: Node, value: Node) -> Node:
    return e.where(e.builder.compare("le", x, threshold), value, x)


# -- activations -----------------------------------------------------------------------------------------------------
def _leaky_relu(e: Emit, x: Node, slope: Node | None = None) -> Node:
    slope = slope or e.num(0.01)
    return e.where(e.builder.compare("gt", x, e.num(0)), x, e.mul(x, slope))


def _elu(e: Emit, x: Node, alpha: Node | None = None, scale: Node | None = None, inner: Node | None = None) -> Node:
    one = e.num(1)
    alpha, scale, inner = alpha or one, scale or one, inner or one
    below = e.mul(e.mul(alpha, scale), e.f("expm1", e.mul(x, inner)))
    return e.where(e.builder.compare("gt", x, e.num(0)), e.mul(x, scale), below)


def _celu(e: Emit, x: Node, alpha: Node | None = None) -> Node:
    alpha = alpha or e.num(1)
    return _elu(e, x, alpha, None, e.div(e.num(1), alpha))


def _selu(e: Emit, x: Node) -> Node:
    return _elu(e, x, e.num(1.6732632423543772848170429916717), e.num(1.0507009873554804934193349852946))


def _silu(e: Emit, x: Node) -> Node:
    return e.mul(x, e.f("sigmoid", x))


def _gelu(e: Emit, x: Node, approximate: str = "none") -> Node:
    if approximate == "none":
        inner = e.f("erf", e.mul(x, e.num(math.sqrt(0.5))))
    else:
        cubic = e.mul(e.num(0.044715), e.mul(e.mul(x, x), x))
        inner = e.f("tanh", e.mul(e.num(math.sqrt(2 / math.pi)), e.add(x, cubic)))
    return e.mul(e.mul(e.num(0.5), x), e.add(e.num(1), inner))


def _softplus(e: Emit, x: Node, beta: Node | None = None, threshold: Node | None = None) -> Node:
    beta, threshold = beta or e.num(1), threshold or e.num(20)
    z = e.mul(x, beta)
    soft = e.div(e.f("log1p", e.f("exp", z)), beta)
    return e.where(e.builder.compare("gt", z, threshold), x, soft)


def _log_sigmoid(e: Emit, x: Node) -> Node:
    tail = e.f("log1p", e.f("exp", e.neg(e.builder.emit("abs", x))))
    return e.sub(e.op("min", x, e.num(0)), tail)


def _logaddexp(e: Emit, x: Node, y: Node) -> Node:
    tail = e.f("log1p", e.f("exp", e.neg(e.builder.emit("abs", e.sub(x, y)))))
    both = e.builder.emit("and", e.builder.compare("eq", x, y), _isinf(e, x))
    return e.where(both, x, e.add(e.op("max", x, y), tail))


def _hardsigmoid(e: Emit, x: Node) -> Node:
    return e.div(_hardtanh(e, e.add(x, e.num(3)), e.num(0), e.num(6)), e.num(6))


def _hardswish(e: Emit, x: Node) -> Node:
    return e.mul(x, _hardsigmoid(e, x))


def _mish(e: Emit, x: Node) -> Node:
    return e.mul(x, e.f("tanh", _softplus(e, x)))


def _sinh(e: Emit, x: Node) -> Node:
    return e.mul(e.num(0.5), e.sub(e.f("exp", x), e.f("exp", e.neg(x))))


def _cosh(e: Emit, x: Node) -> Node:
    return e.mul(e.num(0.5), e.add(e.f("exp", x), e.f("exp", e.neg(x))))


def _log10(e: Emit, x: Node) -> Node:
    return e.mul(e.f("log", x), e.num(1 / math.log(10)))


def _erfc(e: Emit, x: Node) -> Node:
    return e.sub(e.num(1), e.f("erf", x))


def _logit(e: Emit, x: Node, eps: Node | None = None) -> Node:
    if eps is not None:
        x = _clamp(e, x, eps, e.sub(e.num(1), eps))
    return e.sub(e.f("log", x), e.f("log1p", e.neg(x)))


# -- predicates, selection, bits ---------------------------------------------------------------------------------------
def _isnan(e: Emit, x: Node) -> Node:
    return e.builder.emit("ne", x, x) if x.dtype is F else e.builder.const(False)


def _isinf(e: Emit, x: Node) -> Node:
    if x.dtype is not F:
        return e.builder.const(False)
    return e.builder.emit("eq", e.builder.emit("abs", x), e.builder.const(math.inf))


def _is_infinity(sign: int) -> Operator:
    def is_infinity(e: Emit, x: Node) -> Node:
        if x.dtype is not F:
            return e.builder.const(False)
        return e.builder.emit("eq", x, e.builder.const(sign * math.inf))

    return is_infinity


def _nan_to_num(
    e: Emit, x: Node, nan: Node | None = None, posinf: Node | None = None, neginf: Node | None = None
) -> Node:
    if x.dtype is not F:
        return x
    biggest = 3.4028234663852886e38  # of fp32
    x = e.where(_isnan(e, x), nan or e.num(0), x)
    x = e.where(_is_infinity(1)(e, x), posinf or e.num(biggest), x)
    return e.where(_is_infinity(-1)(e, x), neginf or e.num(-biggest), x)


def _where(e: Emit, c: Node, x: Node, y: Node) -> Node:
    return e.where(e.true(c), x, y)


def _masked_fill(e: Emit, x: Node, mask: Node, value: Node) -> Node:
    return e.where(mask, value, x)


def _not(e: Emit, x: Node) -> Node:
    return e.builder.emit("not", x)


def _logical_not(e: Emit, x: Node) -> Node:
    return e.builder.emit("not", e.true(x))


def _logical(name: str) -> Operator:
    def logical(e: Emit, x: Node, y: Node) -> Node:
        return e.builder.emit(name, e.true(x), e.true(y))

    return logical


def _binary(name: str) -> Operator:
    return lambda e, x, y: e.op(name, x, y)


def _compare(name: str) -> Operator:
    return lambda e, x, y: e.cmp(name, x, y)


def _function(name: str) -> Operator:
    return lambda e, x: e.f(name, x)


def _copy(e: Emit, x: Node) -> Node:
    return e.true(x) if e.out is BOOL else e.builder.cast(x, e.out)


_FUNCTIONS = (
    "exp", "exp2", "log", "log2", "log1p", "expm1", "sqrt", "rsqrt", "tanh", "sigmoid", "sin", "cos", "tan", "erf",
)  # fmt: skip

#: aten name (any overload) -> operator
ELEMENTWISE: dict[str, Operator] = {
    **{name: _function(name) for name in _FUNCTIONS},
    **{name: _compare(name) for name in ("eq", "ne", "lt", "le", "gt", "ge")},
    **{name: _rounding(name) for name in ("floor", "ceil", "trunc", "round")},
    "reciprocal": _function("rcp"), "special_erf": _function("erf"), "special_expit": _function("sigmoid"),
    "add": _add, "sub": _sub, "rsub": _rsub, "mul": _mul, "div": _div, "pow": _pow, "neg": _neg,
    "abs": _abs, "sign": _sign, "sgn": _sign, "frac": _frac, "positive": _copy,
    "floor_divide": _binary("fdiv"), "remainder": _binary("mod"), "fmod": _binary("fmod"),
    "maximum": _binary("max"), "minimum": _binary("min"),
    "lerp": _lerp, "addcmul": _addcmul, "addcdiv": _addcdiv,
    "clamp": _clamp, "clamp_min": _clamp_min, "clamp_max": _clamp_max, "hardtanh": _hardtanh, "relu": _relu,
    "relu6": _relu6, "threshold": _threshold, "leaky_relu": _leaky_relu, "elu": _elu, "celu": _celu, "selu": _selu,
    "silu": _silu, "gelu": _gelu, "softplus": _softplus, "log_sigmoid_forward": _log_sigmoid,
    "logaddexp": _logaddexp, "hardsigmoid": _hardsigmoid, "hardswish": _hardswish, "mish": _mish,
    "sinh": _sinh, "cosh": _cosh, "log10": _log10, "erfc": _erfc, "logit": _logit,
    "isnan": _isnan, "isinf": _isinf, "isposinf": _is_infinity(1), "isneginf": _is_infinity(-1),
    "nan_to_num": _nan_to_num, "where": _where, "masked_fill": _masked_fill,
    "logical_and": _logical("and"), "logical_or": _logical("or"), "logical_xor": _logical("xor"),
    "logical_not": _logical_not, "bitwise_not": _not,
    "bitwise_and": _binary("and"), "bitwise_or": _binary("or"), "bitwise_xor": _binary("xor"),
    "bitwise_left_shift": _binary("shl"), "bitwise_right_shift": _binary("shr"),
    "__lshift__": _binary("shl"), "__rshift__": _binary("shr"), "__and__": _binary("and"), "__or__": _binary("or"),
    "__xor__": _binary("xor"),
    "_to_copy": _copy, "clone": _copy,
}  # fmt: skip

#: results that int8, int16 and uint8 represent whatever the operands
CANNOT_OVERFLOW = frozenset({
    "where", "masked_fill", "maximum", "minimum", "clamp", "clamp_min", "clamp_max", "bitwise_and", "bitwise_or",
    "bitwise_xor", "bitwise_not", "__and__", "__or__", "__xor__", "sign", "clone", "_to_copy", "relu",
    "remainder", "__rshift__", "bitwise_right_shift",
})  # fmt: skip


def is_comparison(name: str) -> bool:
    """Does the aten operator compare its operands, in their common type?"""
    return name in ("eq", "ne", "lt", "le", "gt", "ge")
