"""Interval arithmetic on integers: one function per op, `(x[, y], dtype) -> Range`, int64 bounds."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .interval_base import LIMITS, SAFE_PRODUCT, SAFE_SUM, Array, Range, contains, corners, either, fit, unsafe
from .ir import I32, DType


def int_add(x: Range, y: Range, dtype: DType) -> Range:
    return fit(x.lo + y.lo, x.hi + y.hi, dtype, unsafe(SAFE_SUM, dtype, x, y))


def int_sub(x: Range, y: Range, dtype: DType) -> Range:
    return fit(x.lo - y.hi, x.hi - y.lo, dtype, unsafe(SAFE_SUM, dtype, x, y))


def int_mul(x: Range, y: Range, dtype: DType) -> Range:
    lo, hi = corners(np.multiply, x, y)
    return fit(lo, hi, dtype, unsafe(SAFE_PRODUCT, dtype, x, y))


def int_square(x: Range, dtype: DType) -> Range:
    size = int_abs(x, dtype)
    return int_mul(size, size, dtype)


def _nonzero(y: Range) -> tuple[Range, Array]:
    """The divisor with harmless bounds where it may be zero, and where that is."""
    zero = contains(y, 0)
    return Range(np.where(zero, 1, y.lo), np.where(zero, 1, y.hi)), zero


def int_fdiv(x: Range, y: Range, dtype: DType) -> Range:
    y, zero = _nonzero(y)
    lo, hi = corners(np.floor_divide, x, y)
    return fit(lo, hi, dtype, either(zero, unsafe(2**63, dtype, x)))


def _truncate(x: Array, y: Array) -> Array:
    quotient = np.floor_divide(x, y)
    return quotient + ((quotient * y != x) & (quotient < 0))


def int_tdiv(x: Range, y: Range, dtype: DType) -> Range:
    y, zero = _nonzero(y)
    lo, hi = corners(_truncate, x, y)
    return fit(lo, hi, dtype, either(zero, unsafe(2**62, dtype, x, y)))


def int_mod(x: Range, y: Range, dtype: DType) -> Range:
    """Sign of the divisor; exact where the quotient is one number."""
    y, zero = _nonzero(y)
    lo = np.where(y.lo > 0, 0, y.lo + 1)
    hi = np.where(y.hi < 0, 0, y.hi - 1)
    hi = np.where((x.lo >= 0) & (y.lo > 0), np.minimum(hi, x.hi), hi)
    quotient = np.floor_divide(x.lo, y.lo)
    same = (quotient == np.floor_divide(x.hi, y.lo)) & (y.lo == y.hi)
    inside = (x.lo >= 0) & (x.hi < y.lo)
    lo = np.where(same, x.lo - quotient * y.lo, np.where(inside, x.lo, lo))
    hi = np.where(same, x.hi - quotient * y.lo, np.where(inside, x.hi, hi))
    return fit(lo, hi, dtype, zero)


def int_fmod(x: Range, y: Range, dtype: DType) -> Range:
    """Sign of the dividend."""
    positive = int_mod(x, y, dtype)
    y, zero = _nonzero(y)
    most = np.maximum(np.abs(y.lo), np.abs(y.hi)) - 1
    most = np.where(most < 0, LIMITS[dtype][1], most)  # |INT64_MIN| has no int64
    like_mod = (x.lo >= 0) & (y.lo > 0)
    lo = np.where(like_mod, positive.lo, np.maximum(-most, np.minimum(x.lo, 0)))
    hi = np.where(like_mod, positive.hi, np.minimum(most, np.maximum(x.hi, 0)))
    return fit(lo, hi, dtype, zero)


def int_pow(x: Range, y: Range, dtype: DType) -> Range:
    """Constant exponents of any base, and any exponent of a base >= 1."""
    size = int_abs(x, dtype)
    largest = np.power(np.maximum(size.hi, 1).astype(np.float64), np.maximum(y.hi, 0).astype(np.float64))
    constant = y.lo == y.hi
    bad = (largest >= 2.0**62) | (y.lo < 0) | ~(constant | (x.lo >= 1))
    bad = bad | (size.hi < size.lo) | (size.hi >= 2**62)
    low, high = np.where(bad, 0, y.lo), np.where(bad, 0, y.hi)
    even = constant & (y.lo % 2 == 0)
    lo = np.where(even, np.power(size.lo, low), np.power(x.lo, low))
    hi = np.where(even, np.power(size.hi, high), np.power(x.hi, high))
    return fit(lo, hi, dtype, bad)


def int_max(x: Range, y: Range, dtype: DType) -> Range:
    return Range(np.maximum(x.lo, y.lo), np.maximum(x.hi, y.hi))


def int_min(x: Range, y: Range, dtype: DType) -> Range:
    return Range(np.minimum(x.lo, y.lo), np.minimum(x.hi, y.hi))


def _all_ones(x: Array) -> Array:
    """The smallest 2**k - 1 >= x, for x >= 0."""
    for shift in (1, 2, 4, 8, 16, 32):
        x = x | (x >> shift)
    return x


def _bitwise(f: np.ufunc, low: Callable[[Range, Range], Array], high: Callable[[Range, Range], Array]) -> Callable:
    def rule(x: Range, y: Range, dtype: DType) -> Range:
        points = (x.lo == x.hi) & (y.lo == y.hi)
        exact = f(x.lo, y.lo)
        bad = ~points & ((x.lo < 0) | (y.lo < 0))
        return fit(np.where(points, exact, low(x, y)), np.where(points, exact, high(x, y)), dtype, bad)

    return rule


_int_and = _bitwise(np.bitwise_and, lambda x, y: np.array(0), lambda x, y: np.minimum(x.hi, y.hi))
int_or = _bitwise(np.bitwise_or, lambda x, y: np.maximum(x.lo, y.lo), lambda x, y: _all_ones(x.hi | y.hi))
int_xor = _bitwise(np.bitwise_xor, lambda x, y: np.array(0), lambda x, y: _all_ones(x.hi | y.hi))


def int_and(x: Range, y: Range, dtype: DType) -> Range:
    """A mask 2**k - 1 is a remainder, also of negative numbers; a mask >= 0 bounds the result by itself."""
    for a, b in ((x, y), (y, x)):
        if (b.lo == b.hi).all() and ((b.lo >= 0) & (b.lo < 2**62) & (b.lo & (b.lo + 1) == 0)).all():
            return int_mod(a, Range(b.lo + 1, b.lo + 1), dtype)
    return _int_and(x, y, dtype)


def int_shl(x: Range, y: Range, dtype: DType) -> Range:
    bad = (y.lo < 0) | (y.hi > 31)
    low, high = np.clip(y.lo, 0, 31), np.clip(y.hi, 0, 31)
    shifted = int_mul(x, Range(np.left_shift(1, low), np.left_shift(1, high)), dtype)
    return fit(shifted.lo, shifted.hi, dtype, bad)


def int_shr(x: Range, y: Range, dtype: DType) -> Range:
    bad = (y.lo < 0) | (y.hi > (31 if dtype is I32 else 63))
    lo, hi = corners(np.right_shift, x, Range(np.clip(y.lo, 0, 63), np.clip(y.hi, 0, 63)))
    return fit(lo, hi, dtype, bad)


def int_neg(x: Range, dtype: DType) -> Range:
    return fit(-x.hi, -x.lo, dtype, unsafe(2**63, dtype, x))


def int_abs(x: Range, dtype: DType) -> Range:
    lo = np.maximum(np.maximum(x.lo, -x.hi), 0)
    return fit(lo, np.maximum(-x.lo, x.hi), dtype, unsafe(2**63, dtype, x))


def int_sign(x: Range, dtype: DType) -> Range:
    return Range(np.sign(x.lo), np.sign(x.hi))


def int_not(x: Range, dtype: DType) -> Range:
    return Range(~x.hi, ~x.lo)


#: Integer ops: (x[, y], dtype) -> Range.
INT_OPS: dict[str, Callable[..., Range]] = {
    "add": int_add, "sub": int_sub, "mul": int_mul, "fdiv": int_fdiv, "tdiv": int_tdiv, "mod": int_mod,
    "fmod": int_fmod, "pow": int_pow, "max": int_max, "min": int_min, "and": int_and, "or": int_or, "xor": int_xor,
    "shl": int_shl, "shr": int_shr, "neg": int_neg, "abs": int_abs, "sign": int_sign, "not": int_not,
}  # fmt: skip
