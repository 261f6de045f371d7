"""Every forward configuration compiles for sm_90a on a CPU, within the machine's limits."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from flexbwd.errors import ConfigError
from flexbwd.jit.compile import compile_now
from flexbwd.sm90.forward.call import build
from flexbwd.sm90.forward.config import FwdConfig
from flexbwd.sm90.tile import SMEM_BYTES, FwdTile, forward_tile

pytestmark = pytest.mark.skipif(find_spec("cutlass") is None, reason="the CuTe DSL has wheels for Linux only")

DIMS = [(64, 64), (128, 128), (96, 96), (192, 128), (192, 192), (256, 256)]


def ptx_of(config: FwdConfig, folder: Path) -> str:
    kernel = compile_now(lambda: build(config), options=f"--enable-tvm-ffi --keep-ptx --dump-dir {folder}")
    return kernel.artifacts.PTX


@pytest.mark.parametrize("causal", [False, True], ids=["dense", "causal"])
@pytest.mark.parametrize("dims", DIMS, ids="d{0[0]}-dv{0[1]}".format)
def test_forward_uses_wgmma_and_tma_and_no_local_memory(dims, causal, tmp_path):
    config = FwdConfig(forward_tile(*dims, causal), torch.bfloat16, causal)
    ptx = ptx_of(config, tmp_path)
    assert "wgmma.mma_async" in ptx
    assert "cp.async.bulk.tensor" in ptx
    assert "setmaxnreg.inc" in ptx
    assert not re.search(r"\b(ld|st)\.local", ptx)
    assert config.tile.smem_bytes <= SMEM_BYTES


def test_the_variant_for_scales_up_to_zero_compiles(tmp_path):
    config = FwdConfig(forward_tile(128, 128, True), torch.float16, True, prescale=True)
    assert not re.search(r"\b(ld|st)\.local", ptx_of(config, tmp_path))


def test_every_head_dim_has_a_tile():
    for dim in range(8, 257, 8):
        for value_dim in (dim, 64, 128, 256):
            assert forward_tile(dim, value_dim, causal=True).smem_bytes <= SMEM_BYTES


def test_a_tile_beyond_shared_memory_is_refused():
    with pytest.raises(ConfigError, match="shared memory"):
        FwdTile(256, 256, tile_n=128)
