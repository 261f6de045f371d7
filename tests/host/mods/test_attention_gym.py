"""Mods of the zoo against attention-gym's of the same meaning."""

from __future__ import annotations

import pytest
import torch

from flexbwd import mods
from flexbwd.reference import kept_elements, reference_grads
from flexbwd.testing import make_case

pytest.importorskip("attn_gym", reason="attn-gym is a development dependency")

SHARED = [entry for entry in mods.zoo() if entry.attn_gym is not None]
SEQLENS = [(128, 128), (60, 97)]


def by_kind(kind):
    return pytest.mark.parametrize("entry", [e for e in SHARED if e.kind == kind], ids=lambda e: e.name)


@by_kind("mask")
@pytest.mark.parametrize("seqlens", SEQLENS, ids="q{0[0]}-kv{0[1]}".format)
@pytest.mark.parametrize("seed", [0, 1])
def test_masks_keep_the_same_elements(entry, seqlens, seed):
    arguments = entry.example_arguments(2, 4, *seqlens, generator=torch.Generator().manual_seed(seed))
    ours = kept_elements((2, 4, *seqlens), entry.instantiate(arguments))
    assert torch.equal(ours, kept_elements((2, 4, *seqlens), entry.attn_gym(*arguments)))
    assert ours.any()
    assert not ours.all()


@by_kind("score")
@pytest.mark.parametrize("seqlens", SEQLENS, ids="q{0[0]}-kv{0[1]}".format)
def test_scores_give_the_same_attention_and_gradients(entry, seqlens):
    case = make_case(seqlens, heads=4, head_dim=8, batch=2)
    arguments = entry.example_arguments(2, 4, *seqlens, dtype=torch.float64)
    learned = {f"learned {n}": a for n, a in enumerate(arguments) if isinstance(a, torch.Tensor) and a.requires_grad}
    ours = reference_grads(case, entry.instantiate(arguments), captures=learned)
    theirs = reference_grads(case, entry.attn_gym(*arguments), captures=learned)
    fp32_tables = 1e-4 if entry.name == "sandwich" else 1e-10  # both keep the table in fp32, computed differently
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], rtol=fp32_tables, atol=fp32_tables)


def test_all_generators_that_have_a_counterpart_are_compared():
    assert {e.name for e in SHARED} == {
        "alibi", "block_diffusion", "causal", "chunked_causal", "dilated_window", "document", "document_causal",
        "document_interval", "document_interval_causal", "global_tokens", "graphormer", "natten_2d", "prefix_lm",
        "sandwich", "shared_prefix", "sliding_window", "softcap", "sta", "tree_verification",
    }  # fmt: skip
