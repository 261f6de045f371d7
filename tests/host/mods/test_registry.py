"""The catalogue is complete, documented, and its examples run in any problem size."""

from __future__ import annotations

import inspect
import re

import pytest
import torch

from flexbwd import mods
from flexbwd.errors import OptionError
from flexbwd.reference import attention_reference, kept_elements
from flexbwd.testing import make_case

EVERY = pytest.mark.parametrize("entry", mods.zoo(), ids=lambda e: e.name)


def test_names_are_sorted_and_get_finds_each():
    assert mods.names() == sorted(mods.names())
    assert [mods.get(n).name for n in mods.names()] == mods.names()
    assert {e.kind for e in mods.zoo()} == {"score", "mask"}
    assert len(mods.zoo("score")) + len(mods.zoo("mask")) == len(mods.names())


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(OptionError, match="name='alibis' is not in the zoo; it has alibi, "):
        mods.get("alibis")


def test_every_public_factory_is_in_the_catalogue():
    helpers = {
        "document_bounds",
        "document_ids",
        "get",
        "graph_distances",
        "names",
        "t5_buckets",
        "tree_ancestors",
        "zoo",
    }
    public = {n for n in mods.__all__ if inspect.isfunction(getattr(mods, n))} - helpers
    assert public == {entry.factory.__name__ for entry in mods.zoo()}


@EVERY
def test_formula_and_source_are_told(entry):
    assert entry.formula.startswith("s' = " if entry.kind == "score" else "keep ")
    assert re.search(r"\d{4}", entry.source), "a source has a year"
    assert getattr(mods, entry.factory.__name__) is entry.factory


@EVERY
@pytest.mark.parametrize("seqlens", [(1, 1), (3, 50), (50, 3), (200, 200)], ids="q{0[0]}-kv{0[1]}".format)
def test_an_example_runs_at_any_size_and_says_its_name(entry, seqlens):
    case = make_case(seqlens, heads=3, head_dim=4, batch=2)
    mod = entry.example(*case.shape)
    out, _ = attention_reference(case.query, case.key, case.value, **{f"{entry.kind}_mod": mod})
    assert out.isfinite().all()
    assert mod.__name__ == "causal" or mod.__name__.endswith("_mod" if entry.kind == "score" else "_mask")


@EVERY
def test_an_example_is_seeded(entry):
    one, two = (entry.example_arguments(2, 4, 40, 60, torch.Generator().manual_seed(3)) for _ in range(2))
    for a, b in zip(one, two, strict=True):
        assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


@EVERY
def test_an_example_masks_something_but_not_all(entry):
    if entry.kind == "mask":
        case = make_case((96, 96), heads=2, head_dim=4, batch=2)
        share = kept_elements((2, 2, 96, 96), entry.example(*case.shape)).double().mean()
        assert 0.02 < share < 0.98
