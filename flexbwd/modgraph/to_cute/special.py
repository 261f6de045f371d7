"""Float functions in their fast, exact and host forms.

Errors of the fast forms (CUDA's documentation, and measured): ex2 and lg2 2 ulp, tanh 2**-11 relative, rcp and rsqrt
1 ulp, sin and cos 2**-21 absolute after our own reduction. All are below the 16-bit rounding of P.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from cutlass._mlir.dialects import arith
from cutlass._mlir.dialects import math as mlir_math

from flexbwd.modgraph.ir import I32, F, Node

if TYPE_CHECKING:
    from .ops import Emit

Value = Any
_LOG2_E, _LN_2 = math.log2(math.e), math.log(2.0)
_TWO_PI_HIGH = 6.28125  # exact products with whole numbers up to 2**16
_TWO_PI_LOW = 2 * math.pi - _TWO_PI_HIGH
_HALF_PI = (1.5703125, 4.837512969970703125e-4, 7.54978995489188216e-8)  # short parts: products with turns are exact
_SIN = (-1.9515295891e-4, 8.3321608736e-3, -1.6666654611e-1)
_COS = (2.443315711809948e-5, -1.388731625493765e-3, 4.166664568298827e-2)
# erf(x) = 1 - (c1 t + … + c5 t^5) exp(-x²), t = 1 / (1 + p x), x >= 0; |error| <= 1.5e-7 (Abramowitz & Stegun 7.1.26)
_ERF_P = 0.3275911
_ERF_C = (0.254829592, -0.284496736, 1.421413741, -1.453152027, 1.061405429)


class Special:
    """Methods are named as the IR's ops; `exact` forbids approximate instructions."""

    def __init__(self, emit: Emit) -> None:
        self.emit = emit

    # -- quotients and roots -------------------------------------------------------------------------------------------
    def div(self, x: Value, y: Value, exact: bool, node: Node) -> Value:
        return arith.divf(x, y) if exact else arith.mulf(x, self.rcp(y, False, node))

    def rcp(self, x: Value, exact: bool, node: Node) -> Value:
        return arith.divf(self.emit.number(1.0), x) if exact else self.emit.intrinsic("rcp.approx.ftz.f", x)

    def sqrt(self, x: Value, exact: bool, node: Node) -> Value:
        return mlir_math.sqrt(x) if exact else self.emit.intrinsic("sqrt.approx.ftz.f", x)

    def rsqrt(self, x: Value, exact: bool, node: Node) -> Value:
        if exact:
            return arith.divf(self.emit.number(1.0), mlir_math.sqrt(x))
        return self.emit.intrinsic("rsqrt.approx.ftz.f", x)

    # -- exponentials and logarithms -----------------------------------------------------------------------------------
    def exp2(self, x: Value, exact: bool, node: Node) -> Value:
        return mlir_math.exp2(x) if exact else self.emit.intrinsic("ex2.approx.ftz.f", x)

    def exp(self, x: Value, exact: bool, node: Node) -> Value:
        return mlir_math.exp(x) if exact else self.exp2(arith.mulf(x, self.emit.number(_LOG2_E)), False, node)

    def expm1(self, x: Value, exact: bool, node: Node) -> Value:
        if exact:
            return mlir_math.expm1(x)
        return arith.subf(self.exp(x, False, node), self.emit.number(1.0))

    def log2(self, x: Value, exact: bool, node: Node) -> Value:
        return mlir_math.log2(x) if exact else self.emit.intrinsic("lg2.approx.ftz.f", x)

    def log(self, x: Value, exact: bool, node: Node) -> Value:
        return mlir_math.log(x) if exact else arith.mulf(self.log2(x, False, node), self.emit.number(_LN_2))

    def log1p(self, x: Value, exact: bool, node: Node) -> Value:
        if exact:
            return mlir_math.log1p(x)
        return self.log(arith.addf(x, self.emit.number(1.0)), False, node)

    def pow(self, x: Value, y: Value, exact: bool, node: Node) -> Value:
        """A constant exponent that is no whole number: NaN of a negative base, like the logarithm."""
        exponent = node.args[1]
        if exact or not exponent.is_const or float(exponent.value).is_integer():
            return mlir_math.powf(x, y)
        return self.exp2(arith.mulf(y, self.log2(x, False, node)), False, node)

    # -- sigmoids ------------------------------------------------------------------------------------------------------
    def tanh(self, x: Value, exact: bool, node: Node) -> Value:
        return mlir_math.tanh(x) if exact else self.emit.intrinsic("tanh.approx.f", x)

    def sigmoid(self, x: Value, exact: bool, node: Node) -> Value:
        if exact:
            one = self.emit.number(1.0)
            return arith.divf(one, arith.addf(one, mlir_math.exp(arith.negf(x))))
        half = self.emit.number(0.5)
        return self.emit.fma(self.tanh(arith.mulf(x, half), False, node), half, half)

    def erf(self, x: Value, exact: bool, node: Node) -> Value:
        if exact and not self.emit.host:
            return mlir_math.erf(x)
        number, fma = self.emit.number, self.emit.fma
        size = mlir_math.absf(x)
        t = self.rcp(fma(size, number(_ERF_P), number(1.0)), exact, node)
        poly = number(_ERF_C[-1])
        for c in reversed(_ERF_C[:-1]):
            poly = fma(poly, t, number(c))
        tail = self.exp(arith.negf(arith.mulf(size, size)), exact, node)
        magnitude = arith.subf(number(1.0), arith.mulf(arith.mulf(poly, t), tail))
        return mlir_math.copysign(magnitude, x)

    # -- circular ------------------------------------------------------------------------------------------------------
    def sin(self, x: Value, exact: bool, node: Node) -> Value:
        if exact:
            return self._quadrants(x)[0]
        return self.emit.intrinsic("sin.approx.ftz.f", self._reduced(x))

    def cos(self, x: Value, exact: bool, node: Node) -> Value:
        if exact:
            return self._quadrants(x)[1]
        return self.emit.intrinsic("cos.approx.ftz.f", self._reduced(x))

    def tan(self, x: Value, exact: bool, node: Node) -> Value:
        return self.div(self.sin(x, exact, node), self.cos(x, exact, node), exact, node)

    def _quadrants(self, x: Value) -> tuple[Value, Value]:
        """sin and cos to 2 ulp of 1 while |x| < 2**16; libdevice's own keep a table in local memory.

        Polynomials for |r| <= π/4 (Cephes, Moshier 1989); x = r + quadrant · π/2.
        """
        emit, number, fma = self.emit, self.emit.number, self.emit.fma
        turns = mlir_math.roundeven(arith.mulf(x, number(2 / math.pi)))
        r = x
        for part in _HALF_PI:
            r = fma(turns, number(-part), r)
        z = arith.mulf(r, r)
        sine = fma(arith.mulf(r, z), self._polynomial(z, _SIN), r)
        cosine = fma(arith.mulf(z, z), self._polynomial(z, _COS), fma(z, number(-0.5), number(1.0)))
        quadrant = emit.cast(turns, F, I32)
        odd = emit.bit(quadrant, 0)
        flip_sin = emit.bit(quadrant, 1)
        flip_cos = arith.xori(odd, flip_sin)
        found = arith.select(odd, cosine, sine), arith.select(odd, sine, cosine)
        return tuple(arith.select(f, arith.negf(v), v) for f, v in zip((flip_sin, flip_cos), found, strict=True))

    def _polynomial(self, z: Value, coefficients: tuple[float, ...]) -> Value:
        total = self.emit.number(coefficients[0])
        for c in coefficients[1:]:
            total = self.emit.fma(total, z, self.emit.number(c))
        return total

    def _reduced(self, x: Value) -> Value:
        """x less the nearest multiple of 2π: the hardware's error grows with |x|."""
        turns = mlir_math.roundeven(arith.mulf(x, self.emit.number(0.5 / math.pi)))
        near = self.emit.fma(turns, self.emit.number(-_TWO_PI_HIGH), x)
        return self.emit.fma(turns, self.emit.number(-_TWO_PI_LOW), near)

    # -- rounding quotients --------------------------------------------------------------------------------------------
    def tdiv(self, x: Value, y: Value, exact: bool, node: Node) -> Value:
        return mlir_math.trunc(arith.divf(x, y))

    def fmod(self, x: Value, y: Value, exact: bool, node: Node) -> Value:
        """Exact while |x / y| < 2**23: the quotient is then right to one, and the remainder says which way."""
        emit = self.emit
        size_x, size_y = mlir_math.absf(x), mlir_math.absf(y)
        quotient = mlir_math.trunc(arith.divf(size_x, size_y))
        rest = emit.fma(arith.negf(quotient), size_y, size_x)
        rest = arith.select(emit.compare("lt", rest, emit.number(0.0), F), arith.addf(rest, size_y), rest)
        rest = arith.select(emit.compare("ge", rest, size_y, F), arith.subf(rest, size_y), rest)
        rest = arith.select(emit.compare("eq", size_y, emit.number(math.inf), F), size_x, rest)
        return mlir_math.copysign(rest, x)

    def mod(self, x: Value, y: Value, exact: bool, node: Node) -> Value:
        emit, zero = self.emit, self.emit.number(0.0)
        rest = self.fmod(x, y, exact, node)
        differ = arith.xori(emit.compare("lt", rest, zero, F), emit.compare("lt", y, zero, F))
        fix = arith.andi(emit.compare("ne", rest, zero, F), differ)
        return arith.select(fix, arith.addf(rest, y), rest)

    def fdiv(self, x: Value, y: Value, exact: bool, node: Node) -> Value:
        """(x - x mod y) / y, rounded to the whole number that it is; x / 0 as the division gives it."""
        emit = self.emit
        whole = mlir_math.roundeven(arith.divf(arith.subf(x, self.mod(x, y, exact, node)), y))
        return arith.select(emit.compare("eq", y, emit.number(0.0), F), arith.divf(x, y), whole)

    def sign(self, x: Value, exact: bool, node: Node) -> Value:
        """0 of a NaN, as torch gives."""
        emit, zero = self.emit, self.emit.number(0.0)
        up = arith.select(emit.compare("gt", x, zero, F), emit.number(1.0), zero)
        return arith.select(emit.compare("lt", x, zero, F), emit.number(-1.0), up)
