"""The forward kernel against the fp64 oracle, on the GPU, with outputs pre-filled with NaN."""

from __future__ import annotations

import math

import pytest
import torch

from flexbwd.sm90 import Operands
from flexbwd.sm90.forward.call import launch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
        reason="needs compute capability 9.0",
    ),
]

LENGTHS = [(1, 257), (7, 64), (100, 129), (113, 203), (257, 1000), (1025, 1000), (1000, 1025)]
DIMS = [(16, 16), (64, 64), (72, 72), (96, 96), (104, 104), (128, 128), (192, 128), (64, 128), (192, 192), (256, 256)]
BUDGET = {torch.bfloat16: 4e-3, torch.float16: 5e-4}  # relative, norm-wise: rounding of P and of the output


def oracle(op: Operands, causal: bool) -> tuple[torch.Tensor, torch.Tensor]:
    key, value = (t.double().repeat_interleave(op.group, 1) for t in (op.key, op.value))
    scores = op.query.double() @ key.mT * op.scale
    if causal:
        keep = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        scores = scores.masked_fill(~keep, -math.inf)
    return torch.softmax(scores, -1) @ value, torch.logsumexp(scores, -1)


def run(lengths, dims, causal, heads=(2, 2), dtype=torch.bfloat16, scale=None, bshd=False, batch=2):
    (q_len, kv_len), (dim, value_dim) = lengths, dims
    generator = torch.Generator("cuda").manual_seed(0)

    def normal(h, s, d):
        shape = (batch, s, h, d) if bshd else (batch, h, s, d)
        t = torch.randn(shape, device="cuda", generator=generator).to(dtype)
        return t.transpose(1, 2) if bshd else t

    scale = 1 / math.sqrt(dim) if scale is None else scale
    op = Operands.of(
        normal(heads[0], q_len, dim), normal(heads[1], kv_len, dim), normal(heads[1], kv_len, value_dim), scale
    )
    out = torch.full((batch, heads[0], q_len, value_dim), math.nan, dtype=dtype, device="cuda")
    lse = torch.full((batch, heads[0], q_len), math.nan, device="cuda")
    launch(op, causal, out, lse)
    want_out, want_lse = oracle(op, causal)
    error = (out.double() - want_out).norm() / want_out.norm()
    assert error < BUDGET[dtype]
    torch.testing.assert_close(lse.double(), want_lse, rtol=0, atol=2e-5)


@pytest.mark.parametrize("causal", [False, True], ids=["dense", "causal"])
@pytest.mark.parametrize("lengths", LENGTHS, ids="q{0[0]}-kv{0[1]}".format)
@pytest.mark.parametrize("dims", DIMS, ids="d{0[0]}-dv{0[1]}".format)
def test_forward_matches_fp64(dims, lengths, causal):
    run(lengths, dims, causal, bshd=causal)


@pytest.mark.parametrize("heads", [(7, 1), (8, 1), (6, 3), (14, 2)], ids="h{0[0]}-{0[1]}".format)
def test_grouped_heads_match_fp64(heads):
    run((129, 257), (128, 128), True, heads=heads)


@pytest.mark.parametrize("scale", [0.0, -0.3, 1.0])
def test_any_scale_matches_fp64(scale):
    run((129, 257), (64, 64), True, dtype=torch.float16, scale=scale)


def test_more_heads_than_a_grid_dimension_holds():
    run((64, 64), (64, 64), False, heads=(2, 2), batch=32800)


def test_no_keys_gives_zero_rows():
    empty = torch.empty(1, 2, 0, 64, dtype=torch.bfloat16, device="cuda")
    op = Operands.of(torch.randn(1, 2, 5, 64, device="cuda").bfloat16(), empty, empty, 0.1)
    out, lse = torch.full((1, 2, 5, 64), math.nan, device="cuda").bfloat16(), torch.zeros(1, 2, 5, device="cuda")
    launch(op, False, out, lse)
    assert (out == 0).all() and (lse == -math.inf).all()
