"""Mods inside the backward kernel on the GPU, against the fp64 oracle."""

from __future__ import annotations

import pytest
import torch

from flexbwd import mods
from flexbwd.reference import kept_elements
from flexbwd.sm90.walks import CAUSAL, Dense
from tests.gpu.backward_problems import Shape, band_keep, check, check_learned, make

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
        reason="needs compute capability 9.0",
    ),
]

MAIN_DIMS = [(64, 64), (128, 128), (256, 256)]
SCORES = [e.name for e in mods.zoo("score")]
MASKS = [e.name for e in mods.zoo("mask")]


LEARNED = [
    "alibi_learned",
    "batch_bias",
    "graphormer",
    "head_bias",
    "key_bias",
    "pair_bias",
    "relative_table",
    "t5_causal",
]


def example(name: str, shape: Shape, learned: bool = False):
    """A mod of the zoo with its tensors on the GPU, frozen or not; and those that can be trained."""
    entry = mods.get(name)
    found = entry.example_arguments(shape.batch, shape.heads[0], *shape.lengths)
    moved = [
        t.detach().cuda().requires_grad_(learned and t.requires_grad) if isinstance(t, torch.Tensor) else t
        for t in found
    ]
    with torch.device("cuda"):  # for tables that a factory makes
        mod = entry.instantiate(tuple(moved))
    return (mod, tuple(t for t in moved if isinstance(t, torch.Tensor) and t.requires_grad)) if learned else mod


@pytest.mark.parametrize("walk", [Dense(), CAUSAL, "lists"], ids=["dense", "causal", "lists"])
@pytest.mark.parametrize("name", LEARNED)
def test_gradients_of_captured_tensors_match_fp64(name, walk):
    shape = Shape((257, 333), (128, 128) if walk != CAUSAL else (64, 64), (4, 2))
    mod, learned = example(name, shape, learned=True)
    keep = None if isinstance(walk, Dense) else band_keep(CAUSAL, shape.lengths)
    if walk == "lists":
        keep = torch.zeros(1, 1, *shape.lengths, dtype=torch.bool, device="cuda")
        keep[..., :128, 128:256] = keep[..., 128:, :128] = True
        walk = keep
    check_learned(make(shape, keep, mod, learned=learned), learned, walk, score_mod=mod)


@pytest.mark.parametrize("walk", [Dense(), CAUSAL], ids=["dense", "causal"])
@pytest.mark.parametrize("name", SCORES)
def test_score_mods_match_fp64(name, walk):
    shape = Shape((257, 333), (128, 128), (4, 2))
    mod = example(name, shape)
    keep = None if isinstance(walk, Dense) else band_keep(walk, shape.lengths)
    check(make(shape, keep, mod), walk, score_mod=mod)


@pytest.mark.parametrize("name", ["softcap", "alibi", "relative_bias", "sigmoid_gate", "temperature"])
@pytest.mark.parametrize("dims", [(64, 64), (192, 128), (256, 256)], ids="d{0[0]}".format)
def test_score_mods_at_other_dims(dims, name):
    if name not in SCORES:
        pytest.skip("not in the zoo")
    shape = Shape((257, 333), dims, (4, 2))
    mod = example(name, shape)
    check(make(shape, None, mod), Dense(), score_mod=mod)


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("dims", [(64, 64), (128, 128)], ids="d{0[0]}".format)
def test_mask_mods_match_fp64(dims, name):
    shape = Shape((333, 333), dims, (4, 2))
    mod = example(name, shape)
    keep = kept_elements((shape.batch, shape.heads[0], *shape.lengths), mod, device="cuda")
    check(make(shape, keep), keep, mask_mod=mod)


@pytest.mark.parametrize("dims", MAIN_DIMS, ids="d{0[0]}".format)
def test_score_and_mask_mods_together(dims):
    shape = Shape((300, 300), dims, (4, 2))
    score, mask = example("softcap", shape), example("document_causal", shape)
    keep = kept_elements((shape.batch, shape.heads[0], *shape.lengths), mask, device="cuda")
    check(make(shape, keep, score), keep, score_mod=score, mask_mod=mask)
