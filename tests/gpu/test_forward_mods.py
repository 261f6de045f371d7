"""Score mods and mask mods in the forward kernel, against the fp64 oracle."""

from __future__ import annotations

import math

import pytest
import torch

from flexbwd import create_block_mask, mods
from flexbwd.modgraph.extents import Extents
from flexbwd.reference import attention_reference
from flexbwd.sm90.forward.call import config_of
from flexbwd.sm90.lists import Grid, Heads, TileLists, tile_lists
from flexbwd.sm90.mods import ModConfig, ModUse
from flexbwd.sm90.tile import forward_tile
from flexbwd.sm90.walks import CAUSAL, Band, Dense, Lists, kind_of
from flexbwd.sparsity import IndexBase
from tests.gpu.forward_cases import BUDGET, band_of, operands, plan_of, run

pytestmark = pytest.mark.gpu

ANY_LISTS = Lists(None)


def verify(op, score=None, mask=None, walk=None, base=None):
    """Masks go through block lists; without a mask `walk` says what is kept. Mods, lists and oracle live on the CPU."""
    plan, captures = plan_of(score, mask)
    tile = forward_tile(op.head_dim, op.value_dim, kind_of(walk if mask is None else ANY_LISTS), base is not None)
    sizes = (tile.tile_m, tile.tile_n)
    block_mask, keep = None, None
    if mask is not None:
        block_mask = create_block_mask(mask, op.batch, op.q_heads, op.q_len, op.kv_len, device="cpu", index_base=base)
        grid = Grid((128, 128), sizes, (op.q_len, op.kv_len), False)
        lists = tile_lists(block_mask.q_to_kv, grid, Heads(op.batch, op.q_heads, 1, 1))
        walk = Lists(TileLists(*(t.cuda() for t in lists)))
    elif isinstance(walk, Band):
        keep = band_of(op, walk).cpu()
    extents = Extents(op.batch, op.q_heads, op.q_len, op.kv_len)
    use = ModUse(extents, sizes, partial=mask is not None)
    on_gpu = base and IndexBase(base.b_off, base.h_off, base.q_base.cuda(), base.kv_base.cuda())
    config, arguments = ModConfig.of(plan, [c.detach().cuda() for c in captures], use, on_gpu)
    got = run(op, walk, want_max=config.has_score, mods=(config, arguments))
    wide = [t.cpu().double() for t in (op.query, op.key, op.value)]
    want, lse = attention_reference(*wide, score, mask, op.scale, block_mask=block_mask, keep=keep, index_base=base)
    assert config_of(op, walk, config).tile == tile
    found_out, found_lse = got.out.cpu().double(), got.lse.cpu().double()
    error = (found_out - want.detach()).norm() / want.norm()
    assert error < 2 * BUDGET[op.query.dtype]
    dead = lse == -math.inf
    assert (found_out[dead] == 0).all() and (found_lse[dead] == -math.inf).all()
    torch.testing.assert_close(found_lse[~dead], lse.detach()[~dead], rtol=1e-3, atol=2e-3)


@pytest.mark.parametrize("name", mods.names())
def test_the_zoo_matches_fp64(name):
    op = operands((300, 413), (64, 64), heads=(4, 2))
    entry = mods.get(name)
    mod = entry.example(op.batch, op.q_heads, op.q_len, op.kv_len)
    if entry.kind == "score":
        verify(op, score=mod, walk=Dense())
    else:
        verify(op, mask=mod)


@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (192, 128), (256, 256)], ids="d{0[0]}-dv{0[1]}".format)
@pytest.mark.parametrize("walk", [Dense(), CAUSAL, Band(0, 90)], ids=["dense", "causal", "window"])
def test_softcap_matches_fp64_in_every_walk(walk, dims):
    verify(operands((300, 700), dims), score=mods.softcap(20.0), walk=walk)


@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (192, 128), (256, 256)], ids="d{0[0]}-dv{0[1]}".format)
def test_a_score_mod_and_a_document_mask_match_fp64(dims):
    op = operands((700, 700), dims)
    documents = torch.tensor([300, 1, 211, 188])
    ids = torch.repeat_interleave(torch.arange(4), documents)
    verify(op, score=mods.softcap(5.0), mask=mods.document_causal(ids))


def test_what_a_mod_makes_of_masked_scores_reaches_nothing():
    """log(i - j + 1) is NaN above the diagonal, -inf right above it; 1 / (i - j) is inf on it."""

    def hostile(score, b, h, i, j):
        return score + torch.log((i - j + 1).to(torch.float32)) + 1.0 / (i - j + 1).to(torch.float32)

    op = operands((400, 400), (64, 64))
    verify(op, score=hostile, walk=CAUSAL)
    verify(op, score=hostile, mask=mods.causal)


def test_a_score_mod_that_masks_leaves_dead_rows_dead():
    def keeps_some(score, b, h, i, j):
        return torch.where((i % 7 != 3) & (j < 250), score, -math.inf)

    verify(operands((300, 413), (128, 128)), score=keeps_some, walk=Dense())


@pytest.mark.parametrize("scale", [0.0, -0.5])
def test_a_mod_sees_scores_of_any_scale(scale):
    verify(operands((200, 300), (64, 64), scale=scale), score=mods.alibi(2), walk=CAUSAL)


def test_an_index_base_moves_what_mods_see():
    op = operands((256, 384), (64, 64))
    base = IndexBase(
        b_off=3,
        h_off=1,
        q_base=torch.tensor([128, 512], dtype=torch.int32),
        kv_base=torch.tensor([0, 128, 512], dtype=torch.int32),
    )

    def by_place(score, b, h, i, j):
        return score + 0.01 * (i - j) + 0.1 * b - 0.2 * h

    verify(op, score=by_place, mask=mods.causal, base=base)
    verify(op, score=by_place, walk=Dense(), base=base)
