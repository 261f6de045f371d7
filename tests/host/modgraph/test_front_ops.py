"""A traced operator means what torch means by it: values, dtypes, NaN and the derivative at kinks.

Oracle: the same callable called with whole tensors instead of scalars, and torch's autograd through it.
"""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from flexbwd.modgraph.derive import jacobians
from flexbwd.modgraph.frontend import ModKind, trace
from flexbwd.modgraph.ir import BOOL, I32, I64
from flexbwd.modgraph.to_torch import evaluate

SCORES = torch.tensor([-25.0, -6.0, -3.0, -1.5, -1.0, -0.5, -0.0, 0.0, 0.25, 0.5, 1.0, 2.0, 3.0, 6.0, 19.0, 30.0])
SPECIAL = torch.tensor([math.nan, math.inf, -math.inf])
LONG = torch.arange(16)
GRID = {
    "b": torch.tensor(1, dtype=torch.int32),
    "h": torch.tensor(3, dtype=torch.int32),
    "q_idx": torch.arange(16, dtype=torch.int32),
    "kv_idx": torch.arange(7, 23, dtype=torch.int32).roll(5),
}


def meaning(mod, score):
    """(traced, torch's): values of a score_mod on `score`, one position per element."""
    n = len(score)
    coords = {k: v if v.dim() == 0 else v[:n] for k, v in GRID.items()}
    traced, tensors = trace(mod, ModKind.SCORE, device="cpu")
    (got,) = evaluate([traced.output], {"score": score, **coords}, traced.prologue.run(tensors), score.dtype)
    return got.expand(n), mod(score, *coords.values())


_TORCH = (
    "exp exp2 expm1 tanh sigmoid sin cos tan erf erfc floor ceil trunc round frac abs neg sign sgn square sinh cosh "
    "nan_to_num relu positive selu celu"
)
_PREDICATES = "isnan isinf isposinf isneginf isfinite logical_not"
_FUNCTIONAL = (
    "silu gelu softplus elu relu6 leaky_relu hardtanh logsigmoid hardsigmoid hardswish mish softsign tanhshrink "
    "hardshrink softshrink"
)


def _as_float(predicate):
    return lambda s: predicate(s).float()


UNARY = {
    **{n: getattr(torch, n) for n in _TORCH.split()},
    **{n: getattr(F, n) for n in _FUNCTIONAL.split()},
    **{n: _as_float(getattr(torch, n)) for n in _PREDICATES.split()},
    "gelu tanh": lambda s: F.gelu(s, approximate="tanh"),
    "softplus beta": lambda s: F.softplus(s, beta=2.0, threshold=3.0),
    "elu alpha": lambda s: F.elu(s, alpha=0.3),
    "leaky_relu slope": lambda s: F.leaky_relu(s, 0.2),
    "hardtanh bounds": lambda s: F.hardtanh(s, -3.0, 0.5),
    "threshold": lambda s: F.threshold(s, 0.5, -7.0),
    "nan_to_num bounds": lambda s: torch.nan_to_num(s, 1.0, 2.0, 3.0),
    "clamp": lambda s: s.clamp(-1.5, 3.0),
    "clamp min": lambda s: s.clamp(min=-1.5),
    "clamp max": lambda s: s.clamp(max=3.0),
    "clip": lambda s: torch.clip(s, -1.5, 3.0),
    "clamp_min": lambda s: torch.clamp_min(s, 0.25),
    "clamp_max": lambda s: torch.clamp_max(s, 0.25),
    "clamp tensors": lambda s: torch.clamp(s, torch.tensor(-1.0), torch.tensor(2.0)),
    "pow 2": lambda s: s**2,
    "pow 3": lambda s: s**3,
    "pow -2": lambda s: s**-2,
    "pow 0": lambda s: s**0 + s,
    "pow 2.0": lambda s: s**2.0,
    "2 ** s": lambda s: 2.0**s,
    "3 ** s": lambda s: 3.0**s,
    "round decimals": lambda s: torch.round(s / 7, decimals=2),
    "masked_fill": lambda s: s.masked_fill(s < -1, 4.0),
    "masked_fill -inf": lambda s: s.masked_fill(s < -1, float("-inf")),
    "where scalars": lambda s: torch.where(s > 0, 1.0, 2.0) * s,
    "where inf": lambda s: torch.where(s > 0, s, -float("inf")),
    "lerp": lambda s: torch.lerp(s, s * s, 0.25),
    "lerp tensor": lambda s: torch.lerp(s, s * s, s / 30),
    "addcmul": lambda s: torch.addcmul(s, s, s, value=0.5),
    "addcdiv": lambda s: torch.addcdiv(s, s, s.abs() + 1, value=0.5),
    "add alpha": lambda s: torch.add(s, s, alpha=3),
    "sub alpha": lambda s: torch.sub(s, 2, alpha=3),
    "rsub": lambda s: 1 - s,
    "rdiv": lambda s: 1 / (s.abs() + 1),
    "div floor": lambda s: torch.div(s, 0.75, rounding_mode="floor"),
    "div trunc": lambda s: torch.div(s, 0.75, rounding_mode="trunc"),
    "floor_divide": lambda s: s // 0.75,
    "remainder": lambda s: s % 0.75,
    "remainder negative": lambda s: s % -0.75,
    "fmod": lambda s: torch.fmod(s, 0.75),
    "logaddexp": lambda s: torch.logaddexp(s, s * 0.5),
    "maximum": lambda s: torch.maximum(s, s * 0.5),
    "minimum": lambda s: torch.minimum(s, s * 0.5 + 1),
    "max binary": lambda s: torch.max(s, -s),
    "full_like": lambda s: s + torch.full_like(s, 3.0) * torch.ones_like(s) + torch.zeros_like(s),
    "constants": lambda s: s * torch.tensor(2.0) + torch.full((), 3.0) + s.new_ones(()) + torch.scalar_tensor(1.0),
    "casts": lambda s: s.to(torch.float32).float().type_as(s),
    "int and back": lambda s: s.clamp(-30, 30).int().float() + s.clamp(-30, 30).long(),
    "bool product": lambda s: s * (s > 0),
    "sigmoid of logit": lambda s: torch.logit(torch.sigmoid(s / 10), eps=1e-3),
    "xlogy": lambda s: torch.xlogy(s.abs(), s.abs() + 1),
    "heaviside-like": lambda s: (s > 0).float() - (s < 0).to(s.dtype),
    "no dropout": lambda s: F.dropout(s, 0.5, training=False),
}  # fmt: skip
POSITIVE = {
    **{n: getattr(torch, n) for n in ["log", "log2", "log10", "log1p", "sqrt", "rsqrt", "reciprocal"]},
    "pow 0.5": lambda s: s**0.5,
    "pow -0.5": lambda s: s**-0.5,
    "pow 1.7": lambda s: s**1.7,
    "pow self": lambda s: s ** s.clamp(max=3),
    "softcap": lambda s: 20 * torch.tanh(s / 20),
    "log sum": lambda s: torch.log(s.exp().clamp(max=1e9) + 1),
}


@pytest.mark.parametrize("name", UNARY)
def test_values_match_torch(name):
    op = UNARY[name]
    got, want = meaning(lambda s, b, h, q, k: op(s), SCORES)
    torch.testing.assert_close(got, want.to(got.dtype), rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("name", POSITIVE)
def test_values_on_positive_scores_match_torch(name):
    op = POSITIVE[name]
    got, want = meaning(lambda s, b, h, q, k: op(s), SCORES.abs() + 0.125)
    torch.testing.assert_close(got, want, rtol=2e-6, atol=2e-6)


# a NaN cast to int means nothing in torch either; torch's CPU gelu(inf) is NaN where its formula gives inf; lerp and
# softshrink of infinities and NaN differ between its kernels
_SPECIAL_DIFFERS = {"int and back", "sigmoid of logit", "gelu", "lerp tensor", "softshrink"}


@pytest.mark.parametrize("name", [n for n in UNARY if n not in _SPECIAL_DIFFERS])
def test_nan_and_infinities_match_torch(name):
    op = UNARY[name]
    got, want = meaning(lambda s, b, h, q, k: op(s), SPECIAL)
    torch.testing.assert_close(got, want.to(got.dtype), rtol=2e-6, atol=2e-6, equal_nan=True)


_NO_GRADIENT = {*_PREDICATES.split(), "heaviside-like", "floor_divide", "int and back"}
# torch takes no side, or not the side its own formula does, at these kinks
_UNDEFINED = {"max binary", "maximum", "minimum", "remainder", "remainder negative", "fmod", "sgn"}


@pytest.mark.parametrize("name", [n for n in UNARY if n not in _NO_GRADIENT | _UNDEFINED])
def test_derivatives_match_autograd_also_at_kinks(name):
    op = UNARY[name]
    score = SCORES.double().requires_grad_()
    traced, tensors = trace(lambda s, b, h, q, k: op(s), ModKind.SCORE, device="cpu")
    (slope,) = jacobians(traced.builder, traced.output, [traced.builder.input("score")])
    coords = {"score": score.detach(), **GRID}
    got = evaluate([slope], coords, traced.prologue.run(tensors), torch.float64)[0].double()
    (want,) = torch.autograd.grad(op(score).sum(), score)
    keep = torch.isfinite(want)  # pow -2 at zero
    torch.testing.assert_close(got.expand(len(score))[keep], want[keep], rtol=1e-6, atol=1e-6)


INTEGER = {
    "true division": lambda q, k: q / 3,
    "true division of ints": lambda q, k: q / (k + 1),
    "floor division": lambda q, k: (q - k) // 4,
    "floor division by tensor": lambda q, k: (q - k) // (k + 1),
    "remainder": lambda q, k: (q - k) % 4,
    "remainder negative": lambda q, k: (q - k) % -4,
    "fmod": lambda q, k: torch.fmod(q - k, 4),
    "div trunc": lambda q, k: torch.div(q - k, 4, rounding_mode="trunc"),
    "div floor": lambda q, k: torch.div(q - k, 4, rounding_mode="floor"),
    "rdiv": lambda q, k: 100 // (q + 1) + 7 % (k + 1),
    "abs": lambda q, k: (q - k).abs() + torch.sign(q - k),
    "pow": lambda q, k: (q - k) ** 3 + q**2 + 2**q,
    "bits": lambda q, k: (q & 5) | (k ^ 3) + (~q),
    "shifts": lambda q, k: (q << 2) + (k >> 1) + torch.bitwise_left_shift(q, 1),
    "clamp": lambda q, k: (q - k).clamp(-2, 5) + (q - k).clamp(min=0),
    "maximum": lambda q, k: torch.maximum(q, k) - torch.minimum(q, k) + torch.relu(q - k),
    "where": lambda q, k: torch.where(q > k, q, -1) + torch.where(q > k, 1, k),
    "long": lambda q, k: q.long() * k + k.to(torch.int64),
    "compare floats": lambda q, k: (q > 2.5) * 3 + (k <= q / 2),
    "bool sum": lambda q, k: ((q > k) + (k > 3)) * 2,
    "bool times int": lambda q, k: (q > k) * q,
    "logical": lambda q, k: torch.logical_and(q, k) + torch.logical_or(q, k) * 2 + torch.logical_xor(q, k > 8) * 4,
    "logical_not": lambda q, k: torch.logical_not(q) * 3 + (~(q > k)),
    "any all": lambda q, k: (q > k).long() * 2,
    "floor of int": lambda q, k: torch.floor(q) + torch.round(k) + torch.trunc(k),
    "log bucket": lambda q, k: (torch.log(1.0 + (q - k).abs().float()) / math.log(2.0) * 4).to(torch.int64),
    "exp of int": lambda q, k: torch.exp(-q) + torch.sqrt(k) + torch.tanh(k),
    "big": lambda q, k: (q < 2**40) + (q.long() + 2**40),
    "rsub": lambda q, k: 3 - q + torch.rsub(k, 5),
    "neg": lambda q, k: -q + (+k),
    "square": lambda q, k: torch.square(q - k),
    "float scale": lambda q, k: q * 0.5 + k * -1.0,
    "isnan of int": lambda q, k: torch.isnan(q) * 1 + torch.isinf(k) * 1 + q,
    "eq": lambda q, k: (q == k) * 1 + (q != k) * 2 + (q >= k) * 4 + (q <= k) * 8 + torch.eq(q, 3) * 16,
}


@pytest.mark.parametrize("name", INTEGER)
def test_integer_arithmetic_matches_torch(name):
    op = INTEGER[name]
    got, want = meaning(lambda s, b, h, q, k: op(q, k), SCORES)
    torch.testing.assert_close(got, want.float(), rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize(
    ("mask", "dtype"),
    [
        (lambda b, h, q, k: q >= k, I32),
        (lambda b, h, q, k: LONG[h] >= k, I64),
        (lambda b, h, q, k: (q > k) == (k > 3), BOOL),
        (lambda b, h, q, k: q > 2**40, I64),
    ],
    ids=["int32", "int64", "bool", "beyond int32"],
)
def test_comparisons_are_made_in_torchs_common_type(mask, dtype):
    traced, _ = trace(mask, ModKind.MASK, device="cpu")
    assert traced.output.args[0].dtype is dtype


def test_reductions_over_no_dimension_are_their_operand():
    got, want = meaning(lambda s, b, h, q, k: s.sum() + s.max() + (q > 2).any() + torch.mean(s), SCORES[:1])
    torch.testing.assert_close(got, want.expand(1))


def test_tanh_and_sigmoid_stay_whole():
    traced, _ = trace(lambda s, b, h, q, k: torch.tanh(s) + torch.sigmoid(s) + s.sigmoid(), ModKind.SCORE, device="cpu")
    text = repr(traced.output)
    assert "tanh(score)" in text
    assert text.count("sigmoid(score)") == 2
    assert "exp" not in text


def test_half_precision_inside_a_mod_is_the_mods_own_precision():
    traced, _ = trace(lambda s, b, h, q, k: (s.half() * 2).to(torch.bfloat16), ModKind.SCORE, device="cpu")
    assert repr(traced.output) == "(score * 2.0)"


def test_hand_written_backward_has_both_inputs():
    traced, _ = trace(lambda g, s, b, h, q, k: g * (1 - s.tanh() ** 2), ModKind.SCORE_BWD, device="cpu")
    score, grad = torch.tensor(0.3), torch.tensor(2.0)
    (got,) = evaluate([traced.output], {"score": score, "grad": grad, **GRID}, [], torch.float32)
    torch.testing.assert_close(got, grad * (1 - score.tanh() ** 2))


def test_lines_of_the_source_are_known_by_node():
    def mod(score, b, h, q_idx, kv_idx):
        distance = q_idx - kv_idx
        return score + distance

    traced, _ = trace(mod, ModKind.SCORE, device="cpu")
    first = mod.__code__.co_firstlineno
    assert traced.source_lines[traced.output] == f"test_front_ops.py:{first + 2}"
    b = traced.builder
    distance = b.arith("sub", b.input("q_idx"), b.input("kv_idx"))
    assert traced.source_lines[distance] == f"test_front_ops.py:{first + 1}"
