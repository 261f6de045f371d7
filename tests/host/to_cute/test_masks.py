"""Masks as words and compares, over fragments of several words, with limits and with moved coordinates."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch

from flexbwd import mods
from flexbwd.errors import UnsupportedError
from flexbwd.modgraph.extents import Extents

if find_spec("cutlass") is None:
    pytest.skip("the CuTe DSL has wheels for Linux only", allow_module_level=True)

from flexbwd.sm90.mods import Limits, ModConfig, ModUse
from flexbwd.sparsity.tensors import IndexBase
from tests.host.to_cute.fragments import assert_same, expected, on_host, plan_of, raw_scores

IDS = (torch.arange(256) // 37).to(torch.int32)
WIDE_IDS = IDS.long() * (1 << 33)
ENDS = torch.tensor([50, 1 << 40])
FLAGS = torch.rand(256, generator=torch.Generator().manual_seed(0)) < 0.3

MASKS = {
    "never": lambda b, h, q, kv: kv < 0,
    "always": lambda b, h, q, kv: kv >= 0,
    "window of both sides": lambda b, h, q, kv: (q - kv < 9) & (kv - q < 70),
    "not causal": lambda b, h, q, kv: ~(kv <= q + 3),
    "equal to a diagonal": lambda b, h, q, kv: (kv == q) | (kv == q - 17) | (kv != 3 + q),
    "chunks": lambda b, h, q, kv: (q // 23 == kv // 23) | (kv // 31 > q // 40),
    "rows only": lambda b, h, q, kv: (q % 3 != 0) & (kv <= q),
    "heads only": lambda b, h, q, kv: (h == 1) | (kv < 5 * b + 20),
    "wide limit": lambda b, h, q, kv: kv < ENDS[b],
    "wide difference": lambda b, h, q, kv: (ENDS[b] - kv > 30) & (q.long() * (1 << 30) >= kv),
    "documents": lambda b, h, q, kv: (WIDE_IDS[q] == WIDE_IDS[kv]) & (kv <= q),
    "flags or near": lambda b, h, q, kv: FLAGS[q] | (FLAGS[kv] | (kv <= q)) & (kv > q - 40),
    "xor and where": lambda b, h, q, kv: torch.where(kv < 60, kv <= q, q - kv > 30) ^ (kv // 2 == 9),
    "distance": lambda b, h, q, kv: ((q - kv).abs() < 21) & ((kv - q).abs() <= 30) | ((q - kv).abs() > ENDS[b]),
    "apart": lambda b, h, q, kv: (kv % 19 - q % 7 >= -3) & (4 * b < q // 5 + kv % 11) & (q % 3 - kv % 5 != h),
    "overflowing": lambda b, h, q, kv: kv * 2**30 < q,
}


@pytest.mark.parametrize("name", MASKS)
def test_masks_over_several_words_match_torch(name):
    extents = Extents(2, 2, 37, 170)
    plan, captures = plan_of(mask=MASKS[name])
    raw = raw_scores(extents, held=40)
    raw = torch.nn.functional.pad(raw, (0, 0, 0, 160 - raw.shape[1] % 160))
    want = expected(plan, captures, extents, raw, torch.float64)
    for got in on_host(plan, captures, extents, raw, held=40):
        assert torch.equal(got.score == -torch.inf, want.score == -torch.inf)


def test_minus_infinity_of_a_score_mod_is_a_mask():
    def score(s, b, h, q, kv):
        return torch.where(FLAGS[kv] | (kv <= q), torch.tanh(s), -torch.inf)

    extents = Extents(1, 2, 20, 35)
    plan, captures = plan_of(score, mods.sliding_window(12))
    assert plan.score_keep is not None
    raw = raw_scores(extents)
    want, rough = (expected(plan, captures, extents, raw, t) for t in (torch.float64, torch.float32))
    for got in on_host(plan, captures, extents, raw):
        assert_same(got, want, rough, 0)


LIMITS = [
    Limits(col_end=29),
    Limits(row_end=13, col_end=29),
    Limits(lo=0),
    Limits(hi=5),
    Limits(row_end=40, lo=-3, hi=11),
    Limits(lo=4, hi=3),
]


@pytest.mark.parametrize("held", [4, 40])
@pytest.mark.parametrize("masked", [False, True], ids=["limits", "limits and mask"])
@pytest.mark.parametrize("limits", LIMITS, ids=str)
def test_limits_hide_by_local_rows_columns_and_distance(limits, masked, held):
    if held == 40 and masked:
        pytest.skip("one of the two shows it")
    size = 4 * held
    extents = Extents(1, 1, size, size)
    plan, captures = plan_of(mask=mods.dilated_window(20, 3) if masked else None)
    raw = raw_scores(extents, held)
    kept = expected(plan, captures, extents, raw, torch.float64).score > -torch.inf
    for rows_are, got in zip("qk", on_host(plan, captures, extents, raw, held=held, limits=limits), strict=True):
        q, kv = torch.arange(size).view(-1, 1), torch.arange(size)
        row, col = (q, kv) if rows_are == "q" else (kv, q)
        want = kept.clone()
        want &= row < limits.row_end if limits.row_end is not None else True
        want &= col < limits.col_end if limits.col_end is not None else True
        want &= q - kv >= limits.lo if limits.lo is not None else True
        want &= q - kv <= limits.hi if limits.hi is not None else True
        assert torch.equal(got.score > -torch.inf, want)


BASES = {
    "heads": IndexBase(1, 2),
    "queries": IndexBase(0, 0, torch.tensor([100, 3, 64], dtype=torch.int32), None, (16, 16)),
    "both": IndexBase(1, 0, torch.tensor([16, 0]), torch.tensor([90, 7, 0]), (32, 16)),
}


@pytest.mark.parametrize("name", BASES)
def test_mods_see_global_coordinates(name):
    base, extents = BASES[name], Extents(2, 2, 39, 45)
    slopes = torch.tensor([0.1, -0.2, 0.3, 0.4])
    bias = torch.randn(4, 160)

    def score(s, b, h, q, kv):
        return s + slopes[h] * (q - kv) + bias[b + h, kv]

    plan, captures = plan_of(score, mods.document_causal(IDS))
    raw = raw_scores(extents)
    want = expected(plan, captures, extents, raw, torch.float64, base)
    hidden = want.score == -torch.inf
    for got in on_host(plan, captures, extents, raw, base=base):
        assert torch.equal(got.score == -torch.inf, hidden)
        torch.testing.assert_close(got.score[~hidden].double(), want.score[~hidden], rtol=1e-5, atol=1e-5)


def test_a_base_for_blocks_smaller_than_a_tile_is_refused():
    plan, captures = plan_of(mask=mods.causal)
    base = IndexBase(q_base=torch.zeros(4, dtype=torch.int32), block_size=(64, 64))
    with pytest.raises(UnsupportedError, match="q_base for blocks of 64"):
        ModConfig.of(plan, captures, ModUse(Extents(1, 1, 256, 256), (128, 64)), base)
