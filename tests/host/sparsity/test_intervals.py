"""Bounds of mask graphs over blocks of coordinates contain every element's value."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flexbwd.modgraph.interval_base import Range, Truth
from flexbwd.modgraph.intervals import IntervalProgram, bounds
from flexbwd.modgraph.ir import BOOL, I32, I64, Builder, F
from flexbwd.modgraph.range_table import RangeTable, reduce_dim

B, H, S = 2, 2, (176, 208)


def block_ranges(block: tuple[int, int]) -> dict:
    """Ranges of all blocks: b and h are points on their own axes."""
    axes = []
    for length, size in zip(S, block, strict=True):
        first = np.arange(0, length, size)
        axes.append((first, np.minimum(first + size, length) - 1))
    b, h = np.arange(B)[:, None, None, None], np.arange(H)[:, None, None]
    q, kv = axes
    return {"b": (b, b), "h": (h, h), "q_idx": (q[0][:, None], q[1][:, None]), "kv_idx": kv}


def assert_contains(found: Range | Truth, value: torch.Tensor, block: tuple[int, int], label: str) -> None:
    """Every element of `value` (broadcast to `[B, H, *S]`) lies in the bounds of its block."""

    def per_element(bound: np.ndarray) -> np.ndarray:
        for axis in (-2, -1):
            if bound.ndim >= -axis and bound.shape[axis] > 1:
                bound = np.repeat(bound, block[axis], axis=axis)
                bound = bound.take(range(S[axis]), axis=axis)
        return bound

    part, low, high = value.numpy(), per_element(np.asarray(found[0])), per_element(np.asarray(found[1]))
    if isinstance(found, Truth):
        assert (part | low).all(), f"{label}: a false element in a block that cannot be false"
        assert (~part | high).all(), f"{label}: a true element in a block that cannot be true"
        return
    nan = per_element(np.asarray(False if found.nan is None else found.nan))
    is_nan = np.isnan(part)
    assert (~is_nan | nan).all(), f"{label}: a NaN that was not announced"
    assert (is_nan | ((low <= part) & (part <= high))).all(), f"{label}: an element outside its bounds"


@settings(max_examples=300, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), block=st.sampled_from([(16, 48), (64, 32), (128, 128)]))
def test_every_value_of_a_random_program_lies_in_its_bounds(brute, seed, block):
    graph = brute.RandomGraph(seed)
    root = graph.mask(6)
    program = IntervalProgram(root, graph.captures)
    inputs = brute.coordinates(B, H, torch.arange(S[0]), torch.arange(S[1]))
    for dtype in (torch.float32, torch.float64):
        values = brute.evaluate(root, inputs, graph.captures, dtype)
        found = program.all(block_ranges(block))
        for node, interval in found.items():
            assert_contains(interval, values[node], block, f"{dtype} {node.op}")


UNARY = (
    "exp", "exp2", "log", "log2", "log1p", "expm1", "sqrt", "rsqrt", "rcp", "tanh", "sigmoid", "sin", "cos", "tan",
    "erf", "floor", "ceil", "trunc", "round", "neg", "abs", "sign",
)  # fmt: skip


@pytest.mark.parametrize("op", UNARY)
@pytest.mark.parametrize("scale", [0.01, 0.37, 25.0])
def test_unary_float_bounds_hold_everywhere(brute, op, scale):
    build = Builder()
    x = build.arith("mul", build.cast(build.arith("sub", build.input("q_idx"), build.const(88)), F), build.const(scale))
    root = build.unary(op, x)
    inputs = brute.coordinates(B, H, torch.arange(S[0]), torch.arange(S[1]))
    found = IntervalProgram(root, [])(block_ranges((16, 16)))
    for dtype in (torch.float32, torch.float64):
        assert_contains(found, brute.evaluate(root, inputs, [], dtype)[root], (16, 16), op)


def _q_and_kv(build: Builder):
    return build.input("q_idx"), build.input("kv_idx")


INF, NAN = float("inf"), float("nan")
SPECIAL = torch.tensor(
    [-INF, -3e38, -1e30, -129.0, -5.0, -2.5, -2.0, -1.0, -0.3, -1e-30, -1e-42, -0.0, 0.0, 1e-42, 1e-20, 0.5, 1.0, 1.5,
     3.0, 4.0, 100.0, 2.0**24 + 2, 1e30, 3e38, INF, NAN]
)  # fmt: skip
BINARY = ("add", "sub", "mul", "div", "max", "min", "pow", "fdiv", "tdiv", "mod", "fmod")


@pytest.mark.parametrize("op", [*BINARY, "lt", "le", "eq", "ne"])
@pytest.mark.parametrize("width", [1, 2, 3, 7])
def test_binary_float_bounds_hold_for_every_pair_of_special_ranges(brute, op, width):
    build = Builder()
    x, y = (build.load(slot, F, (i,)) for slot, i in enumerate(_q_and_kv(build)))
    root = build.compare(op, x, y) if op in ("lt", "le", "eq", "ne") else build.arith(op, x, y)
    first = np.arange(len(SPECIAL) - width + 1)
    table = np.stack([np.arange(width) + i for i in first])  # all ranges of neighbours
    found = IntervalProgram(root, [SPECIAL, SPECIAL])(
        {"q_idx": (first[:, None], first[:, None] + width - 1), "kv_idx": (first, first + width - 1)}
    )
    inputs = brute.coordinates(1, 1, torch.arange(len(SPECIAL)), torch.arange(len(SPECIAL)))
    for dtype in (torch.float32, torch.float64):
        value = brute.evaluate(root, inputs, [SPECIAL, SPECIAL], dtype)[root].numpy()
        elements = value[table[:, None, :, None], table[None, :, None, :]]  # [q ranges, kv ranges, width, width]
        lo, hi = (np.asarray(bound)[..., None, None] for bound in found[:2])
        if isinstance(found, Truth):
            assert ((elements | lo) & (~elements | hi)).all()
            continue
        nan = np.isnan(elements)
        assert (~nan | (False if found.nan is None else found.nan[..., None, None])).all(), f"{op}: a hidden NaN"
        assert (nan | ((lo <= elements) & (elements <= hi))).all(), f"{op}: an element outside its bounds"


@pytest.mark.parametrize("op", ["add", "sub", "mul", "max", "min", "fdiv", "tdiv", "mod", "fmod", "and", "or", "xor"])
@pytest.mark.parametrize("dtype", [I32, I64], ids=lambda d: d.value)
@pytest.mark.parametrize("near", [0, 2**31 - 40, -(2**31), 2**62], ids=["zero", "max32", "min32", "huge64"])
def test_integers_near_their_limits_wrap_inside_the_bounds(brute, op, dtype, near):
    build = Builder()
    if dtype is I32 and abs(near) > 2**31:
        near = 2**30
    values = torch.arange(-100, 100) + max(near, 100 - 2**31 if dtype is I32 else near)
    table = values.to(torch.int32 if dtype is I32 else torch.int64)
    x = build.load(0, dtype, (build.input("q_idx"),))
    y = build.cast(build.arith("sub", build.input("kv_idx"), build.const(120)), dtype)
    if op in ("fdiv", "tdiv", "mod", "fmod"):
        unsafe = build.compare("le", build.unary("abs", y), build.const(1))  # torch: x / 0 and INT_MIN / -1 trap
        y = build.where(unsafe, build.const(7, dtype), y)
    root = build.arith(op, x, y)
    found = IntervalProgram(root, [table])(block_ranges((16, 16)))
    value = brute.evaluate(root, brute.coordinates(B, H, torch.arange(S[0]), torch.arange(S[1])), [table])[root]
    assert_contains(found, value, (16, 16), op)


def _exactness_cases():
    build = Builder()
    q, kv = _q_and_kv(build)
    width = build.const(64)
    start = build.arith("sub", q, build.arith("mod", q, width))
    yield "q - kv", build.arith("sub", q, kv), 5 - 63, 15
    yield "q - q % 64", start, 0, 0
    yield (
        "64·(q // 64) + q % 64",
        build.arith("add", build.arith("mul", build.arith("fdiv", q, width), width), build.arith("mod", q, width)),
        5,
        15,
    )
    yield "(q + kv) - (kv - q)", build.arith("sub", build.arith("add", q, kv), build.arith("sub", kv, q)), 10, 30
    yield "q + 3 > q", build.compare("gt", build.arith("add", q, build.const(3)), q), False, True
    yield "q - q % 64 <= q", build.compare("le", start, q), False, True
    yield "q·q", build.arith("mul", build.arith("sub", q, build.const(9)), build.arith("sub", q, build.const(9))), 0, 36


@pytest.mark.parametrize(("root", "lo", "hi"), [pytest.param(*c[1:], id=c[0]) for c in _exactness_cases()])
def test_linear_integer_bounds_are_exact(root, lo, hi):
    found = bounds(root, {"q_idx": (np.array([5]), np.array([15])), "kv_idx": (np.array([0]), np.array([63]))}, [])
    assert (int(found[0].min()), int(found[1].max())) == (lo, hi)


def test_a_linear_form_that_may_wrap_is_not_trusted(brute):
    build = Builder()
    q, _ = _q_and_kv(build)
    big = build.arith("mul", q, build.const(2**26))
    big = build.arith("add", big, build.const(2**26 - 3))  # 2**31 - 3 at q = 31
    root = build.compare("gt", build.arith("add", big, build.const(5)), big)
    inputs = brute.coordinates(B, H, torch.arange(S[0]), torch.arange(S[1]))
    found = IntervalProgram(root, [])(block_ranges((16, 16)))
    assert_contains(found, brute.evaluate(root, inputs, [])[root], (16, 16), "wrap")


@pytest.mark.parametrize("op", ["lt", "le", "gt", "ge", "eq", "ne"])
def test_a_comparison_with_a_possible_nan_is_undecided(op):
    build = Builder()
    x = build.load(0, F, (build.input("q_idx"),))
    table = torch.tensor([1.0, float("nan"), 3.0, 4.0])
    root = build.compare(op, x, build.const(2.0))
    no, yes = bounds(root, {"q_idx": (np.array([0, 2]), np.array([1, 3]))}, [table])
    truth = [getattr(torch, op)(table[s], torch.tensor(2.0)) for s in (slice(0, 2), slice(2, 4))]
    assert no.tolist() == [bool((~t).any()) for t in truth]
    assert yes.tolist() == [bool(t.any()) for t in truth]


def test_bounds_mark_a_possible_nan_in_both_ends():
    build = Builder()
    root = build.unary("sqrt", build.cast(build.arith("sub", build.input("q_idx"), build.const(4)), F))
    lo, hi = bounds(root, {"q_idx": (np.array([0, 4]), np.array([7, 8]))}, [])
    assert np.isnan(lo[0])
    assert np.isnan(hi[0])
    assert (lo[1], hi[1]) == (0.0, 2.0)


def test_a_product_that_a_gpu_may_flush_to_zero_can_be_zero():
    build = Builder()
    root = build.arith("mul", *(build.load(slot, F, (build.input("q_idx"),)) for slot in (0, 1)))
    at = np.array([0])
    lo, hi = bounds(root, {"q_idx": (at, at)}, [torch.tensor([1e-25]), torch.tensor([1e-15])])
    assert lo[0] <= 0 < hi[0]


def test_an_absent_input_can_be_anything():
    build = Builder()
    no, yes = bounds(build.compare("gt", build.input("score"), build.const(0.0)), {}, [])
    assert no.all()
    assert yes.all()


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), n=st.integers(1, 300))
def test_range_table_bounds_every_range_and_is_exact_on_chunks(seed, n):
    random = np.random.default_rng(seed)
    values = random.integers(-1000, 1000, (2, n))
    lo = random.integers(0, n, 64)
    hi = np.minimum(n - 1, lo + random.integers(0, n, 64))
    for op, reduce in ((np.minimum, np.min), (np.maximum, np.max)):
        got = RangeTable(values, op).query([np.array(1)], lo, hi)
        want = np.array([reduce(values[1, a : b + 1]) for a, b in zip(lo, hi, strict=True)])
        assert (op(got, want) == got).all()
        chunked = (lo // 16 != hi // 16) | (lo == hi) | ((lo % 16 == 0) & ((hi % 16 == 15) | (hi == n - 1)))
        assert (got == want)[chunked].all()


def test_two_ranged_dimensions_are_reduced_block_by_block():
    values = np.random.default_rng(0).integers(0, 10**6, (96, 160))
    rows = np.arange(0, 96, 32)[:, None], np.arange(31, 96, 32)[:, None]
    reduced, index = reduce_dim(values, 0, rows, np.minimum)
    assert (reduced[index[:, 0]] == values.reshape(3, 32, 160).min(1)).all()
    build = Builder()
    root = build.load(0, I64, _q_and_kv(build))
    columns = np.arange(0, 160, 16), np.arange(15, 160, 16)
    lo, hi = bounds(root, {"q_idx": rows, "kv_idx": columns}, [torch.from_numpy(values)])
    blocks = values.reshape(3, 32, 10, 16)
    assert (lo == blocks.min((1, 3))).all()
    assert (hi == blocks.max((1, 3))).all()


def test_negative_indices_wrap_as_in_python():
    build = Builder()
    table = torch.arange(10)
    root = build.load(0, I64, (build.arith("sub", build.input("q_idx"), build.const(3)),))
    lo, hi = bounds(root, {"q_idx": (np.array([0, 3, 0]), np.array([2, 5, 5]))}, [table])
    assert lo.tolist() == [7, 0, 0]
    assert hi.tolist() == [9, 2, 9]


def test_an_empty_captured_tensor_leaves_everything_open():
    build = Builder()
    root = build.load(0, BOOL, (build.input("q_idx"),))
    no, yes = bounds(root, {"q_idx": (np.array([0]), np.array([2]))}, [torch.zeros(0, dtype=torch.bool)])
    assert no.all()
    assert yes.all()
