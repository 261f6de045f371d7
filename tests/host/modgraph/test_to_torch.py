"""TorchProgram: torch's meaning for every op, small values stay small, and nothing but its own memory is written."""

from __future__ import annotations

import pytest
import torch

from flexbwd.modgraph.ir import BOOL, I32, I64, UNARY_F, Builder, F
from flexbwd.modgraph.to_torch import TorchProgram, evaluate

Q = torch.arange(-8, 92, dtype=torch.int32)[:, None]
KV = torch.arange(70, dtype=torch.int32)
H = torch.arange(3, dtype=torch.int32)[:, None, None]
SCORE = torch.randn(3, 100, 70, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
INPUTS = {"score": SCORE, "q_idx": Q, "kv_idx": KV, "h": H}


@pytest.fixture
def build():
    builder = Builder()
    builder.s, builder.q, builder.k, builder.h = (builder.input(n) for n in ("score", "q_idx", "kv_idx", "h"))
    return builder


TORCH_UNARY = {"rcp": torch.reciprocal, "round": torch.round}


@pytest.mark.parametrize("op", [*UNARY_F, "neg", "abs", "sign"])
def test_float_ops_are_torchs(build, op):
    (got,) = evaluate([build.unary(op, build.s)], INPUTS, (), torch.float64)
    torch.testing.assert_close(
        got, TORCH_UNARY.get(op, getattr(torch, op, None))(SCORE), rtol=0, atol=0, equal_nan=True
    )


@pytest.mark.parametrize(
    ("op", "want"),
    [
        ("fdiv", lambda x, y: torch.div(x, y, rounding_mode="floor")),
        ("tdiv", lambda x, y: torch.div(x, y, rounding_mode="trunc")),
        ("mod", torch.remainder),
        ("fmod", torch.fmod),
        ("add", torch.add),
        ("sub", torch.sub),
        ("mul", torch.mul),
        ("max", torch.maximum),
        ("min", torch.minimum),
        ("and", torch.bitwise_and),
        ("or", torch.bitwise_or),
        ("xor", torch.bitwise_xor),
        ("div", torch.div),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
@pytest.mark.parametrize("divisor", [7, -3, "kv"], ids=str)
def test_integer_ops_are_torchs(build, op, want, divisor):
    y, other = (
        (build.arith("add", build.k, build.const(1)), KV + 1)
        if divisor == "kv"
        else (
            build.const(divisor),
            torch.tensor(divisor, dtype=torch.int32),
        )
    )
    (got,) = evaluate([build.arith(op, build.q, y)], INPUTS, (), torch.float64)
    assert torch.equal(got, want(Q.double(), other.double()) if op == "div" else want(Q, other))


def test_zero_divisor_in_some_lane_raises_nothing(build):
    (got,) = evaluate([build.arith("fdiv", build.q, build.k)], INPUTS, (), torch.float64)
    assert torch.equal(got[:, 1:], torch.div(Q, KV[1:], rounding_mode="floor"))


@pytest.mark.parametrize("other", ["nan", "value"])
@pytest.mark.parametrize("op", ["max", "min"])
def test_max_and_min_propagate_nan(build, op, other):
    score = torch.full_like(SCORE, torch.nan)
    y = build.const(float("nan")) if other == "nan" else build.const(1.0)
    (got,) = evaluate([build.arith(op, build.s, y)], {**INPUTS, "score": score}, (), torch.float64)
    assert got.isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("size", [3, 100], ids=["small", "large"])
def test_where_selects_bits_exactly(build, dtype, size):
    score = SCORE[:, :size].clone().to(dtype)
    score[0, 0, :4] = torch.tensor([torch.nan, torch.inf, -torch.inf, -0.0])
    inputs = {"score": score, "q_idx": Q[:size], "kv_idx": KV}
    cond = build.compare("gt", build.k, build.q)
    for other in (build.const(0.0), build.cast(build.q, F), build.unary("exp", build.s)):
        for x, y in ((build.s, other), (other, build.s)):
            (got,) = evaluate([build.where(cond, x, y)], inputs, (), dtype)
            a, b = evaluate([x, y], inputs, (), dtype)
            want = torch.where(Q[:size] < KV, a, b).expand(got.shape)
            torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


def test_values_keep_the_shape_of_what_they_depend_on(build):
    row = build.unary("exp", build.cast(build.q, F))
    pair = build.arith("sub", build.q, build.k)
    head = build.load(0, F, (build.h,))
    got = evaluate([row, pair, head, build.const(1.0)], INPUTS, (torch.randn(3),), torch.float64)
    assert [tuple(g.shape) for g in got] == [(100, 1), (100, 70), (3, 1, 1), ()]


@pytest.mark.parametrize("origins", [None, {"kv_idx": 0, "h": 0}], ids=["gather", "view"])
def test_load_wraps_negatives_and_clamps_the_rest(build, origins):
    table = torch.randn(3, 60, dtype=torch.float64)
    node = build.load(0, F, (build.h, build.q))
    (got,) = evaluate([node], INPUTS, (table,), torch.float64)
    index = Q.long().squeeze(1)
    want = table[:, torch.where(index < 0, index + 60, index).clamp(0, 59)][..., None]
    assert torch.equal(got, want)
    past = build.load(0, F, (build.h, build.k))
    (got,) = TorchProgram([past])(INPUTS, (table,), torch.float64, origins)
    assert torch.equal(got, table[:, KV.long().clamp(0, 59)][:, None])


def test_load_of_consecutive_indices_is_a_view(build):
    table = torch.randn(3, 200, 90, dtype=torch.float64)
    node = build.load(0, F, (build.h, build.arith("add", build.q, build.const(9)), build.k))
    (got,) = TorchProgram([node])(INPUTS, (table,), torch.float64, {"h": 0, "q_idx": -8, "kv_idx": 0})
    assert torch.equal(got, table[:, 1:101, :70])
    assert got.untyped_storage().data_ptr() == table.untyped_storage().data_ptr()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_loads_are_widened(build, dtype):
    table = torch.randn(3).to(dtype)
    (got,) = evaluate([build.load(0, F, (build.h,))], INPUTS, (table,), torch.float32)
    assert got.dtype == torch.float32
    assert torch.equal(got.flatten(), table.float())


def test_empty_capture_reads_as_zero(build):
    (got,) = evaluate([build.load(0, F, (build.h, build.q))], INPUTS, (torch.empty(3, 0),), torch.float64)
    assert got.shape == (3, 100, 1)
    assert not got.any()


@pytest.mark.parametrize("dtype", [I32, I64, BOOL], ids=lambda d: d.value)
def test_casts_are_torchs(build, dtype):
    (got,) = evaluate([build.cast(build.s, dtype)], INPUTS, (), torch.float64)
    assert torch.equal(got, SCORE.to({I32: torch.int32, I64: torch.int64, BOOL: torch.bool}[dtype]))


def test_only_consumed_inputs_are_overwritten(build):
    bias = torch.randn(3, 100, 70, dtype=torch.float64)
    loaded = build.load(0, F, (build.h, build.arith("add", build.q, build.const(8)), build.k))
    root = build.unary("tanh", build.arith("add", build.arith("mul", loaded, build.const(2.0)), build.s))
    origins = {"h": 0, "q_idx": -8, "kv_idx": 0}
    want = torch.tanh(bias * 2 + SCORE)
    kept, spent, before = SCORE.clone(), SCORE.clone(), bias.clone()
    for consume, score in (((), kept), (("score",), spent)):
        (got,) = TorchProgram([root], consume)({**INPUTS, "score": score}, (bias,), torch.float64, origins)
        torch.testing.assert_close(got, want, rtol=1e-15, atol=1e-15)
    assert torch.equal(kept, SCORE)
    assert torch.equal(bias, before)
    assert got.data_ptr() == spent.data_ptr()


def test_a_root_that_is_also_an_operand_is_not_overwritten(build):
    square = build.arith("mul", build.s, build.s)
    program = TorchProgram([square, build.unary("exp", square), build.s], consume=("score",))
    got = program({**INPUTS, "score": SCORE.clone()}, (), torch.float64)
    assert torch.equal(got[0], SCORE * SCORE)
    assert torch.equal(got[1], (SCORE * SCORE).exp())
    assert torch.equal(got[2], SCORE)


def test_sum_with_a_product_matches_whichever_side_it_is_on(build):
    product = build.arith("mul", build.load(0, F, (build.h,)), build.cast(build.q, F))
    table = torch.randn(3, dtype=torch.float64)
    p = table[:, None, None] * Q.double()
    for node, want in (
        (build.arith("add", build.s, product), SCORE + p),
        (build.arith("add", product, build.s), SCORE + p),
        (build.arith("sub", build.s, product), SCORE - p),
        (build.arith("sub", product, build.s), p - SCORE),
        (build.arith("add", product, product), p + p),
    ):
        (got,) = evaluate([node], INPUTS, (table,), torch.float64)
        torch.testing.assert_close(got, want, rtol=1e-15, atol=1e-14)


@pytest.mark.parametrize("op", ["fdiv", "tdiv", "mod", "fmod"])
def test_the_least_integer_over_minus_one_wraps(op):
    build = Builder()
    x, y = build.input("q_idx"), build.input("kv_idx")
    least = torch.tensor([-(2**31), -(2**31), 7, -7], dtype=torch.int32)
    by = torch.tensor([-1, 0, -1, -1], dtype=torch.int32)
    for root in (build.emit(op, x, y), build.emit(op, x, build.const(-1))):
        (got,) = evaluate([root], {"q_idx": least, "kv_idx": by}, [], torch.float64)
        want = [-(2**31), None, -7, 7] if op in ("fdiv", "tdiv") else [0, None, 0, 0]
        assert [g for g, w in zip(got.tolist(), want, strict=True) if w is not None] == [
            w for w in want if w is not None
        ]
