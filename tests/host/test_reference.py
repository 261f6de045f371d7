"""The oracle against torch's own operator, against closed forms, and on the edges that break attention libraries."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from torch.nn.attention.flex_attention import BlockMask as TorchBlockMask

from flexbwd import create_block_mask
from flexbwd.errors import MaskError, ShapeError
from flexbwd.reference import attention_reference, kept_elements, reference_grads
from flexbwd.sparsity.tensors import BlockBits, BlockSparseTensors, IndexBase
from flexbwd.testing import assert_within_budget, make_case, torch_operator_grads


def causal(b, h, i, j):
    return j <= i


def head_and_batch_window(b, h, i, j):
    return (i - j <= 3 + 2 * h + b) & (j - i <= 5)


def some_rows_dead(b, h, i, j):
    return (i % 3 != 0) & (j <= i)


def tanh_mod(score, b, h, i, j):
    return 3.0 * torch.tanh(score / 3.0) + 0.1 * (i - j)


def agree(got, want):
    assert got.keys() == want.keys()
    for name in want:
        assert_within_budget(got[name], want[name], None, name)


@pytest.mark.parametrize("mask", [None, causal, head_and_batch_window], ids=["all", "causal", "by-head"])
@pytest.mark.parametrize("mod", [None, tanh_mod], ids=["plain", "tanh"])
@pytest.mark.parametrize(
    ("seqlens", "heads", "dims"),
    [((17, 17), 2, 8), ((9, 30), (6, 2), (8, 5)), ((30, 9), (7, 1), (3, 8)), ((1, 1), 1, 4)],
    ids=["square", "gqa3-wide", "mqa-tall", "one"],
)
def test_equals_torchs_operator(mask, mod, seqlens, heads, dims):
    case = make_case(seqlens, heads=heads, head_dim=dims, batch=2)
    agree(reference_grads(case, mod, mask), torch_operator_grads(case, mod, mask))


def test_captured_gradients_equal_torchs_operator():
    table = torch.randn(4, 40, dtype=torch.float64, requires_grad=True)
    slope = torch.randn(4, dtype=torch.float64, requires_grad=True)

    def mod(score, b, h, i, j):
        return score * slope[h] + table[h, i - j + 20]

    case = make_case((13, 20), heads=(4, 2), head_dim=8, batch=2)
    got = reference_grads(case, mod, causal)
    assert set(got) == {"out", "lse", "dq", "dk", "dv", "table", "slope"}
    agree(got, torch_operator_grads(case, mod, causal))


@pytest.mark.parametrize("only", ["out", "lse"])
def test_a_loss_of_one_output_equals_plain_autograd(only):
    case = make_case((6, 7), heads=1, head_dim=4)
    q, k, v = case.leaves()
    s = (q @ k.mT / 2).masked_fill(torch.ones(6, 7).triu(1).bool(), -math.inf)
    want_out, want_lse = s.softmax(-1) @ v, s.logsumexp(-1)
    q2, k2, v2 = case.leaves()
    out, lse = attention_reference(q2, k2, v2, mask_mod=causal)
    pick = (want_out * case.grad_out, out * case.grad_out) if only == "out" else (want_lse, lse)
    want = torch.autograd.grad(pick[0].sum(), (q, k, v), allow_unused=True)
    got = torch.autograd.grad(pick[1].sum(), (q2, k2, v2), allow_unused=True)
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(torch.zeros(()) if g is None else g, torch.zeros(()) if w is None else w)


@pytest.mark.parametrize("scale", [0.0, -0.7, 2.0])
def test_any_scale_is_meant(scale):
    case = make_case((5, 6), heads=1, head_dim=4)
    out, lse = attention_reference(case.query, case.key, case.value, scale=scale)
    s = scale * case.query @ case.key.mT
    torch.testing.assert_close(out, s.softmax(-1) @ case.value)
    torch.testing.assert_close(lse, s.logsumexp(-1))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("mod", [None, tanh_mod], ids=["plain", "tanh"])
def test_rows_without_keys_are_zero_and_have_no_gradient(dtype, mod):
    case = make_case((12, 12), heads=2, head_dim=8, dtype=dtype)
    got = reference_grads(case, mod, some_rows_dead)
    dead = torch.arange(12) % 3 == 0
    assert (got["out"][:, :, dead] == 0).all()
    assert (got["lse"][:, :, dead] == -math.inf).all()
    assert (got["dq"][:, :, dead] == 0).all()
    assert all(g.isfinite().all() for n, g in got.items() if n != "lse")


def test_a_problem_of_dead_rows_only_is_all_zeros():
    got = reference_grads(make_case((4, 5)), None, lambda b, h, i, j: j < 0)
    assert (got["lse"] == -math.inf).all()
    assert all((g == 0).all() for n, g in got.items() if n != "lse")


@pytest.mark.parametrize("seqlens", [(0, 5), (5, 0), (0, 0)], ids="q{0[0]}-kv{0[1]}".format)
def test_empty_lengths_give_empty_or_zero_results(seqlens):
    bias = torch.randn(2, dtype=torch.float64, requires_grad=True)
    got = reference_grads(make_case(seqlens, batch=2), lambda s, b, h, i, j: s + bias[h], causal)
    assert got["out"].shape == (2, 2, seqlens[0], 64)
    assert (got["out"] == 0).all()
    assert (got["lse"] == -math.inf).all()
    assert (got["bias"] == 0).all()


def test_what_a_mod_yields_under_the_mask_reaches_nothing():
    w = torch.randn(9, dtype=torch.float64, requires_grad=True)

    def mod(score, b, h, i, j):
        return score + w[j] * torch.sqrt(i - j)  # NaN where j > i

    got = reference_grads(make_case((9, 9), heads=1, head_dim=4), mod, causal)
    assert all(g.isfinite().all() for g in got.values())
    assert (got["w"] != 0).any()


def test_a_mod_that_says_minus_infinity_masks():
    w = torch.randn(9, dtype=torch.float64, requires_grad=True)

    def masking(score, b, h, i, j):
        return torch.where(j <= i, score + w[j] * torch.sqrt(i - j), -math.inf)

    def plain(score, b, h, i, j):
        return score + w[j] * torch.sqrt(i - j)

    case = make_case((9, 9), heads=1, head_dim=4)
    agree(reference_grads(case, masking), reference_grads(case, plain, causal))


# -- captures, however they are read ----------------------------------------------------------------------------------
def capture_forms():
    t = torch.randn(2, 4, 3, 11, dtype=torch.float64, requires_grad=True)
    yield "all", t, lambda s, b, h, i, j: s + t[b, h, 1, j]
    yield "chained", t, lambda s, b, h, i, j: s + t[b][h][1][j]
    yield "slice between", t, lambda s, b, h, i, j: s + t[b, :, 1, j][h]
    yield "ellipsis", t, lambda s, b, h, i, j: s + t[..., 1, j][b, h]
    yield "negative", t, lambda s, b, h, i, j: s + t[b, h, -2, j - 11]
    yield "transposed", t, lambda s, b, h, i, j: s + t.permute(3, 2, 1, 0)[j, 1, h, b]


@pytest.mark.parametrize("form", list(capture_forms()), ids=lambda f: f[0])
def test_every_way_to_index_a_capture_is_the_same(form):
    _, table, mod = form
    case = make_case((6, 11), heads=4, head_dim=4, batch=2)
    want = _bias_gradients(case, table, lambda t: t[:, :, 1].unsqueeze(2).expand(2, 4, 6, 11))
    agree(reference_grads(case, mod, captures={"bias": table}), want)


def test_scalar_expanded_reused_and_low_precision_captures_get_their_gradient():
    scalar = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
    row = torch.randn(11, dtype=torch.bfloat16, requires_grad=True)

    def mod(score, b, h, i, j):
        return score * scalar + scalar * row[j] * row[i]

    case = make_case((11, 11), heads=2, head_dim=4)
    got = reference_grads(case, mod)
    s = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
    r = row.detach().double().requires_grad_(True)
    q, k, v = case.leaves()
    scores = (q @ k.mT / 2) * s + s * r[None, :] * r[:, None]
    want = torch.autograd.grad(
        (scores.softmax(-1) @ v, scores.logsumexp(-1)), (q, s, r), (case.grad_out, case.grad_lse)
    )
    torch.testing.assert_close(got["dq"], want[0])
    torch.testing.assert_close(got["scalar"], want[1])
    torch.testing.assert_close(got["row"], want[2].bfloat16())


def test_detach_and_no_grad_inside_a_mod_stop_gradients():
    w = torch.randn(7, dtype=torch.float64, requires_grad=True)

    def detached(score, b, h, i, j):
        with torch.no_grad():
            frozen = w[j] * 2.0
        return score + w[i].detach() + frozen

    assert (reference_grads(make_case((7, 7)), detached)["w"] == 0).all()


def test_gradcheck_of_the_whole_reference():
    table = torch.randn(2, 9, dtype=torch.float64, requires_grad=True)

    def run(q, k, v, t):
        def mod(score, b, h, i, j):
            return torch.tanh(score) * t[h, i - j + 4] + score

        out, lse = attention_reference(q, k, v, mod, some_rows_dead)
        return out, lse.masked_fill(lse.isinf(), 0.0)

    assert torch.autograd.gradcheck(run, (*make_case((5, 4), heads=(2, 1), head_dim=3).leaves(), table))


# -- block masks ------------------------------------------------------------------------------------------------------
def test_lists_are_the_mask_and_entries_past_the_count_mean_nothing():
    partial_count = torch.tensor([[[1, 0, 2]]], dtype=torch.int32)
    partial = torch.tensor([[[[1, 77], [99, -5], [2, 0]]]], dtype=torch.int32)  # garbage past the count, any order
    full_count = torch.tensor([[[1, 0, 1]]], dtype=torch.int32)
    full = torch.tensor([[[[0, 88], [9, 9], [1, 9]]]], dtype=torch.int32)
    lists = BlockSparseTensors(partial_count, partial, full_count, full)
    mask = SimpleNamespace(q_to_kv=lists, block_size=(4, 8), mask_mod=causal, bits=None)
    want = torch.zeros(2, 2, 10, 19, dtype=torch.bool)
    below = torch.ones(10, 19).tril().bool()
    want[:, :, 0:4, 0:8] = True
    want[:, :, 0:4, 8:16] = below[0:4, 8:16]
    want[:, :, 8:10, 8:16] = True
    for block in (slice(16, 19), slice(0, 8)):
        want[:, :, 8:10, block] = below[8:10, block]
    assert torch.equal(kept_elements((2, 2, 10, 19), block_mask=mask), want)
    case = make_case((10, 19), batch=2, head_dim=4)
    agree(reference_grads(case, block_mask=mask), reference_grads(case, keep=want))


def test_torchs_block_mask_is_read_alike():
    count = torch.tensor([[[1, 2]]], dtype=torch.int32)
    index = torch.tensor([[[[0, 1], [1, 0]]]], dtype=torch.int32)
    theirs = TorchBlockMask.from_kv_blocks(count, index, BLOCK_SIZE=8, mask_mod=causal)
    want = torch.ones(12, 12).tril().bool()
    want[0:8, 8:] = False
    assert torch.equal(kept_elements((1, 1, 12, 12), block_mask=theirs), want.expand(1, 1, 12, 12))


def test_a_list_with_a_block_outside_the_keys_is_an_error():
    lists = BlockSparseTensors(torch.ones(1, 1, 1, dtype=torch.int32), torch.full((1, 1, 1, 1), 3, dtype=torch.int32))
    mask = SimpleNamespace(q_to_kv=lists, block_size=(8, 8), mask_mod=None, bits=None)
    with pytest.raises(MaskError, match="kv block 3, but kv length 17 has 3 blocks"):
        kept_elements((1, 1, 8, 17), block_mask=mask)


def test_bits_stand_in_for_mask_mod():
    dense = torch.rand(8, 40, generator=torch.Generator().manual_seed(1)) < 0.5
    words = torch.zeros(2, 8, 1, dtype=torch.int64)
    for block in range(2):
        for lane in range(20):
            words[block, :, 0] |= dense[:, block * 20 + lane].long() << lane
    slots = torch.tensor([[[[1, 0]]]], dtype=torch.int32)
    lists = BlockSparseTensors(
        torch.full((1, 1, 1), 2, dtype=torch.int32), torch.tensor([[[[1, 0]]]], dtype=torch.int32)
    )
    bits = BlockBits(words.to(torch.int32), slots, slots)
    mask = SimpleNamespace(q_to_kv=lists, block_size=(8, 20), mask_mod=None, bits=bits)
    assert torch.equal(kept_elements((1, 2, 8, 40), block_mask=mask), dense.expand(1, 2, 8, 40))


@pytest.mark.parametrize("block", [16, (32, 48), 128], ids=str)
def test_bits_of_a_tabulated_block_mask_are_its_elements(block):
    dense = torch.rand(2, 1, 70, 90, generator=torch.Generator().manual_seed(2)) < 0.1
    mask = create_block_mask(dense, 2, None, 70, 90, BLOCK_SIZE=block)
    assert mask.bits is not None
    assert torch.equal(kept_elements((2, 3, 70, 90), block_mask=mask), dense.expand(2, 3, 70, 90))
    assert torch.equal(kept_elements((2, 3, 70, 90), dense), dense.expand(2, 3, 70, 90))


def test_index_base_makes_a_slice_equal_to_the_whole():
    table = torch.randn(3, 4, 33, 33, dtype=torch.float64)

    def mod(score, b, h, i, j):
        return score + table[b, h, i, j]

    whole = make_case((32, 32), heads=4, head_dim=4, batch=3)
    q_base = torch.tensor([8, 16], dtype=torch.int32)  # local rows 8..15 are q block 1, so global 24..31
    kv_base = torch.tensor([0, 12], dtype=torch.int32)  # local keys 16.. are kv block 1, so global 28..
    base = IndexBase(1, 2, q_base, kv_base, (8, 16))
    cols = torch.cat([torch.arange(0, 16), torch.arange(28, 32)])
    rows = torch.cat([torch.arange(8, 16), torch.arange(24, 32)])
    q = whole.query[1:2, 2:3, rows]
    k, v = whole.key[1:2, 2:3, cols], whole.value[1:2, 2:3, cols]
    keep = torch.zeros(32, 32, dtype=torch.bool)
    keep[:, cols] = True
    want, want_lse = attention_reference(whole.query, whole.key, whole.value, mod, causal, keep=keep)
    out, lse = attention_reference(q, k, v, mod, causal, index_base=base)
    torch.testing.assert_close(out[0, 0], want[1, 2, rows])
    torch.testing.assert_close(lse[0, 0], want_lse[1, 2, rows])


# -- low precision ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_low_precision_rounds_like_eager_code(dtype):
    case = make_case((64, 64), heads=(4, 2), head_dim=32, dtype=dtype)
    want, got = reference_grads(case.double(), tanh_mod, causal), reference_grads(case, tanh_mod, causal)
    assert got["out"].dtype == dtype
    assert got["lse"].dtype == torch.float32
    eps = torch.finfo(dtype).eps
    for name in want:
        error = float((got[name].double() - want[name]).abs().max() / want[name].abs().max())
        assert eps / 100 < error < 4 * eps, (name, error)


def test_query_heads_must_divide():
    case = make_case((4, 4), heads=(3, 2))
    with pytest.raises(ShapeError, match="3 heads and key 2"):
        attention_reference(case.query, case.key, case.value)


def _bias_gradients(case, table, dense_bias):
    q, k, v = case.leaves()
    scores = q @ k.mT / math.sqrt(q.shape[-1]) + dense_bias(table)
    out, lse = scores.softmax(-1) @ v, scores.logsumexp(-1)
    grads = torch.autograd.grad((out, lse), (q, k, v, table), (case.grad_out, case.grad_lse))
    return {"out": out, "lse": lse, **dict(zip(("dq", "dk", "dv", "bias"), grads, strict=True))}
