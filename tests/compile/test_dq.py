"""The kernels of a two-pass backward compile for sm_90a on a CPU: head dims, walks, mods, the limits of the machine."""

from __future__ import annotations

import os
import sys

import pytest
import torch

os.environ.setdefault("CUTE_DSL_ARCH", "sm_90a")  # read when the DSL is imported
pytest.importorskip("cutlass", reason="the CuTe DSL is not installed")

from flexbwd.errors import ConfigError
from flexbwd.modgraph.extents import Extents
from flexbwd.modgraph.frontend import trace
from flexbwd.modgraph.plan_mods import build_mod_plan
from flexbwd.modgraph.trace import ModKind
from flexbwd.sm90.dkv.call import build_dkv
from flexbwd.sm90.dkv.config import DkvConfig
from flexbwd.sm90.dkv.tile import DkvTile, dkv_tile
from flexbwd.sm90.dq.call import build_dq
from flexbwd.sm90.dq.config import DqConfig
from flexbwd.sm90.dq.tile import DqTile, dq_tile
from flexbwd.sm90.mods import ModConfig, ModUse
from flexbwd.sm90.tile import SMEM_BYTES
from flexbwd.sm90.walks import WalkKind
from tests.compile.opcodes import USETMAXREG, adds_across_ctas, built

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the DSL has wheels for Linux only")

DIMS = [(32, 32), (64, 64), (96, 64), (128, 128), (192, 128), (256, 256)]
WIDE = [(160, 192), (192, 128), (256, 256)]
WALKS = {
    "dense": WalkKind(),
    "causal": WalkKind(has_lo=True),
    "window": WalkKind(has_lo=True, has_hi=True),
    "lists": WalkKind(lists=True),
}


def check(build, spills: int = 0) -> None:
    made = built(build)
    assert made.wgmmas
    assert made.counts[USETMAXREG] == 2
    assert "cp.async.bulk.tensor" in made.ptx
    assert made.spills <= spills
    assert not made.serialised
    assert not adds_across_ctas(made.ptx)


def softcap(s, b, h, i, j):
    return 20.0 * torch.tanh(s / 20.0)


def scaled(s, b, h, i, j):
    return s * torch.where(i > j, 0.5, 0.25)


def chunked(b, h, i, j):
    return i // 100 == j // 100


def mods(tile, score) -> ModConfig:
    """`score` with a mask on partial tiles."""
    (score, _), (mask, _) = trace(score, ModKind.SCORE, device="cpu"), trace(chunked, ModKind.MASK, device="cpu")
    use = ModUse(Extents(2, 4, 1000, 1000), (tile.tile_m, tile.tile_n), backward=True)
    return ModConfig.of(build_mod_plan(score, None, mask), (), use)[0]


@pytest.mark.parametrize("walk", ["dense", "causal"])
@pytest.mark.parametrize("dims", DIMS, ids="d{0[0]}-dv{0[1]}".format)
def test_dq_uses_wgmma_and_tma_without_spills_or_atomics(dims, walk):
    config = DqConfig(dq_tile(*dims), torch.bfloat16, WALKS[walk])
    check(lambda: build_dq(config))


@pytest.mark.parametrize("grouped", [False, True], ids=["", "grouped"])
@pytest.mark.parametrize("dims", WIDE, ids="d{0[0]}-dv{0[1]}".format)
def test_dkv_uses_wgmma_and_tma_without_spills_or_atomics(dims, grouped):
    config = DkvConfig(dkv_tile(*dims), torch.bfloat16, WALKS["causal"], grouped)
    check(lambda: build_dkv(config))


@pytest.mark.parametrize("walk", ["window", "lists"])
@pytest.mark.parametrize("dim", [64, 256])
def test_every_walk_compiles(dim, walk):
    dq = DqConfig(dq_tile(dim, dim), torch.float16, WALKS[walk])
    check(lambda: build_dq(dq))
    if dim == 256:
        dkv = DkvConfig(dkv_tile(dim, dim), torch.float16, WALKS[walk], True)
        check(lambda: build_dkv(dkv), spills=2)  # one word of the loader, once a query head


@pytest.mark.parametrize("score", [softcap, scaled])
def test_mods_at_the_widest_head_dim_do_not_spill(score):
    tile = dq_tile(256, 256)
    dq = DqConfig(tile, torch.bfloat16, WALKS["lists"], mods(tile, score))
    check(lambda: build_dq(dq))
    tile = dkv_tile(256, 256)
    dkv = DkvConfig(tile, torch.bfloat16, WALKS["lists"], mods=mods(tile, score))
    check(lambda: build_dkv(dkv))


@pytest.mark.parametrize("wanted", [(True, False), (False, True)], ids=["dk", "dv"])
def test_a_gradient_nobody_wants_is_left_out(wanted):
    part = built(lambda: build_dkv(DkvConfig(dkv_tile(256, 256), torch.bfloat16, WALKS["dense"], False, *wanted)))
    whole = built(lambda: build_dkv(DkvConfig(dkv_tile(256, 256), torch.bfloat16, WALKS["dense"])))
    assert 0 < part.wgmmas < whole.wgmmas


def test_every_head_dim_has_tiles_that_divide_a_mask_block():
    for dim in range(8, 257, 8):
        for value_dim in range(8, 257, 8):
            for tile in (dq_tile(dim, value_dim), dkv_tile(dim, value_dim)):
                assert tile.smem_bytes <= SMEM_BYTES
                assert 128 % tile.tile_m == 0
                assert 128 % tile.tile_n == 0


@pytest.mark.parametrize(("tile", "more"), [(DqTile, "v_stages"), (DkvTile, "q_stages")])
def test_a_tile_beyond_shared_memory_is_refused(tile, more):
    with pytest.raises(ConfigError, match="shared memory"):
        tile(256, 256, **{more: 4})
