"""Every forward configuration compiles for sm_90a on a CPU, within the machine's limits."""

from __future__ import annotations

import re
from importlib.util import find_spec

import pytest
import torch

from flexbwd import mods
from flexbwd.errors import ConfigError
from flexbwd.modgraph.extents import Extents
from flexbwd.sm90.forward.call import build
from flexbwd.sm90.forward.config import FwdConfig
from flexbwd.sm90.mods import ModConfig, ModUse
from flexbwd.sm90.tile import SMEM_BYTES, FwdTile, forward_tile
from flexbwd.sm90.walks import WalkKind
from tests.compile.resources import blocks_with, compile_with_artifacts, resources
from tests.gpu.forward_cases import plan_of

pytestmark = pytest.mark.skipif(find_spec("cutlass") is None, reason="the CuTe DSL has wheels for Linux only")

DIMS = [(64, 64), (128, 128), (96, 96), (192, 128), (192, 192), (256, 256)]
WALKS = {
    "dense": WalkKind(),
    "causal": WalkKind(has_lo=True),
    "window": WalkKind(has_lo=True, has_hi=True),
    "lists": WalkKind(lists=True),
}
ENTRY_REGISTERS = {2: 168, 3: 128}  # by MMA warpgroups: 64 Ki registers over the threads, before setmaxnreg


def compiled_of(config, folder):
    return compile_with_artifacts(lambda: build(config), folder).artifacts


def config_for(dims, walk, **more):
    return FwdConfig(forward_tile(*dims, WALKS[walk]), torch.bfloat16, WALKS[walk], **more)


@pytest.mark.parametrize("walk", WALKS)
@pytest.mark.parametrize("dims", DIMS, ids="d{0[0]}-dv{0[1]}".format)
def test_forward_uses_wgmma_and_tma_and_no_local_memory(dims, walk, tmp_path):
    config = config_for(dims, walk)
    found = compiled_of(config, tmp_path)
    assert "wgmma.mma_async" in found.PTX
    assert "cp.async.bulk.tensor" in found.PTX
    assert "setmaxnreg.inc" in found.PTX
    assert resources(found.CUBIN) == (ENTRY_REGISTERS[config.tile.wgs], 0)
    assert config.tile.smem_bytes <= SMEM_BYTES


@pytest.mark.parametrize("walk", WALKS)
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_a_full_tile_is_compared_with_nothing(dim, walk, tmp_path):
    """Three bodies: the first tile of an item, masked ones, full ones; the last holds no compare by element."""
    config = config_for((dim, dim), walk)
    elements = config.tile.tile_n // 2
    bodies = blocks_with(compiled_of(config, tmp_path).PTX, "ex2.approx", elements)
    compares = sorted(len(re.findall(r"\bsetp\.", body)) for body in bodies)
    selects = sorted(len(re.findall(r"\bselp\.f32", body)) for body in bodies)
    assert len(bodies) == 3
    assert compares[0] <= 8  # has the maximum grown, is this the last tile, barriers; nothing by element
    assert compares[1] >= config.tile.tile_n // 4  # columns of a thread
    assert selects[0] <= 2  # which maximum, for two rows
    assert selects[1] >= elements


@pytest.mark.parametrize("more", [{"prescale": True}, {"want_max": True}], ids=["scales up to zero", "row maxima"])
def test_variants_use_no_local_memory(more, tmp_path):
    assert resources(compiled_of(config_for((128, 128), "causal", **more), tmp_path).CUBIN).stack_bytes == 0


def test_every_head_dim_has_a_tile():
    for dim in range(8, 257, 8):
        for value_dim in (dim, 64, 128, 256):
            for walk in WALKS.values():
                tile = forward_tile(dim, value_dim, walk)
                assert tile.smem_bytes <= SMEM_BYTES
                assert not walk.lists or (128 % tile.tile_m == 0 and 128 % tile.tile_n == 0)


def test_a_tile_beyond_shared_memory_is_refused():
    with pytest.raises(ConfigError, match="shared memory"):
        FwdTile(256, 256, tile_n=128)


def mods_config(score, mask, dims, walk):
    """Like the API: masks walk lists."""
    plan, captures = plan_of(score, mask)
    tile = forward_tile(*dims, WALKS[walk])
    use = ModUse(Extents(2, 16, 4096, 4096), (tile.tile_m, tile.tile_n))
    return config_for(dims, walk, mods=ModConfig.of(plan, captures, use)[0])


@pytest.mark.parametrize("name", mods.names())
def test_no_mod_of_the_zoo_spills(name, tmp_path):
    entry = mods.get(name)
    example = entry.example(2, 16, 4096, 4096)
    score, mask, walk = (example, None, "causal") if entry.kind == "score" else (None, example, "lists")
    assert resources(compiled_of(mods_config(score, mask, (128, 128), walk), tmp_path).CUBIN) == (168, 0)


@pytest.mark.parametrize("walk", ["dense", "causal", "lists"])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_softcap_does_not_spill(dim, walk, tmp_path):
    config = mods_config(mods.softcap(20.0), None, (dim, dim), walk)
    found = compiled_of(config, tmp_path)
    assert resources(found.CUBIN) == (ENTRY_REGISTERS[config.tile.wgs], 0)
    bodies = blocks_with(found.PTX, "ex2.approx", config.tile.tile_n // 2)
    assert [body.count("tanh.approx") for body in bodies] == [config.tile.tile_n // 2] * 3


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_a_score_mod_and_a_mask_do_not_spill(dim, tmp_path):
    mask = mods.document_causal(torch.arange(4096) // 100)
    config = mods_config(mods.softcap(20.0), mask, (dim, dim), "lists")
    assert resources(compiled_of(config, tmp_path).CUBIN).stack_bytes == 0
