"""and_masks, or_masks, not_mask, noop_mask: meaning, names, pickling, tracing."""

import pickle

import pytest
import torch

from flexbwd.errors import OptionError
from flexbwd.sparsity import and_masks, create_block_mask, noop_mask, not_mask, or_masks

LENGTHS = (70, 90)


def causal(b, h, q, k):
    return q >= k


def window(b, h, q, k):
    return (q - k).abs() < 20


def heads(b, h, q, k):
    return (h == 0) | (k < 30)


def dense(mod):
    h, q, k = torch.arange(2)[:, None, None], torch.arange(70)[:, None], torch.arange(90)
    return mod(torch.zeros(1, 1, 1, 1, dtype=torch.int64), h, q, k).expand(1, 2, 70, 90)


COMBINED = {
    "and": (and_masks(causal, window, heads), lambda: dense(causal) & dense(window) & dense(heads)),
    "or": (or_masks(causal, window, heads), lambda: dense(causal) | dense(window) | dense(heads)),
    "not": (not_mask(window), lambda: ~dense(window)),
    "noop": (noop_mask, lambda: torch.ones(1, 2, 70, 90, dtype=torch.bool)),
    "nested": (
        or_masks(and_masks(causal, not_mask(window)), heads),
        lambda: (dense(causal) & ~dense(window)) | dense(heads),
    ),
    "with-noop": (and_masks(noop_mask, causal), lambda: dense(causal)),
}


@pytest.mark.parametrize("name", COMBINED)
def test_combinations_mean_what_they_say(name):
    mod, want = COMBINED[name]
    mask = create_block_mask(mod, None, 2, *LENGTHS, BLOCK_SIZE=16)
    assert mask.mask_mod is mod
    assert torch.equal(mask.element_mask(), want())
    mask.check()


def test_noop_lists_every_block_as_full():
    mask = create_block_mask(noop_mask, None, None, 70, 90, BLOCK_SIZE=16)
    assert int(mask.q_to_kv.full_block_cnt.sum()) == 5 * 6
    assert int(mask.q_to_kv.mask_block_cnt.sum()) == 0


def test_one_mask_stays_itself():
    assert and_masks(causal) is causal
    assert or_masks(causal) is causal


def test_names_tell_the_parts():
    assert and_masks(causal, or_masks(window, not_mask(heads))).__name__ == "(causal & (window | ~heads))"


@pytest.mark.parametrize("name", COMBINED)
def test_combinations_pickle_with_their_parts(name):
    mod, want = COMBINED[name]
    again = pickle.loads(pickle.dumps(mod))
    assert torch.equal(dense(again), want())


@pytest.mark.parametrize("combine", [and_masks, or_masks, not_mask])
@pytest.mark.parametrize("bad", [None, True, torch.ones(2) > 0], ids=["none", "bool", "tensor"])
def test_a_part_that_is_no_function_is_named(combine, bad):
    with pytest.raises(OptionError, match=f"{combine.__name__}: argument 0"):
        combine(bad)


@pytest.mark.parametrize("combine", [and_masks, or_masks])
def test_no_masks_at_all_are_refused(combine):
    with pytest.raises(OptionError, match="noop_mask"):
        combine()
