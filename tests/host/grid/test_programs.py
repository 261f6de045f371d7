"""Any small program of ops, captured tensors and masks has the outputs and gradients that the reference gives it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st

from flexbwd import create_block_mask
from flexbwd.testing import assert_matches_reference, attention_grads, make_case
from tests.host.grid.programs import captured, compiled, programs

LENGTHS = st.sampled_from([(32, 32), (17, 31), (31, 9), (1, 20), (30, 32)])
FORMS = st.sampled_from(["mask_mod", "blocks of 16", "small tiles"])


def compare(program, lengths, heads, form, seed):
    note(f"def score_mod(s, b, h, i, j):\n{program.score}\n\ndef mask_mod(b, h, i, j):\n{program.mask}")
    tensors = captured(seed)
    score_mod, mask_mod = compiled(program, tensors)
    named = {n: t for n, t in tensors.items() if t.requires_grad and program.score and n in program.score}
    case = make_case(lengths, heads, 8, batch=2, seed=seed)
    mask, options = {"mask_mod": mask_mod}, {}
    if form == "blocks of 16" and mask_mod is not None:
        mask = {"block_mask": create_block_mask(mask_mod, 2, 4, *lengths, BLOCK_SIZE=16)}
    if form == "small tiles":
        options = {"kernel_options": {"cpu_tile_elements": 300}}
    got = attention_grads(case, score_mod, captures=named, **mask, **options)
    assert_matches_reference(case, got, score_mod, captures=named, **mask)


@given(programs, LENGTHS, st.sampled_from([(4, 4), (4, 2), (4, 1)]), FORMS, st.integers(0, 9))
@settings(max_examples=100, suppress_health_check=[HealthCheck.too_slow])
def test_random_programs_match_the_reference(program, lengths, heads, form, seed):
    compare(program, lengths, heads, form, seed)


@pytest.mark.nightly
@given(programs, LENGTHS, st.sampled_from([(4, 4), (4, 2), (4, 1)]), FORMS, st.integers(0, 999))
@settings(max_examples=3000, derandomize=False, suppress_health_check=[HealthCheck.too_slow])
def test_many_random_programs_match_the_reference(program, lengths, heads, form, seed):
    compare(program, lengths, heads, form, seed)


def test_the_generator_reaches_every_capture():
    """Over many draws every kind of load is read, so that none is forgotten."""
    from tests.host.grid.programs import LOADS

    seen = set()

    @given(programs)
    @settings(max_examples=400)
    def collect(program):
        seen.update(load for load in LOADS if program.score and load in program.score)

    collect()
    assert seen == set(LOADS)
    assert torch.is_grad_enabled()
