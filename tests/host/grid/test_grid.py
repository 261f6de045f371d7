"""Everywhere on the grid, outputs, LSE and all gradients are those of the dense reference."""

from __future__ import annotations

import itertools

import pytest
import torch

from flexbwd.testing import assert_matches_reference, assert_within_budget, attention_grads, reference_grads
from tests.host.grid.axes import (
    AXES,
    BASES,
    BLOCK_SIZES,
    CAPTURES,
    HEAD_DIMS,
    HEADS,
    LENGTHS,
    LOSSES,
    MASKS,
    STRIDES,
    pairwise,
    product,
    row_id,
)
from tests.host.grid.problems import make_problem

SHORT = (1, 7, 64, 100, 129)  # the dense reference of low precision is slow
LOW = (torch.float32, torch.bfloat16, torch.float16)


def compare(row, dtype=torch.float64):
    p = make_problem(row, dtype)
    mods = {"captures": p.captures, "block_mask": p.block_mask, "index_base": p.index_base}
    got = attention_grads(p.case, p.score_mod, p.mask_mod, **mods)
    if p.case.shape[3] == 1:
        compare_with_one_key(p, got, mods)
    else:
        assert_matches_reference(p.case, got, p.score_mod, p.mask_mod, **mods)


def compare_with_one_key(p, got, mods):
    """softmax over one key is constant: dS = dO·V − delta is dLSE or 0, and what the two roundings leave is allowed.

    The reference's autograd cancels exactly. The floor is 4 roundings of every term that enters a gradient.
    """
    want = reference_grads(p.case.double(), p.score_mod, p.mask_mod, **mods)
    rough = reference_grads(p.case, p.score_mod, p.mask_mod, **mods)
    case, eps = p.case.double(), torch.finfo(torch.float64 if got["lse"].dtype == torch.float64 else torch.float32).eps
    group = case.shape[1] // case.key.shape[1]
    key, value = (t.abs().repeat_interleave(group, 1) for t in (case.key, case.value))
    terms = case.grad_out.abs() @ value.mT  # [B, Hq, Sq, 1]
    terms = 4 * eps * (terms if case.grad_lse is None else terms + case.grad_lse.abs().unsqueeze(-1))
    steep = 4.0  # no score_mod of the grid is steeper in its score or in a captured value
    floors = {"dq": float((terms * key).max()) * steep,
              "dk": float((terms * case.query.abs()).sum(-2).max()) * group * steep,
              **dict.fromkeys(p.captures, float(terms.sum()) * steep)}  # fmt: skip
    for name in want:
        assert_within_budget(got[name], want[name], rough[name], name, floors.get(name, 0.0))


@pytest.mark.parametrize("row", pairwise(AXES), ids=row_id)
def test_every_pair_of_axis_values_matches_in_fp64(row):
    compare(row)


@pytest.mark.parametrize(
    "row", pairwise({**AXES, "q_len": SHORT, "kv_len": SHORT, "dtype": LOW}, seed=1)[::2], ids=row_id
)
@pytest.mark.filterwarnings("ignore::flexbwd.errors.ModDtypeWarning")
def test_low_precision_stays_within_its_budget(row):
    row = dict(row)
    compare(row, row.pop("dtype"))


def test_pairwise_rows_hold_every_pair():
    axes = {"a": (1, 2, 3), "b": "xyzw", "c": (None, True), "d": range(5)}
    rows = pairwise(axes)
    for one, two in itertools.combinations(axes, 2):
        assert {(r[one], r[two]) for r in rows} == set(itertools.product(axes[one], axes[two]))
    assert len(rows) < 30


# -- exhaustive products of the axes that meet in one part of the code -------------------------------------------------
NIGHTLY = {
    "shapes": product(q_len=LENGTHS, kv_len=LENGTHS, head_dim=HEAD_DIMS, heads=HEADS),
    "masks": product(q_len=LENGTHS, kv_len=LENGTHS, mask=MASKS, block_size=BLOCK_SIZES),
    "captures": product(capture=CAPTURES, mask=MASKS, loss=LOSSES, heads=HEADS, base=BASES),
    "strides": product(strides=STRIDES, heads=HEADS, mask=MASKS, loss=LOSSES, head_dim=HEAD_DIMS[-3:]),
    "bases": product(base=BASES, mask=MASKS, block_size=BLOCK_SIZES, q_len=LENGTHS[1:6], kv_len=LENGTHS[1:6]),
    "pairs": [row for seed in range(2, 12) for row in pairwise(AXES, seed, tries=1)],
}


@pytest.mark.nightly
@pytest.mark.parametrize("part", range(16))
@pytest.mark.parametrize("name", NIGHTLY)
def test_whole_products_match_in_fp64(name, part):
    failed = []
    for row in NIGHTLY[name][part::16]:
        try:
            compare(row)
        except Exception as error:
            failed.append(f"{row_id(row)}: {error!r}")
    assert not failed, f"{len(failed)} of {len(NIGHTLY[name][part::16])}: " + "\n".join(failed[:20])


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.filterwarnings("ignore::flexbwd.errors.ModDtypeWarning")
def test_more_low_precision_rows_stay_within_their_budget(seed):
    for row in pairwise({**AXES, "q_len": SHORT, "kv_len": SHORT, "dtype": LOW}, seed + 20, tries=1):
        compare({k: v for k, v in row.items() if k != "dtype"}, row["dtype"])
