"""The backward in two passes against the fp64 oracle, on the GPU, with outputs and scratch pre-filled with NaN."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch

from flexbwd.plan import Gradients, Needs
from flexbwd.sm90 import Operands
from flexbwd.sm90.lists import Grid, Heads, tile_lists
from flexbwd.sm90.parts import NOTHING, Parts
from flexbwd.sm90.two_pass import ForwardResult, backward_two_pass, tiles
from flexbwd.sm90.walks import CAUSAL, Band, Dense, Lists, Walk
from flexbwd.sparsity import BlockMask
from flexbwd.testing import poisoned

pytestmark = pytest.mark.gpu

LENGTHS = [(1, 257), (257, 1), (7, 64), (113, 203), (257, 1000), (1000, 1025)]
DIMS = [(8, 16), (64, 64), (72, 40), (96, 96), (128, 128), (192, 128), (160, 192), (224, 200), (256, 256)]
BANDS = [CAUSAL, Band(0, 100), Band(-50, 70), Band(None, 33), Band(-64, None), Band(2000, None)]
BUDGET = {torch.bfloat16: 5e-3, torch.float16: 7e-4}  # relative, norm-wise: rounding of P, dS and of the gradient
BLOCK = 128
ONE = [(True, False, False), (False, True, False), (False, False, True)]


@dataclass(frozen=True, eq=False)
class Problem:
    op: Operands
    result: ForwardResult
    want: tuple[torch.Tensor, ...]


def make(lengths, dims, keep, heads=(2, 2), dtype=torch.bfloat16, grad_lse=False, scale=None) -> Problem:
    """Inputs and gradients in fp64; `keep` is a bool that broadcasts to [B, Hq, Sq, Skv]."""
    (q_len, kv_len), (dim, value_dim), batch = lengths, dims, 2

    def normal(h, s, d):
        return torch.randn((batch, s, h, d), device="cuda").to(dtype).transpose(1, 2)

    scale = 1 / math.sqrt(dim) if scale is None else scale
    op = Operands.of(
        normal(heads[0], q_len, dim), normal(heads[1], kv_len, dim), normal(heads[1], kv_len, value_dim), scale
    )
    grad_out = normal(heads[0], q_len, value_dim)
    rows = torch.randn(batch, heads[0], q_len, device="cuda") if grad_lse else None
    q, k, v, do = (t.double() for t in (op.query, op.key, op.value, grad_out))
    k, v = (t.repeat_interleave(op.group, 1) for t in (k, v))
    scores = (q @ k.mT * scale).masked_fill(~keep, -math.inf)
    lse = scores.logsumexp(-1)
    p = (scores - lse.unsqueeze(-1)).exp().masked_fill(lse.unsqueeze(-1) == -math.inf, 0.0)
    out = p @ v
    delta = (do * out).sum(-1) - (0.0 if rows is None else rows.double())
    ds = p * (do @ v.mT - delta.unsqueeze(-1))

    def by_kv_head(t):
        return t.unflatten(1, (heads[1], op.group)).sum(2)

    want = (scale * ds @ k, by_kv_head(scale * ds.mT @ q), by_kv_head(p.mT @ do))
    return Problem(op, ForwardResult(out.to(dtype), lse.float(), grad_out, rows), want)


def in_band(lengths, walk: Walk) -> torch.Tensor:
    i, j = (torch.arange(n, device="cuda") for n in lengths)
    distance = i[:, None] - j
    keep = torch.ones_like(distance, dtype=torch.bool)
    if isinstance(walk, Band):
        keep &= (distance >= (-math.inf if walk.lo is None else walk.lo)) & (
            distance <= (math.inf if walk.hi is None else walk.hi)
        )
    return keep


def run(problem: Problem, for_dq: Walk, for_dkv: Walk, needs: Needs | None = None) -> Gradients:
    with poisoned():
        return backward_two_pass(
            problem.op, problem.result, needs or Needs(), Parts(for_dq, NOTHING), Parts(for_dkv, NOTHING)
        )


def check(problem: Problem, for_dq: Walk, for_dkv: Walk | None = None, needs: Needs | None = None) -> Gradients:
    got = run(problem, for_dq, for_dq if for_dkv is None else for_dkv, needs)
    for name, want in zip(("query", "key", "value"), problem.want, strict=True):
        grad = getattr(got, name)
        assert (grad is not None) == getattr(needs or Needs(), name)
        if grad is not None:
            error = float((grad.double() - want).norm())
            size = float(problem.want[2].norm()) if want.norm() < 1e-3 else float(want.norm())
            assert error <= BUDGET[grad.dtype] * max(size, 1e-9), f"{name}: {error / size:.2g}"
    return got


@pytest.mark.parametrize("walk", [Dense(), CAUSAL], ids=["dense", "causal"])
@pytest.mark.parametrize("lengths", LENGTHS, ids="q{0[0]}-kv{0[1]}".format)
@pytest.mark.parametrize("dims", DIMS, ids="d{0[0]}-dv{0[1]}".format)
def test_gradients_match_fp64(dims, lengths, walk):
    check(make(lengths, dims, in_band(lengths, walk), grad_lse=True), walk)


@pytest.mark.parametrize("walk", BANDS, ids=lambda w: f"{w.lo}..{w.hi}")
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (256, 256)], ids="d{0[0]}".format)
def test_bands_match_fp64_and_rows_outside_get_zero(dims, walk):
    lengths = (457, 333)
    check(make(lengths, dims, in_band(lengths, walk), (4, 2), torch.float16), walk)


@pytest.mark.parametrize("heads", [(7, 1), (8, 1), (6, 3), (14, 2)], ids="h{0[0]}-{0[1]}".format)
@pytest.mark.parametrize("dim", [128, 256])
def test_grouped_heads_match_fp64(dim, heads):
    check(make((129, 257), (dim, dim), in_band((129, 257), CAUSAL), heads), CAUSAL)


@pytest.mark.parametrize("scale", [0.0, -0.3])
@pytest.mark.parametrize("dim", [128, 256])
def test_scales_that_are_not_positive(dim, scale):
    check(make((200, 300), (dim, dim), in_band((200, 300), CAUSAL), scale=scale), CAUSAL)


@pytest.mark.parametrize(
    "needs", [(True, False, False), (False, True, False), (False, False, True)], ids=["q", "k", "v"]
)
@pytest.mark.parametrize("dim", [64, 256])
def test_gradients_nobody_wants_are_left_out(dim, needs):
    check(make((200, 300), (dim, dim), in_band((200, 300), Dense())), Dense(), needs=Needs(*needs))


def listed(lengths, dims, heads, blocks: torch.Tensor) -> tuple[torch.Tensor, Walk, Walk]:
    """Elements kept by `blocks`, bool [B, Hq, q blocks, kv blocks], and the walks of the two passes."""
    q_len, kv_len = lengths
    count, order = blocks.sum(-1).int(), blocks.int().argsort(-1, descending=True, stable=True).int()
    mask = BlockMask.from_kv_blocks(
        torch.zeros_like(count), torch.zeros_like(order), count, order, BLOCK_SIZE=BLOCK, seq_lengths=lengths
    )
    keep = blocks.repeat_interleave(BLOCK, 2).repeat_interleave(BLOCK, 3)[..., :q_len, :kv_len]
    walks = []
    for tile, by_keys in zip(tiles(*dims), (False, True), strict=True):
        turn = -1 if by_keys else 1
        shape = (tile.tile_m, tile.tile_n)
        grid = Grid((BLOCK, BLOCK), shape[::turn], lengths[::turn], by_keys)
        group = heads[0] // heads[1]
        owners = Heads(2, heads[1], group, 1) if by_keys else Heads(2, heads[0], 1, 1)
        walks.append(Lists(tile_lists(mask.kv_to_q if by_keys else mask.q_to_kv, grid, owners)))
    return keep, *walks


@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (192, 128), (256, 256)], ids="d{0[0]}-dv{0[1]}".format)
def test_lists_match_fp64_and_rows_without_tiles_get_zero(dims):
    lengths, heads = (500, 700), (4, 2)
    blocks = torch.rand(2, heads[0], 4, 6, device="cuda") < 0.4
    blocks[:, :, 2], blocks[..., 3] = False, False
    keep, for_dq, for_dkv = listed(lengths, dims, heads, blocks)
    got = check(make(lengths, dims, keep, heads), for_dq, for_dkv)
    assert not got.query[:, :, 256:384].any()
    assert not got.key[:, :, 384:512].any()


@pytest.mark.parametrize("walk", [Dense(), CAUSAL, "lists"], ids=["dense", "causal", "lists"])
@pytest.mark.parametrize("dim", [64, 128, 192, 256])
def test_equal_bits_in_every_run(dim, walk):
    lengths, dims, heads = (2000, 2000), (dim, dim), (8, 2)
    if walk == "lists":
        keep, *walks = listed(lengths, dims, heads, torch.rand(2, heads[0], 16, 16, device="cuda") < 0.5)
    else:
        keep, walks = in_band(lengths, walk), [walk, walk]
    problem = make(lengths, dims, keep, heads)
    first = run(problem, *walks)
    for _ in range(20):
        again = run(problem, *walks)
        for name in ("query", "key", "value"):
            assert torch.equal(getattr(first, name), getattr(again, name))
