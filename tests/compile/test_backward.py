"""Every backward configuration compiles for sm_90a on a CPU, within the machine's limits."""

from __future__ import annotations

import os
import re
import sys
import tempfile

import pytest
import torch

os.environ.setdefault("CUTE_DSL_ARCH", "sm_90a")  # read when the DSL is imported
pytest.importorskip("cutlass", reason="the CuTe DSL is not installed")

from flexbwd.errors import ConfigError
from flexbwd.jit.compile import compile_now
from flexbwd.sm90.backward.call import build_backward
from flexbwd.sm90.backward.config import BwdConfig
from flexbwd.sm90.backward.tile import BwdTile, backward_tile
from flexbwd.sm90.convert import ConvertConfig, build_convert
from flexbwd.sm90.delta import DeltaConfig, build_delta
from flexbwd.sm90.tile import SMEM_BYTES
from flexbwd.sm90.walks import WalkKind

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the DSL has wheels for Linux only")

CAUSAL = WalkKind(has_lo=True)
WALKS = {
    "dense": WalkKind(),
    "causal": CAUSAL,
    "window": WalkKind(has_lo=True, has_hi=True),
    "lists": WalkKind(lists=True),
}
DIMS = [(32, 32), (64, 64), (96, 64), (128, 128), (160, 160), (192, 128), (256, 256)]


def ptx_of(build) -> str:
    with tempfile.TemporaryDirectory() as folder:  # the compiler leaves a copy there
        return compile_now(build, options=f"--enable-tvm-ffi --keep-ptx --dump-dir {folder}").artifacts.PTX


def check(ptx: str) -> None:
    assert "wgmma.mma_async" in ptx
    assert "cp.async.bulk.tensor" in ptx
    assert "setmaxnreg.inc" in ptx
    assert not re.search(r"\b(ld|st)\.local", ptx)


@pytest.mark.parametrize("walk", WALKS)
@pytest.mark.parametrize("dims", DIMS, ids="d{0[0]}-dv{0[1]}".format)
def test_backward_uses_wgmma_and_tma_and_no_local_memory(dims, walk):
    config = BwdConfig(backward_tile(*dims), torch.bfloat16, WALKS[walk], grouped=walk == "lists")
    ptx = ptx_of(lambda: build_backward(config))
    check(ptx)
    assert "cp.reduce.async.bulk" in ptx


@pytest.mark.parametrize(
    "wanted", [(True, False, False), (False, True, False), (False, False, True)], ids=["dq", "dk", "dv"]
)
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (256, 256)], ids="d{0[0]}".format)
def test_gradients_nobody_wants_are_left_out(dims, wanted):
    tile = backward_tile(*dims)
    part = ptx_of(lambda: build_backward(BwdConfig(tile, torch.float16, CAUSAL, True, *wanted)))
    check(part)
    whole = ptx_of(lambda: build_backward(BwdConfig(tile, torch.float16, CAUSAL, True)))
    assert part.count("wgmma.mma_async") < whole.count("wgmma.mma_async")
    assert ("cp.reduce.async.bulk" in part) == wanted[0]


@pytest.mark.parametrize("dim", [8, 72, 128, 256])
def test_small_kernels_move_16_bytes_at_a_time(dim):
    tile = backward_tile(dim, dim)
    delta = ptx_of(lambda: build_delta(DeltaConfig(torch.bfloat16, dim, tile.tile_m, tile.tile_m * tile.dim, True)))
    convert = ptx_of(lambda: build_convert(ConvertConfig(torch.bfloat16, tile.tile_m, tile.dim, tile.dq_wg_dim)))
    for ptx in (delta, convert):
        assert re.search(r"ld\.global\S*\.v4", ptx) and re.search(r"st\.global\S*\.v4", ptx)


def test_every_head_dim_has_a_tile():
    for dim in range(8, 257, 8):
        for value_dim in range(8, 257, 8):
            for roomy in (False, True):
                assert backward_tile(dim, value_dim, roomy).smem_bytes <= SMEM_BYTES


def test_a_tile_beyond_shared_memory_is_refused():
    with pytest.raises(ConfigError, match="shared memory"):
        BwdTile(256, 256)
