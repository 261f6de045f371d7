"""Every score mod of the zoo: outputs and all gradients, captured tensors' too, in fp64."""

from __future__ import annotations

import pytest
import torch

from flexbwd import mods
from flexbwd.testing import (
    assert_matches_reference,
    assert_within_budget,
    attention_grads,
    make_case,
    reference_grads,
    torch_operator_grads,
)

SCORES = [entry.name for entry in mods.zoo("score")]
SEQLENS = [(65, 65), (33, 130), (130, 33), (1, 7)]
every_score = pytest.mark.parametrize("name", SCORES)
every_length = pytest.mark.parametrize("seqlens", SEQLENS, ids="q{0[0]}-kv{0[1]}".format)


def problem(name, seqlens, dtype=torch.float64):
    case = make_case(seqlens, heads=(4, 2), head_dim=(8, 6), dtype=dtype, batch=2)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return case, mods.get(name).example(*case.shape, dtype=wide)


@every_score
@every_length
@pytest.mark.parametrize("mask", [None, mods.causal], ids=["all", "causal"])
def test_reference_equals_torchs_operator(name, seqlens, mask):
    case, mod = problem(name, seqlens)
    got, want = reference_grads(case, mod, mask), torch_operator_grads(case, mod, mask)
    assert got.keys() == want.keys()
    for key in want:
        assert_within_budget(got[key], want[key], None, key, floor=1e-10)


@every_score
@every_length
@pytest.mark.parametrize("mask", [None, mods.causal], ids=["all", "causal"])
def test_flex_attention_equals_torchs_operator(name, seqlens, mask):
    case, mod = problem(name, seqlens)
    got, want = attention_grads(case, mod, mask), torch_operator_grads(case, mod, mask)
    assert got.keys() == want.keys()
    for key in want:
        assert_within_budget(got[key], want[key], None, key, floor=1e-10)


@every_score
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_flex_attention_is_within_the_budget_of_its_dtype(name, dtype):
    case, mod = problem(name, (100, 129), dtype)
    assert_matches_reference(case, attention_grads(case, mod, mods.causal), mod, mods.causal)


@every_score
def test_a_learned_tensor_gets_a_gradient_of_its_own_dtype(name):
    entry = mods.get(name)
    arguments = entry.example_arguments(2, 4, 20, 20)
    learned = [a for a in arguments if isinstance(a, torch.Tensor) and a.requires_grad]
    got = reference_grads(make_case((20, 20), heads=4, batch=2), entry.instantiate(arguments))
    grads = [g for n, g in got.items() if n not in ("out", "lse", "dq", "dk", "dv")]
    assert [(g.shape, g.dtype) for g in grads] == [(t.shape, t.dtype) for t in learned]
    assert all((g != 0).any() for g in grads)
