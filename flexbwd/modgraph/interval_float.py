"""Interval arithmetic on floats: one function per op, `(x[, y]) -> Range`, float64 bounds rounded outward."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch

from .interval_base import Array, Range, contains, corners, either, outward, reaches_inf, widen


def float_add(x: Range, y: Range) -> Range:
    nan = ((x.lo == -np.inf) & (y.hi == np.inf)) | ((x.hi == np.inf) & (y.lo == -np.inf))
    lo, hi = x.lo + y.lo, x.hi + y.hi
    return outward(np.where(np.isnan(lo), -np.inf, lo), np.where(np.isnan(hi), np.inf, hi), either(x.nan, y.nan, nan))


def float_sub(x: Range, y: Range) -> Range:
    return float_add(x, float_neg(y))


def float_mul(x: Range, y: Range) -> Range:
    lo, hi = corners(lambda a, b: np.nan_to_num(a * b, nan=0.0, posinf=np.inf, neginf=-np.inf), x, y)
    nan = (contains(x, 0) & reaches_inf(y)) | (contains(y, 0) & reaches_inf(x))
    return outward(lo, hi, either(x.nan, y.nan, nan))


def float_square(x: Range) -> Range:
    size = float_abs(x)
    return outward(size.lo * size.lo, size.hi * size.hi, x.nan)


def float_div(x: Range, y: Range) -> Range:
    lo, hi = corners(np.divide, x, y)
    zero = contains(y, 0)
    nan = (zero & contains(x, 0)) | (reaches_inf(x) & reaches_inf(y))
    open_ = zero | np.isnan(lo)
    return outward(np.where(open_, -np.inf, lo), np.where(open_, np.inf, hi), either(x.nan, y.nan, nan))


def float_fdiv(x: Range, y: Range) -> Range:
    """floor of the quotient, which torch rounds its own way: off by one for large quotients and infinite divisors."""
    ratio = float_div(x, y)
    lo = np.floor(ratio.lo) - reaches_inf(y) - (np.abs(ratio.lo) > 2**20) * (1 + np.abs(ratio.lo) * 1e-6)
    hi = np.floor(ratio.hi) + (np.abs(ratio.hi) > 2**20) * (1 + np.abs(ratio.hi) * 1e-6)
    nan = either(ratio.nan, contains(y, 0), reaches_inf(x))
    return outward(np.where(np.isnan(lo), -np.inf, lo), np.where(np.isnan(hi), np.inf, hi), nan)


def float_tdiv(x: Range, y: Range) -> Range:
    return float_trunc(float_div(x, y))


def _no_remainder(x: Range, y: Range) -> Array:
    """Where a remainder may be NaN: by zero, of infinity, and where fp32 cannot hold the quotient."""
    largest, smallest = float_abs(x).hi, float_abs(y).lo
    return contains(y, 0) | reaches_inf(x) | (largest > 1e38 * smallest)


def float_mod(x: Range, y: Range) -> Range:
    lo = np.where(y.lo > 0, 0.0, y.lo)
    hi = np.where(y.hi < 0, 0.0, y.hi)
    inside = (x.lo >= 0) & (x.hi < y.lo)
    nan = either(x.nan, y.nan, _no_remainder(x, y), reaches_inf(y))
    return outward(np.where(inside, x.lo, lo), np.where(inside, x.hi, hi), nan)


def float_fmod(x: Range, y: Range) -> Range:
    most = np.maximum(np.abs(y.lo), np.abs(y.hi))
    lo = np.maximum(-most, np.minimum(x.lo, 0.0))
    hi = np.minimum(most, np.maximum(x.hi, 0.0))
    return Range(lo, hi, either(x.nan, y.nan, _no_remainder(x, y)))


def float_pow(x: Range, y: Range) -> Range:
    """Monotone in both operands for bases >= 0; even and odd powers of any base; everything else is open."""
    whole_power = (y.lo == y.hi) & (np.floor(y.lo) == y.lo) & np.isfinite(y.lo)
    even = whole_power & (np.mod(y.lo, 2.0) == 0)
    size = float_abs(x)
    base = Range(np.where(even, size.lo, x.lo), np.where(even, size.hi, x.hi))
    lo, hi = corners(np.power, base, y)
    bad = ~((base.lo >= 0) | (whole_power & (y.lo >= 0))) | np.isnan(lo)
    bad = bad | ((base.lo <= 0) & (y.lo < 0) & ~even)  # a zero base may be -0.0
    result = widen(Range(np.where(bad, -np.inf, lo), np.where(bad, np.inf, hi)))
    return result._replace(nan=either(x.nan, y.nan, bad & ~whole_power))


def float_max(x: Range, y: Range) -> Range:
    return Range(np.maximum(x.lo, y.lo), np.maximum(x.hi, y.hi), either(x.nan, y.nan))


def float_min(x: Range, y: Range) -> Range:
    return Range(np.minimum(x.lo, y.lo), np.minimum(x.hi, y.hi), either(x.nan, y.nan))


def float_neg(x: Range) -> Range:
    return Range(-x.hi, -x.lo, x.nan)


def float_abs(x: Range) -> Range:
    return Range(np.maximum(np.maximum(x.lo, -x.hi), 0.0), np.maximum(-x.lo, x.hi), x.nan)


def _rounding(f: Callable[[Array], Array]) -> Callable[[Range], Range]:
    return lambda x: Range(f(x.lo), f(x.hi), x.nan)


float_trunc = _rounding(np.trunc)


def _rising(
    f: Callable[[Array], Array], image: Sequence[float] = (-math.inf, math.inf), domain: float = -math.inf
) -> Callable[[Range], Range]:
    """A rising function on `[domain, inf)`; NaN below."""

    def rule(x: Range) -> Range:
        nan = either(x.nan, x.lo < domain) if domain > -math.inf else x.nan
        return widen(Range(f(np.maximum(x.lo, domain)), f(np.maximum(x.hi, domain)), nan), *image)

    return rule


def float_sqrt(x: Range) -> Range:
    nan = either(x.nan, x.lo < 0)
    return outward(np.sqrt(np.maximum(x.lo, 0.0)), np.sqrt(np.maximum(x.hi, 0.0)), nan)


def float_rsqrt(x: Range) -> Range:
    lo, hi = 1.0 / np.sqrt(np.maximum(x.hi, 0.0)), 1.0 / np.sqrt(np.maximum(x.lo, 0.0))
    below_zero = np.array(-np.inf)  # rsqrt(-0.0) is -inf
    return widen(Range(np.where(x.lo <= 0, below_zero, lo), hi, either(x.nan, x.lo < 0)))


def float_rcp(x: Range) -> Range:
    one = np.array(1.0)
    return widen(float_div(Range(one, one), x))


def _sigmoid(x: Array) -> Array:
    return 0.5 * (1.0 + np.tanh(0.5 * x))


def _erf(x: Array) -> Array:
    return torch.erf(torch.from_numpy(np.ascontiguousarray(x))).numpy().reshape(x.shape)


def _wave(phase: float) -> Callable[[Range], Range]:
    """cos(x - phase): its extremes lie at multiples of pi."""

    def rule(x: Range) -> Range:
        lo, hi = x.lo - phase, x.hi - phase
        lost = ~(np.maximum(np.abs(lo), np.abs(hi)) < 1e4)  # beyond that fp32 arguments are too coarse to follow
        lo, hi = np.where(lost, 0.0, lo), np.where(lost, 10.0, hi)
        turns = np.ceil((lo - 1e-3) / np.pi), np.floor((hi + 1e-3) / np.pi)  # multiples of pi inside
        crosses = turns[1] >= turns[0]
        several = turns[1] > turns[0]
        top = several | (crosses & (np.mod(turns[0], 2) == 0))
        bottom = several | (crosses & (np.mod(turns[0], 2) == 1))
        ends = np.cos(lo), np.cos(hi)
        low = np.where(bottom, -1.0, np.minimum(*ends) - 1e-3)
        high = np.where(top, 1.0, np.maximum(*ends) + 1e-3)
        return outward(np.maximum(low, -1.0), np.minimum(high, 1.0), either(x.nan, reaches_inf(x)))

    return rule


def float_sign(x: Range) -> Range:
    """NaN has the sign 0 or NaN, depending on the backend."""
    if x.nan is None:
        return Range(np.sign(x.lo), np.sign(x.hi))
    lo, hi = np.sign(x.lo), np.sign(x.hi)
    return Range(np.where(x.nan, np.minimum(lo, 0), lo), np.where(x.nan, np.maximum(hi, 0), hi), x.nan)


def float_tan(x: Range) -> Range:
    return Range(np.array(-np.inf), np.array(np.inf), either(x.nan, reaches_inf(x)))


#: Float ops: (x[, y]) -> Range.
FLOAT_OPS: dict[str, Callable[..., Range]] = {
    "add": float_add, "sub": float_sub, "mul": float_mul, "div": float_div, "fdiv": float_fdiv, "tdiv": float_tdiv,
    "mod": float_mod, "fmod": float_fmod, "pow": float_pow, "neg": float_neg, "abs": float_abs,
    "max": float_max, "min": float_min, "sign": float_sign,
    "exp": _rising(np.exp, (0.0, math.inf)), "exp2": _rising(np.exp2, (0.0, math.inf)),
    "expm1": _rising(np.expm1, (-1.0, math.inf)), "log": _rising(np.log, domain=0.0),
    "log2": _rising(np.log2, domain=0.0), "log1p": _rising(np.log1p, domain=-1.0), "sqrt": float_sqrt,
    "rsqrt": float_rsqrt, "rcp": float_rcp, "tanh": _rising(np.tanh, (-1.0, 1.0)),
    "sigmoid": _rising(_sigmoid, (0.0, 1.0)), "erf": _rising(_erf, (-1.0, 1.0)), "sin": _wave(math.pi / 2),
    "cos": _wave(0.0), "tan": float_tan, "floor": _rounding(np.floor), "ceil": _rounding(np.ceil),
    "trunc": float_trunc, "round": _rounding(np.round),
}  # fmt: skip
