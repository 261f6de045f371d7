"""Delta, backward and convert against the fp64 oracle, on the GPU, with outputs and scratch pre-filled with NaN."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from flexbwd.plan import Needs
from flexbwd.sm90.walks import CAUSAL, Band, Dense
from tests.gpu.backward_problems import Shape, band_keep, check, make, run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
        reason="needs compute capability 9.0",
    ),
]

LENGTHS = [(1, 257), (257, 1), (7, 64), (113, 203), (257, 1000), (1000, 1025)]
DIMS = [
    (8, 16),
    (32, 32),
    (64, 64),
    (72, 40),
    (96, 96),
    (128, 128),
    (192, 128),
    (64, 128),
    (160, 160),
    (224, 200),
    (256, 256),
]
SOME = [(True, False, False), (False, True, False), (False, False, True), (False, True, True), (True, False, True)]
WALKS = [Dense(), CAUSAL]
MAIN_DIMS = [(64, 64), (128, 128), (256, 256)]


def problem(shape: Shape, walk: Dense | Band = WALKS[0], **options):
    return make(shape, band_keep(walk, shape.lengths) if isinstance(walk, Band) else None, **options)


@pytest.mark.parametrize("walk", WALKS, ids=["dense", "causal"])
@pytest.mark.parametrize("lengths", LENGTHS, ids="q{0[0]}-kv{0[1]}".format)
@pytest.mark.parametrize("dims", DIMS, ids="d{0[0]}-dv{0[1]}".format)
def test_gradients_match_fp64(dims, lengths, walk):
    shape = Shape(lengths, dims, bshd=walk is CAUSAL)
    check(problem(shape, walk, grad_lse=True), walk)


@pytest.mark.parametrize("heads", [(7, 1), (8, 1), (6, 3), (14, 2)], ids="h{0[0]}-{0[1]}".format)
def test_grouped_heads_match_fp64(heads):
    check(problem(Shape((129, 257), (128, 128), heads), CAUSAL), CAUSAL)


@pytest.mark.parametrize("scale", [0.0, -0.3, 1.0])
def test_any_scale_matches_fp64(scale):
    check(problem(Shape((129, 257), dtype=torch.float16, scale=scale), CAUSAL), CAUSAL)


@pytest.mark.parametrize("dims", MAIN_DIMS, ids="d{0[0]}".format)
def test_dead_rows_give_nothing(dims):
    """Rows with lse -inf, whatever the scores are."""
    keep = torch.ones(200, 300, dtype=torch.bool, device="cuda")
    keep[5::7] = False
    check(make(Shape((200, 300), dims), keep, grad_lse=True), Dense())


@pytest.mark.parametrize("needs", SOME)
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (192, 192)], ids="d{0[0]}".format)
def test_gradients_not_needed_are_none(dims, needs):
    check(problem(Shape((200, 300), dims), CAUSAL), CAUSAL, Needs(*needs))


def test_expanded_grad_out():
    held = problem(Shape((200, 300)))
    ones = torch.ones((), dtype=torch.bfloat16, device="cuda").expand(held.out.shape)
    got, want = (run(replace(held, grad_out=g), Dense()) for g in (ones, ones.contiguous()))
    assert torch.equal(got.value, want.value)
    assert torch.equal(got.key, want.key)


def test_grad_out_of_a_broadcast_head():
    held = problem(Shape((200, 300), heads=(4, 2)))
    one = held.grad_out[:, :1].expand(held.out.shape)
    got, want = (run(replace(held, grad_out=g), CAUSAL) for g in (one, one.contiguous()))
    assert torch.equal(got.value, want.value)
    assert torch.equal(got.key, want.key)


def test_more_heads_than_a_grid_dimension_holds():
    check(problem(Shape((64, 64), batch=32800)))


@pytest.mark.parametrize("dims", MAIN_DIMS, ids="d{0[0]}".format)
def test_repeated_launches_agree(dims):
    """dK and dV have a fixed order of summation; dQ is a sum of fp32 atomics, equal up to their rounding."""
    held = problem(Shape((777, 1111), dims, heads=(8, 2)), CAUSAL)
    first = run(held, CAUSAL)
    for _ in range(300):
        again = run(held, CAUSAL)
        assert torch.equal(again.key, first.key)
        assert torch.equal(again.value, first.value)
        torch.testing.assert_close(again.query, first.query, rtol=2e-2, atol=1e-3)
