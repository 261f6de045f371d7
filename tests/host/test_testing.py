"""The tests' own tools: budgets that fail when they should, and poisoned memory."""

from __future__ import annotations

import math

import pytest
import torch

from flexbwd import mods
from flexbwd.testing import (
    assert_matches_reference,
    assert_within_budget,
    attention_grads,
    captured_parameters,
    make_case,
    mod_name,
    poisoned,
    reference_grads,
    sum_noise,
    torch_operator_grads,
)

WEIGHT = torch.ones(4, requires_grad=True)
LOW = [torch.float32, torch.bfloat16, torch.float16]


def test_a_case_is_seeded_and_its_double_holds_the_same_values():
    one, two = (make_case((5, 7), heads=(4, 2), head_dim=(8, 6), dtype=torch.bfloat16, batch=3) for _ in range(2))
    assert torch.equal(one.query, two.query)
    assert not torch.equal(one.query, make_case((5, 7), (4, 2), (8, 6), torch.bfloat16, 3, seed=1).query)
    assert one.shape == (3, 4, 5, 7)
    assert (one.key.shape, one.value.shape) == ((3, 2, 7, 8), (3, 2, 7, 6))
    assert one.grad_out.shape == (3, 4, 5, 6)
    assert torch.equal(one.double().key, one.key.double())
    assert one.double().to(torch.bfloat16).key.dtype == torch.bfloat16
    assert make_case((5, 7), lse_grad=False).grad_lse is None


def test_captured_parameters_are_found_by_name_through_helpers_and_globals():
    slopes, frozen = torch.ones(2, requires_grad=True), torch.ones(2)

    def helper(x):
        return slopes[x]

    def mod(score, b, h, i, j):
        return score + helper(h) + frozen[h] + WEIGHT[h]

    assert list(captured_parameters(mod)) == ["WEIGHT", "slopes"]
    assert captured_parameters(None) == {}


def test_torchs_operator_gets_gradients_of_globals_and_helpers():
    slopes = torch.randn(4, requires_grad=True)

    def helper(x):
        return slopes[x]

    def mod(score, b, h, i, j):
        return score + helper(h) * (i - j) + WEIGHT[h]

    case = make_case((6, 6), heads=4, head_dim=4)
    got, want = reference_grads(case, mod), torch_operator_grads(case, mod)
    assert got.keys() == want.keys() >= {"slopes", "WEIGHT"}
    torch.testing.assert_close(got["slopes"], want["slopes"])
    torch.testing.assert_close(got["WEIGHT"], want["WEIGHT"])


@pytest.mark.parametrize("dtype", [torch.float64, *LOW], ids=str)
def test_the_reference_itself_is_within_budget(dtype):
    case = make_case((30, 50), heads=(4, 2), head_dim=16, dtype=dtype)
    mod = mods.get("relative_table").example(1, 4, 30, 50)
    assert_matches_reference(case, reference_grads(case, mod, mods.causal), mod, mods.causal)


@pytest.mark.parametrize("dtype", LOW, ids=str)
@pytest.mark.parametrize("mistake", ["one element", "everywhere", "one row", "sign"])
def test_a_mistake_is_over_budget(dtype, mistake):
    case = make_case((64, 64), heads=2, head_dim=16, dtype=dtype)
    want, rough = reference_grads(case.double(), None, mods.causal), reference_grads(case, None, mods.causal)
    got = rough["dk"].clone()
    top = float(want["dk"].abs().max())
    if mistake == "one element":
        got[0, 1, 5, 3] += 8 * torch.finfo(dtype).eps * top + 0.05 * top
    elif mistake == "everywhere":
        got *= 1 + 40 * torch.finfo(dtype).eps
    elif mistake == "one row":
        got[:, :, 40] = 0
    else:
        got = -got
    with pytest.raises(AssertionError, match="dk: "):
        assert_within_budget(got, want["dk"], rough["dk"], "dk")


@pytest.mark.parametrize(
    ("got", "message"),
    [
        (torch.tensor([1.0, math.nan, 2.0]), "x: element .1,. is NaN"),
        (torch.tensor([1.0, 2.0, -math.inf]), "x: element .1,. differs; so do 2 of 3"),
        (torch.tensor([1.0, math.inf, 2.0]), "x: element .1,. differs"),
        (torch.tensor([1.0, -math.inf]), "x: shape"),
        (torch.tensor([1.0, -math.inf, 2.1]), "x: error 0.1 > .* at .2,. .got 2.0999"),
    ],
    ids=["nan", "infinity is missing", "sign of infinity", "shape", "value"],
)
def test_the_message_says_where(got, message):
    want = torch.tensor([1.0, -math.inf, 2.0], dtype=torch.float64)
    with pytest.raises(AssertionError, match=message):
        assert_within_budget(got, want, want.float(), "x")


def test_fp64_is_held_to_ten_digits():
    want = torch.tensor([1.0, 1000.0], dtype=torch.float64)
    assert_within_budget(want + 1e-8, want, None, "x")
    with pytest.raises(AssertionError, match="x: error"):
        assert_within_budget(want + 1e-6, want, want, "x")
    with pytest.raises(AssertionError, match="needs a rough result"):
        assert_within_budget(want.float(), want, None, "x")


def test_a_sum_that_cancels_is_held_to_the_rounding_of_its_terms():
    zero = torch.zeros(3, dtype=torch.float64)
    with pytest.raises(AssertionError):
        assert_within_budget(zero.float() + 1e-5, zero, zero.float(), "x")
    assert_within_budget(zero.float() + 1e-5, zero, zero.float(), "x", floor=2e-5)


def test_poisoned_memory_is_nan_inside_and_settings_return():
    before = torch.are_deterministic_algorithms_enabled()
    with poisoned():
        assert torch.empty(1000).isnan().all()
        assert torch.empty_strided((8, 8), (8, 1), dtype=torch.bfloat16).isnan().all()
        assert torch.ones(3).new_empty(1000).isnan().all()
        assert (torch.empty(3, dtype=torch.int32) == torch.iinfo(torch.int32).max).all()
    assert torch.are_deterministic_algorithms_enabled() == before
    with pytest.raises(ZeroDivisionError), poisoned():
        _ = 1 / 0
    assert torch.are_deterministic_algorithms_enabled() == before


def test_attention_grads_gives_the_references_names():
    slopes = torch.randn(2, requires_grad=True)

    def mod(score, b, h, i, j):
        return score + slopes[h] * (j - i)

    case = make_case((20, 30), head_dim=8)
    got = attention_grads(case, mod, mods.causal)
    assert_matches_reference(case, got, mod, mods.causal)
    assert list(got) == ["out", "lse", "dq", "dk", "dv", "slopes"]


def test_ids_are_the_mods_names():
    assert mod_name(mods.softcap(3.0)) == "softcap_mod"
    assert mod_name(None) == "none"


def test_sum_noise_is_the_root_sum_square_of_the_terms():
    bias = torch.zeros(2, dtype=torch.float64, requires_grad=True)

    def mod(score, b, h, i, j):
        return score + 3.0 * bias[h]

    case = make_case((40, 30), head_dim=8)
    q, k, v = case.leaves()
    scores = (q @ k.mT / 8**0.5).detach().requires_grad_(True)
    out, lse = scores.softmax(-1) @ v, scores.logsumexp(-1)
    (terms,) = torch.autograd.grad((out, lse), scores, (case.grad_out, case.grad_lse))
    want = float((3.0 * terms).square().sum((0, 2, 3)).max().sqrt())
    assert sum_noise(case, mod, captures={"bias": bias})["bias"] == pytest.approx(want, rel=0.5)
