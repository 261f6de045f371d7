"""What interval arithmetic works with: the interval types, and how bounds are kept sound.

Integers are int64 and every bound is exact unless the result may leave its type (int32 or int64): then the value may
wrap, and its interval is the whole type. Floats are float64 with outward rounding wide enough for an evaluation in
fp32 or in fp64; a value that may be NaN is marked, and bounds speak of the other values.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from .ir import BOOL, I32, I64, DType, F

Array = np.ndarray


class Range(NamedTuple):
    """All values between `lo` and `hi`; `nan` tells where a float may also be NaN (None: nowhere)."""

    lo: Array
    hi: Array
    nan: Array | None = None


class Truth(NamedTuple):
    """What a boolean can be."""

    no: Array  # it can be false
    yes: Array  # it can be true


Interval = Range | Truth

LIMITS = {I32: (-(2**31), 2**31 - 1), I64: (-(2**63), 2**63 - 1)}
SAFE_SUM, SAFE_PRODUCT = 2**62, 2**31  # operands below these cannot overflow int64
_TINY = float(np.finfo(np.float32).tiny)


def whole(dtype: DType) -> Interval:
    """Anything a value of `dtype` can be."""
    if dtype is BOOL:
        return Truth(np.array(True), np.array(True))
    if dtype is F:
        return Range(np.array(-np.inf), np.array(np.inf), np.array(True))
    lo, hi = LIMITS[dtype]
    return Range(np.array(lo), np.array(hi))


def point(value: bool | int | float, dtype: DType) -> Interval:
    """The interval of one constant."""
    if dtype is BOOL:
        return Truth(np.array(not value), np.array(bool(value)))
    if dtype is F:
        if math.isnan(value):
            return whole(F)
        return outward(np.array(float(value)), np.array(float(value)), None)
    at = np.array(int(value), dtype=np.int64)
    return fit(at, at, dtype)


def fit(lo: Array, hi: Array, dtype: DType, bad: Array | None = None) -> Range:
    """`[lo, hi]`, or the whole type where it leaves the type or where `bad`."""
    low, high = LIMITS[dtype]
    if dtype is I32:
        out = (lo < low) | (hi > high)
        bad = out if bad is None else bad | out
    if bad is None or not bad.any():
        return Range(lo, hi)
    return Range(np.where(bad, low, lo), np.where(bad, high, hi))


def outward(lo: Array, hi: Array, nan: Array | None) -> Range:
    """Bounds moved out by one fp32 step where fp32 cannot hold them (or may flush them to zero)."""
    low, high = lo.astype(np.float32), hi.astype(np.float32)
    low = np.nextafter(low, np.float32(-np.inf)).astype(np.float64) if (low != lo).any() else lo
    high = np.nextafter(high, np.float32(np.inf)).astype(np.float64) if (high != hi).any() else hi
    low = np.where(lo.astype(np.float32) == lo, lo, np.minimum(low, lo))
    high = np.where(hi.astype(np.float32) == hi, hi, np.maximum(high, hi))
    low = np.where(np.abs(low) < _TINY, np.minimum(low, 0.0), low)
    high = np.where(np.abs(high) < _TINY, np.maximum(high, 0.0), high)
    return Range(low, high, nan)


def widen(x: Range, low: float = -math.inf, high: float = math.inf) -> Range:
    """Room for the error of a transcendental function; never outside its image `[low, high]`."""
    lo = np.where(np.isfinite(x.lo), x.lo - 1e-5 * np.abs(x.lo) - 1e-6, x.lo)
    hi = np.where(np.isfinite(x.hi), x.hi + 1e-5 * np.abs(x.hi) + 1e-6, x.hi)
    return outward(np.clip(lo, low, high), np.clip(hi, low, high), x.nan)


def either(*flags: Array | None) -> Array | None:
    """Logical or, None meaning nowhere."""
    found = None
    for flag in flags:
        if flag is not None:
            found = flag if found is None else found | flag
    return found


def corners(f: Callable[[Array, Array], Array], x: Range, y: Range) -> tuple[Array, Array]:
    """Extremes of an `f` that is monotone in each operand; NaN corners (such as 0·inf) do not count."""
    ends = [f(x.lo, y.lo), f(x.lo, y.hi), f(x.hi, y.lo), f(x.hi, y.hi)]
    low = np.fmin(np.fmin(ends[0], ends[1]), np.fmin(ends[2], ends[3]))
    high = np.fmax(np.fmax(ends[0], ends[1]), np.fmax(ends[2], ends[3]))
    return low, high


def unsafe(limit: int, dtype: DType, *operands: Range) -> Array | None:
    """Where an int64 operand reaches `limit`, so that the operation itself could overflow."""
    if dtype is I32:
        return None
    return either(*((x.lo <= -limit) | (x.hi >= limit) for x in operands))


def contains(x: Range, value: float) -> Array:
    """Where `value` is possible."""
    return (x.lo <= value) & (x.hi >= value)


def reaches_inf(x: Range) -> Array:
    """Where the value may be infinite."""
    return np.isinf(x.lo) | np.isinf(x.hi)
