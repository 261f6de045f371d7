"""Masks recognised as a band of q_idx - kv_idx keep what the band keeps; every other mask is left alone."""

import pytest
import torch

from flexbwd import mods
from flexbwd.modgraph.band import band_of
from flexbwd.modgraph.frontend import ModKind, trace
from flexbwd.modgraph.modplan import Band


def graph(mask):
    return trace(mask, ModKind.MASK, device=torch.device("cpu"))[0].output


BANDS = {
    "causal": (lambda b, h, q, k: q >= k, Band(0, None)),
    "causal, written the other way": (lambda b, h, q, k: k <= q, Band(0, None)),
    "strictly causal": (lambda b, h, q, k: q > k, Band(1, None)),
    "strictly causal, negated sides": (lambda b, h, q, k: -k > -q, Band(1, None)),
    "anticausal": (lambda b, h, q, k: q <= k, Band(None, 0)),
    "shifted causal": (lambda b, h, q, k: q + 5 >= k, Band(-5, None)),
    "window": (lambda b, h, q, k: (q >= k) & (q - k <= 7), Band(0, 7)),
    "window, strict": (lambda b, h, q, k: (q >= k) & (q - k < 7), Band(0, 6)),
    "both sides": (lambda b, h, q, k: (q - k).abs() <= 3, Band(-3, 3)),
    "both sides, strict": (lambda b, h, q, k: torch.abs(k - q) < 3, Band(-2, 2)),
    "both sides, off centre": (lambda b, h, q, k: (q - k + 2).abs() <= 3, Band(-5, 1)),
    "both sides, off centre, other way": (lambda b, h, q, k: (k - q + 2).abs() <= 3, Band(-1, 5)),
    "nested conjunctions": (lambda b, h, q, k: (q >= k) & ((q - k <= 9) & (q - k <= 4)), Band(0, 4)),
    "scaled on both sides": (lambda b, h, q, k: q + q - k >= q, Band(0, None)),
    "zoo causal": (mods.causal, Band(0, None)),
    "zoo sliding window": (mods.sliding_window(16), None),
    "zoo symmetric window": (mods.symmetric_window(5), None),
}


@pytest.mark.parametrize("name", BANDS)
def test_a_band_keeps_exactly_what_the_mask_keeps(name):
    mask, want = BANDS[name]
    band = band_of(graph(mask))
    assert band is not None
    assert want is None or band == want
    i, j = torch.arange(40)[:, None], torch.arange(50)[None]
    zero = torch.zeros((), dtype=torch.int32)
    kept = torch.ones(40, 50, dtype=torch.bool)
    if band.lo is not None:
        kept &= i - j >= band.lo
    if band.hi is not None:
        kept &= i - j <= band.hi
    torch.testing.assert_close(kept, mask(zero, zero, i.int(), j.int()).expand(40, 50))


OTHERS = {
    "a document": lambda b, h, q, k: (q // 8) == (k // 8),
    "one side only": lambda b, h, q, k: k < 8,
    "a prefix": lambda b, h, q, k: (q >= k) | (k < 8),
    "per head": lambda b, h, q, k: q - k >= h,
    "dilated": lambda b, h, q, k: (q - k) % 2 == 0,
    "twice the difference": lambda b, h, q, k: 2 * q - 2 * k >= 3,
    "a float": lambda b, h, q, k: (q - k) * 0.5 >= 1,
    "a huge limit": lambda b, h, q, k: q - k >= -(1 << 31) + 5,
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_masks_are_no_band(name):
    assert band_of(graph(OTHERS[name])) is None
