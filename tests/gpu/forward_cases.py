"""Cases for the forward's GPU tests: random operands, the fp64 oracle, random tile lists, NaN-poisoned outputs."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from flexbwd.modgraph.frontend import ModKind, trace
from flexbwd.modgraph.modplan import ModPlan
from flexbwd.modgraph.plan_mods import build_mod_plan
from flexbwd.sm90 import Operands
from flexbwd.sm90.forward.call import launch
from flexbwd.sm90.lists import TileLists
from flexbwd.sm90.walks import Band, Lists

BUDGET = {torch.bfloat16: 4e-3, torch.float16: 5e-4}  # relative, norm-wise: rounding of P and of the output


def plan_of(score=None, mask=None) -> tuple[ModPlan, tuple[Tensor, ...]]:
    """Two callables over CPU tensors traced and joined, and their captured tensors."""
    s, score_captures = trace(score, ModKind.SCORE, device="cpu") if score is not None else (None, ())
    m, mask_captures = trace(mask, ModKind.MASK, device="cpu") if mask is not None else (None, ())
    return build_mod_plan(s, None, m), (*score_captures, *mask_captures)


class Results(NamedTuple):
    out: Tensor
    lse: Tensor
    top: Tensor | None


def operands(lengths, dims, heads=(2, 2), batch=2, dtype=torch.bfloat16, scale=None, bshd=False) -> Operands:
    (q_len, kv_len), (dim, value_dim) = lengths, dims
    generator = torch.Generator("cuda").manual_seed(0)

    def normal(h, s, d):
        shape = (batch, s, h, d) if bshd else (batch, h, s, d)
        t = torch.randn(shape, device="cuda", generator=generator).to(dtype)
        return t.transpose(1, 2) if bshd else t

    scale = 1 / math.sqrt(dim) if scale is None else scale
    query, key, value = normal(heads[0], q_len, dim), normal(heads[1], kv_len, dim), normal(heads[1], kv_len, value_dim)
    return Operands.of(query, key, value, scale)


def poisoned(op: Operands, want_max: bool = False) -> Results:
    shape = (op.batch, op.q_heads, op.q_len)
    out = torch.full((*shape, op.value_dim), math.nan, dtype=op.query.dtype, device="cuda")
    lse = torch.full(shape, math.nan, device="cuda")
    return Results(out, lse, torch.full_like(lse, math.nan) if want_max else None)


def run(op: Operands, walk, want_max: bool = False, mods=None) -> Results:
    got = poisoned(op, want_max)
    launch(op, walk, *got, *(() if mods is None else (mods,)))
    return got


def raw_scores(op: Operands) -> Tensor:
    key = op.key.double().repeat_interleave(op.group, 1)
    return op.query.double() @ key.mT * op.scale


def band_of(op: Operands, band: Band) -> Tensor:
    """bool [Sq, Skv]: what a band keeps."""
    distance = torch.arange(op.q_len, device="cuda")[:, None] - torch.arange(op.kv_len, device="cuda")
    keep = torch.ones_like(distance, dtype=torch.bool)
    keep = keep if band.lo is None else keep & (distance >= band.lo)
    return keep if band.hi is None else keep & (distance <= band.hi)


def check(op: Operands, got: Results, scores: Tensor, budget: float = 1.0) -> None:
    """`scores` fp64 after mods, -inf where not kept."""
    value = op.value.double().repeat_interleave(op.group, 1)
    lse = torch.logsumexp(scores, -1)
    dead = lse == -math.inf
    weights = torch.where(dead[..., None], 0.0, (scores - lse[..., None]).exp())
    want = weights @ value
    error = (got.out.double() - want).norm() / want.norm().clamp_min(1e-30)
    assert error < budget * BUDGET[op.query.dtype]
    assert (got.out[dead] == 0).all()
    torch.testing.assert_close(got.lse.double(), lse, rtol=0, atol=budget * 2e-5)
    if got.top is not None:
        torch.testing.assert_close(got.top.double(), scores.amax(-1), rtol=0, atol=budget * 2e-5)


def random_lists(op: Operands, tile: tuple[int, int], sizes: tuple[int, int], seed: int = 0) -> tuple[Lists, Tensor]:
    """Random lists with empty rows, rubbish past the counts and a random order; and bool [B, H, Sq, Skv] of what they
    keep. `sizes`: batch and heads of the lists, 1 where they serve all."""
    g = torch.Generator().manual_seed(seed)
    rows, columns = -(-op.q_len // tile[0]), -(-op.kv_len // tile[1])
    kinds = torch.randint(0, 4, (*sizes, rows, columns), generator=g)  # 0 partial, 1 and 2 full, 3 not listed
    kinds[:, :, 1::3] = 3
    kinds[kinds == 1] = 2
    if op.kv_len % tile[1]:
        kinds[..., -1][kinds[..., -1] == 2] = 1
    shuffled = kinds + torch.rand(kinds.shape, generator=g)
    tiles = shuffled.argsort(-1).int()
    counts = torch.stack([(kinds == k).sum(-1) for k in (0, 1, 2)] + [torch.zeros(kinds.shape[:3])], -1).int()
    listed = counts.sum(-1)
    past = torch.arange(columns) >= listed[..., None]
    tiles[past] = 1 << 20
    order = torch.randperm(op.batch * op.q_heads * rows, generator=g).int()
    kept = (kinds != 3).repeat_interleave(tile[0], 2).repeat_interleave(tile[1], 3)
    kept = kept[:, :, : op.q_len, : op.kv_len].expand(op.batch, op.q_heads, -1, -1)
    return Lists(TileLists(counts.cuda(), tiles.cuda(), order.cuda())), kept.cuda()
