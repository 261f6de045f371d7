"""Delta, backward and convert against the fp64 oracle, on the GPU, with outputs and scratch pre-filled with NaN."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch

from flexbwd.plan import Needs
from flexbwd.sm90 import Operands, backward
from flexbwd.testing import poisoned

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
ALL = Needs()
SOME = [(True, False, False), (False, True, False), (False, False, True), (False, True, True), (True, False, True)]
BUDGET = {torch.bfloat16: 5e-3, torch.float16: 7e-4}  # relative, norm-wise: rounding of P, dS and of the gradient


@dataclass(frozen=True, eq=False)
class Problem:
    op: Operands
    out: torch.Tensor
    lse: torch.Tensor
    grad_out: torch.Tensor
    grad_lse: torch.Tensor | None
    want: tuple[torch.Tensor, ...]


def make(
    lengths,
    dims,
    causal,
    heads=(2, 2),
    dtype=torch.bfloat16,
    scale=None,
    bshd=False,
    grad_lse=False,
    dead=False,
    batch=2,
):
    """Inputs and the gradients in fp64; `dead` empties every seventh query row."""
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
    grad_out = normal(heads[0], q_len, value_dim)
    rows = torch.randn(batch, heads[0], q_len, device="cuda", generator=generator) if grad_lse else None
    q, k, v, do = (t.double() for t in (op.query, op.key, op.value, grad_out))
    k, v = (t.repeat_interleave(op.group, 1) for t in (k, v))
    scores = q @ k.mT * scale
    if causal:
        scores = scores.masked_fill(~torch.ones_like(scores[0, 0], dtype=torch.bool).tril(), -math.inf)
    if dead:
        scores[:, :, 5::7] = -math.inf
    lse = scores.logsumexp(-1)
    p = (scores - lse.unsqueeze(-1)).exp().masked_fill(lse.unsqueeze(-1) == -math.inf, 0.0)
    out = p @ v
    delta = (do * out).sum(-1) - (0.0 if rows is None else rows.double())
    ds = p * (do @ v.mT - delta.unsqueeze(-1))

    def by_kv_head(t):
        return t.unflatten(1, (heads[1], op.group)).sum(2)

    want = (scale * ds @ k, by_kv_head(scale * ds.mT @ q), by_kv_head(p.mT @ do))
    return Problem(op, out.to(dtype), lse.float(), grad_out, rows, want)


def check(problem: Problem, causal: bool, needs: Needs = ALL) -> None:
    with poisoned():
        got = backward(problem.op, problem.out, problem.lse, problem.grad_out, problem.grad_lse, needs, causal)
    for name, want in zip(("query", "key", "value"), problem.want, strict=True):
        grad = getattr(got, name)
        assert (grad is not None) == getattr(needs, name)
        if grad is not None:
            error = float((grad.double() - want).norm())
            size = float(problem.want[2].norm()) if want.norm() < 1e-3 else float(want.norm())
            assert error <= BUDGET[grad.dtype] * size, f"{name}: {error / size:.2g}"


@pytest.mark.parametrize("causal", [False, True], ids=["dense", "causal"])
@pytest.mark.parametrize("lengths", LENGTHS, ids="q{0[0]}-kv{0[1]}".format)
@pytest.mark.parametrize("dims", DIMS, ids="d{0[0]}-dv{0[1]}".format)
def test_gradients_match_fp64(dims, lengths, causal):
    check(make(lengths, dims, causal, bshd=causal, grad_lse=True), causal)


@pytest.mark.parametrize("heads", [(7, 1), (8, 1), (6, 3), (14, 2)], ids="h{0[0]}-{0[1]}".format)
def test_grouped_heads_match_fp64(heads):
    check(make((129, 257), (128, 128), True, heads=heads), True)


@pytest.mark.parametrize("scale", [0.0, -0.3, 1.0])
def test_any_scale_matches_fp64(scale):
    check(make((129, 257), (64, 64), True, dtype=torch.float16, scale=scale), True)


@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (256, 256)], ids="d{0[0]}".format)
def test_dead_rows_give_nothing(dims):
    check(make((200, 300), dims, False, dead=True, grad_lse=True), False)


@pytest.mark.parametrize("needs", SOME)
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (192, 192)], ids="d{0[0]}".format)
def test_gradients_not_needed_are_none(dims, needs):
    check(make((200, 300), dims, True), True, Needs(*needs))


def test_expanded_grad_out():
    problem = make((200, 300), (64, 64), False)
    ones = torch.ones((), dtype=torch.bfloat16, device="cuda").expand(problem.out.shape)
    got = backward(problem.op, problem.out, problem.lse, ones, None, Needs())
    want = backward(problem.op, problem.out, problem.lse, ones.contiguous(), None, Needs())
    assert torch.equal(got.value, want.value) and torch.equal(got.key, want.key)


def test_more_heads_than_a_grid_dimension_holds():
    check(make((64, 64), (64, 64), False, batch=32800), False)


@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (256, 256)], ids="d{0[0]}".format)
def test_repeated_launches_agree(dims):
    """dK and dV have a fixed order of summation; dQ is a sum of fp32 atomics, equal up to their rounding."""
    problem = make((777, 1111), dims, True, heads=(8, 2))
    arguments = (problem.op, problem.out, problem.lse, problem.grad_out, None, Needs(), True)
    first = backward(*arguments)
    for _ in range(300):
        again = backward(*arguments)
        assert torch.equal(again.key, first.key) and torch.equal(again.value, first.value)
        torch.testing.assert_close(again.query, first.query, rtol=2e-2, atol=1e-3)
