"""Mods inside the backward kernel, compiled for sm_90a on a CPU: nothing in local memory, no wgmma waited for alone."""

from __future__ import annotations

import os
import sys

import pytest
import torch

os.environ.setdefault("CUTE_DSL_ARCH", "sm_90a")  # read when the DSL is imported
pytest.importorskip("cutlass", reason="the CuTe DSL is not installed")

from flexbwd import mods as zoo
from flexbwd.modgraph.extents import Extents
from flexbwd.modgraph.frontend import ModKind, trace
from flexbwd.modgraph.modplan import JClass
from flexbwd.modgraph.plan_mods import build_mod_plan
from flexbwd.sm90.backward.call import build_backward, captures_refusal
from flexbwd.sm90.backward.config import BwdConfig
from flexbwd.sm90.backward.tile import backward_tile
from flexbwd.sm90.mods import ModConfig, ModUse
from flexbwd.sm90.walks import WalkKind
from tests.compile.resources import compile_with_artifacts, resources

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the DSL has wheels for Linux only")

LISTS, CAUSAL = WalkKind(lists=True), WalkKind(has_lo=True)
SPILLED_BYTES = {
    ("softcap", 128): 40,
    ("document_causal", 64): 48,
    ("document_interval", 64): 48,
    ("frame_causal", 64): 16,
}  # of a thread; the others: none


def plan_of(name: str, trained: bool = False):
    entry = zoo.get(name)
    kind = ModKind.SCORE if entry.kind == "score" else ModKind.MASK
    found = [
        t.detach().requires_grad_(trained and t.requires_grad) if isinstance(t, torch.Tensor) else t
        for t in entry.example_arguments(2, 4, 256, 256)
    ]
    traced, captures = trace(entry.instantiate(tuple(found)), kind, device="cpu")
    return build_mod_plan(*((traced, None, None) if kind is ModKind.SCORE else (None, None, traced))), captures


def compiled(name: str, dim: int, folder, walk: WalkKind, trained: bool = False):
    plan, captures = plan_of(name, trained)
    tile = backward_tile(dim, dim, plan.j_class is JClass.NONLINEAR or trained)
    use = ModUse(Extents(2, 4, 256, 256), (tile.tile_m, tile.tile_n), backward=True, partial=walk.lists)
    mods, _ = ModConfig.of(plan, captures, use)
    config = BwdConfig(tile, torch.bfloat16, walk, mods=mods, want_captures=trained)
    return compile_with_artifacts(lambda: build_backward(config), folder).artifacts


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("name", ["alibi", "document_causal", "document_interval", "frame_causal", "softcap"])
def test_mods_leave_nothing_in_local_memory(name, dim, tmp_path):
    found = compiled(name, dim, tmp_path, LISTS)
    assert resources(found.CUBIN).stack_bytes <= SPILLED_BYTES.get((name, dim), 0)


@pytest.mark.parametrize(("name", "most"), [("alibi_learned", 3), ("key_bias", 6), ("relative_table", 3 * 18)])
def test_gradients_of_captured_tensors_take_few_atomics(name, most, tmp_path):
    """By kind of index: a warp sums all that it can before it goes to memory."""
    ptx = compiled(name, 128, tmp_path, CAUSAL, trained=True).PTX
    assert 0 < ptx.count("red.relaxed.gpu.global.add.f32") <= most


def test_what_has_no_gradient_kernel_is_refused():
    assert captures_refusal(plan_of("key_bias", trained=True)[0]) is None
    assert captures_refusal(plan_of("alibi")[0]) is None
    assert "depends on the score" in captures_refusal(plan_of("head_temperature", trained=True)[0])
