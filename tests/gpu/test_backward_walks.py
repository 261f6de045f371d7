"""Walks of the backward on the GPU: bands of run-time limits, and lists per query head, against the fp64 oracle."""

from __future__ import annotations

import pytest
import torch

from flexbwd.plan import Needs
from flexbwd.sm90.walks import Band, Dense
from tests.gpu.backward_problems import Shape, band_keep, check, make, run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
        reason="needs compute capability 9.0",
    ),
]

BANDS = [(0, None), (None, 0), (0, 100), (-70, 70), (30, 31), (-5, -5), (200, 400), (None, -300), (9, 3), (-9999, 9999)]
MAIN_DIMS = [(64, 64), (128, 128), (256, 256)]


def blocks(shape: Shape, heads: int, density: float, granule: tuple[int, int] = (128, 128)) -> torch.Tensor:
    """A random block-sparse keep [1, heads, Sq, Skv]."""
    generator = torch.Generator("cuda").manual_seed(1)
    sizes = [-(-n // g) for n, g in zip(shape.lengths, granule, strict=True)]
    live = torch.rand(1, heads, *sizes, device="cuda", generator=generator) < density
    live = live.repeat_interleave(granule[0], 2).repeat_interleave(granule[1], 3)
    return live[:, :, : shape.lengths[0], : shape.lengths[1]].contiguous()


@pytest.mark.parametrize("limits", BANDS, ids=str)
@pytest.mark.parametrize("dims", MAIN_DIMS, ids="d{0[0]}".format)
def test_bands_match_fp64(dims, limits):
    shape, band = Shape((411, 533), dims), Band(*limits)
    check(make(shape, band_keep(band, shape.lengths), grad_lse=True), band)


@pytest.mark.parametrize("lengths", [(1, 700), (700, 1), (257, 1000), (1000, 257)], ids=str)
def test_windows_of_unequal_lengths_match_fp64(lengths):
    band = Band(-3, 150)
    check(make(Shape(lengths, (128, 128)), band_keep(band, lengths)), band)


@pytest.mark.parametrize("heads", [1, 4], ids=["broadcast", "per-head"])
@pytest.mark.parametrize("groups", [(4, 4), (4, 2), (4, 1)], ids=str)
@pytest.mark.parametrize("dims", MAIN_DIMS, ids="d{0[0]}".format)
def test_lists_match_fp64(dims, groups, heads):
    shape = Shape((700, 900), dims, groups)
    keep = blocks(shape, heads, 0.4)
    check(make(shape, keep, grad_lse=True), keep)


@pytest.mark.parametrize("density", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("lengths", [(64, 64), (65, 1), (1000, 1025)], ids=str)
def test_empty_and_whole_lists_match_fp64(lengths, density):
    shape = Shape(lengths, (128, 128), (4, 2))
    keep = blocks(shape, 4, density)
    check(make(shape, keep), keep)


@pytest.mark.parametrize("needs", [(True, False, False), (False, True, True)], ids=str)
def test_lists_with_some_gradients(needs):
    shape = Shape((700, 900), (256, 256), (4, 2))
    keep = blocks(shape, 1, 0.4)
    check(make(shape, keep), keep, Needs(*needs))


def test_lists_of_everything_are_dense():
    shape = Shape((640, 768), (64, 64), (4, 2))
    held = make(shape)
    keep = torch.ones(1, 1, *shape.lengths, dtype=torch.bool, device="cuda")
    got, want = run(held, keep), run(held, Dense())
    torch.testing.assert_close(got.key, want.key, rtol=2e-2, atol=1e-2)
    torch.testing.assert_close(got.value, want.value, rtol=2e-2, atol=1e-2)
