"""The dQ kernel compiles for sm_90a on a CPU at every head dim and for every walk, within the machine's limits."""

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
from flexbwd.sm90.dq.call import build_dq
from flexbwd.sm90.dq.config import DqConfig
from flexbwd.sm90.dq.tile import DqTile, dq_tile
from flexbwd.sm90.tile import SMEM_BYTES
from flexbwd.sm90.walks import WalkKind

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the DSL has wheels for Linux only")

WALKS = {
    "dense": WalkKind(),
    "causal": WalkKind(has_lo=True),
    "window": WalkKind(has_lo=True, has_hi=True),
    "lists": WalkKind(lists=True),
}


def check(config: DqConfig) -> None:
    with tempfile.TemporaryDirectory() as folder:  # the compiler leaves a copy there
        options = f"--enable-tvm-ffi --keep-ptx --keep-cubin --dump-dir {folder}"
        artifacts = compile_now(lambda: build_dq(config), options=options).artifacts
    assert "wgmma.mma_async" in artifacts.PTX
    assert "cp.async.bulk.tensor" in artifacts.PTX
    assert "setmaxnreg.inc" in artifacts.PTX
    assert not re.search(r"\b(ld|st)\.local", artifacts.PTX)
    # sums across CTAs would depend on their order
    assert not re.search(r"\b(red|atom)\.\w+|cp\.reduce", artifacts.PTX)


@pytest.mark.parametrize("walk", ["dense", "causal"])
@pytest.mark.parametrize(
    "dims", [(32, 32), (64, 64), (96, 64), (128, 128), (192, 128), (256, 256)], ids="d{0[0]}-dv{0[1]}".format
)
def test_dq_uses_wgmma_and_tma_and_no_local_memory_or_atomics(dims, walk):
    check(DqConfig(dq_tile(*dims), torch.bfloat16, WALKS[walk]))


@pytest.mark.parametrize("walk", ["window", "lists"])
@pytest.mark.parametrize("dim", [64, 256])
def test_every_walk_compiles(dim, walk):
    check(DqConfig(dq_tile(dim, dim), torch.float16, WALKS[walk]))


def test_every_head_dim_has_a_tile_that_divides_a_mask_block():
    for dim in range(8, 257, 8):
        for value_dim in range(8, 257, 8):
            tile = dq_tile(dim, value_dim)
            assert tile.smem_bytes <= SMEM_BYTES
            assert 128 % tile.tile_m == 0 and 128 % tile.tile_n == 0


def test_a_tile_beyond_shared_memory_is_refused():
    with pytest.raises(ConfigError, match="shared memory"):
        DqTile(256, 256, v_stages=2)
