"""The forward kernel, dense and causal, against the fp64 oracle, on the GPU, with outputs pre-filled with NaN."""

from __future__ import annotations

import math

import pytest
import torch

from flexbwd.sm90 import Operands
from flexbwd.sm90.walks import CAUSAL, Dense
from tests.gpu.forward_cases import band_of, check, operands, raw_scores, run

pytestmark = pytest.mark.gpu

LENGTHS = [(1, 257), (7, 64), (100, 129), (113, 203), (257, 1000), (1025, 1000), (1000, 1025)]
DIMS = [(16, 16), (64, 64), (72, 72), (96, 96), (104, 104), (128, 128), (192, 128), (64, 128), (192, 192), (256, 256)]


def verify(op, causal, want_max=False):
    scores = raw_scores(op)
    if causal:
        scores = scores.masked_fill(~band_of(op, CAUSAL), -math.inf)
    check(op, run(op, CAUSAL if causal else Dense(), want_max), scores)


@pytest.mark.parametrize("causal", [False, True], ids=["dense", "causal"])
@pytest.mark.parametrize("lengths", LENGTHS, ids="q{0[0]}-kv{0[1]}".format)
@pytest.mark.parametrize("dims", DIMS, ids="d{0[0]}-dv{0[1]}".format)
def test_forward_matches_fp64(dims, lengths, causal):
    verify(operands(lengths, dims, bshd=causal), causal)


@pytest.mark.parametrize("heads", [(7, 1), (8, 1), (6, 3), (14, 2)], ids="h{0[0]}-{0[1]}".format)
def test_grouped_heads_match_fp64(heads):
    verify(operands((129, 257), (128, 128), heads), True)


@pytest.mark.parametrize("scale", [0.0, -0.3, 1.0])
def test_any_scale_matches_fp64(scale):
    verify(operands((129, 257), (64, 64), dtype=torch.float16, scale=scale), True, want_max=True)


@pytest.mark.parametrize("causal", [False, True], ids=["dense", "causal"])
def test_row_maxima_are_of_the_scaled_scores(causal):
    verify(operands((300, 700), (128, 128)), causal, want_max=True)


def test_scores_that_grow_along_the_walk_match_fp64():
    """Later tiles raise the maximum a little at a time, and then a lot: O is rescaled late or at once."""
    op = operands((128, 2048), (64, 64), scale=1.0)
    steps = torch.arange(2048, device="cuda") // 128
    op.key[:] = op.key * 0.05 + (steps.flip(0) * 0.4 + 10.0 * (steps < 2))[None, None, :, None] / 8
    op.query.abs_()
    verify(op, False)


def test_nan_in_a_row_stays_in_that_row():
    op = operands((200, 300), (64, 64))
    op.query[1, 1, 130] = math.nan
    got = run(op, Dense())
    bad = torch.zeros_like(got.lse, dtype=torch.bool)
    bad[1, 1, 130] = True
    assert got.out[bad].isnan().all() and got.lse[bad].isnan().all()
    assert not got.out[~bad].isnan().any() and not got.lse[~bad].isnan().any()


def test_no_keys_gives_zero_rows():
    empty = torch.empty(1, 2, 0, 64, dtype=torch.bfloat16, device="cuda")
    op = Operands.of(torch.randn(1, 2, 5, 64, device="cuda").bfloat16(), empty, empty, 0.1)
    got = run(op, Dense(), want_max=True)
    assert (got.out == 0).all() and (got.lse == -math.inf).all() and (got.top == -math.inf).all()
