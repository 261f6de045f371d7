"""score_mods and captured tensors on the CPU backend: values, gradients, what masks hide, and reuse between calls."""

from __future__ import annotations

import math

import pytest
import torch

from flexbwd import cpu
from flexbwd.plan import Needs


def param(*shape, dtype=torch.float64, seed=0):
    made = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return made.to(dtype).requires_grad_()


def causal(b, h, q, kv):
    return q >= kv


# name -> (captured tensors for heads 4, lengths (100, 130), batch 2; the mod)
MODS = {
    "softcap": ([], lambda s, b, h, q, kv: 5.0 * (s / 5.0).tanh()),
    "square": ([], lambda s, b, h, q, kv: s * s * 0.3),
    "half-square": ([], lambda s, b, h, q, kv: s * s * 0.5),
    "exp": ([], lambda s, b, h, q, kv: (s * 0.5).exp()),
    "scaled": ([], lambda s, b, h, q, kv: s * 0.25),
    "alibi": ([param(4)], lambda s, b, h, q, kv, slope: s + slope[h] * (kv - q).double() * 0.01),
    "scalar": ([param()], lambda s, b, h, q, kv, t: s * t[()]),
    "one-element": ([param(1)], lambda s, b, h, q, kv, t: s * t[0]),
    "by-batch": ([param(2)], lambda s, b, h, q, kv, t: s * t[b]),
    "by-row": ([param(100)], lambda s, b, h, q, kv, t: s + t[q]),
    "by-column": ([param(130)], lambda s, b, h, q, kv, t: s * t[kv]),
    "by-head-row": ([param(4, 100)], lambda s, b, h, q, kv, t: s + t[h, q]),
    "by-batch-column": ([param(2, 130)], lambda s, b, h, q, kv, t: s + t[b, kv]),
    "relative": ([param(230)], lambda s, b, h, q, kv, t: s + t[q - kv + 129]),
    "relative-by-head": ([param(4, 230)], lambda s, b, h, q, kv, t: s + t[h, q - kv + 129] * 0.5),
    "relative-bucket": ([param(4, 30)], lambda s, b, h, q, kv, t: s + t[h, (q - kv + 129) // 8]),
    "gated-relative": ([param(230), param(4)], lambda s, b, h, q, kv, t, g: s + t[q - kv + 129] * g[h]),
    "bias": ([param(2, 4, 100, 130)], lambda s, b, h, q, kv, t: s + t[b, h, q, kv]),
    "shared-bias": ([param(100, 130)], lambda s, b, h, q, kv, t: s + t[q, kv]),
    "shifted-bias": ([param(103, 137)], lambda s, b, h, q, kv, t: s + t[q + 3, kv + 7]),
    "negative-index": ([param(7, 130)], lambda s, b, h, q, kv, t: s + t[-1, kv] + t[-1, kv - 130]),
    "transposed-bias": ([param(130, 100)], lambda s, b, h, q, kv, t: s + t[kv, q]),
    "gather": ([param(4, 50)], lambda s, b, h, q, kv, t: s + t[h, (q * 7 + kv * kv) % 50]),
    "used-twice": ([param(130)], lambda s, b, h, q, kv, t: s + t[q] * t[kv]),
    "ignores-score": ([param(100, 130)], lambda s, b, h, q, kv, t: t[q, kv]),
    "ignores-score-gather": ([param(4, 50)], lambda s, b, h, q, kv, t: t[h, (q + kv) % 50]),
    "softcap-of-bias": ([param(4)], lambda s, b, h, q, kv, t: 3.0 * ((s + t[h]) / 3.0).tanh()),
    "minus-inf-bias": ([torch.where(torch.arange(130) % 3 > 0, 0.5, -math.inf)], lambda s, b, h, q, kv, t: s + t[kv]),
    "float32-capture": ([param(4, 100, dtype=torch.float32)], lambda s, b, h, q, kv, t: s + t[h, q]),
    "bf16-capture": ([param(4, dtype=torch.bfloat16)], lambda s, b, h, q, kv, t: s * t[h]),
    "int-capture": ([torch.arange(130, dtype=torch.int32)], lambda s, b, h, q, kv, t: s + (t[kv] % 5).double()),
}
TOLERANCE = {"float32-capture": 1e-6, "bf16-capture": 1e-2}


@pytest.mark.parametrize("name", MODS)
@pytest.mark.parametrize("tile", [None, 700], ids=["one-tile", "small-tiles"])
@pytest.mark.parametrize("mask", [None, causal], ids=["dense", "causal"])
def test_mod_and_capture_gradients_match_oracle(attention, name, tile, mask):
    captures, mod = MODS[name]
    attention(score=mod, captures=captures, mask=mask, tile=tile).check(rtol=TOLERANCE.get(name, 1e-10))


@pytest.mark.parametrize("name", ["relative-by-head", "bias", "gather", "alibi", "softcap"])
def test_mod_over_scattered_blocks_and_heads_matches_oracle(attention, name):
    captures, mod = MODS[name]
    table = torch.randint(0, 3, (2, 4, 4, 9), generator=torch.Generator().manual_seed(1))
    attention(score=mod, captures=captures, mask=causal, blocks=table).check()


@pytest.mark.parametrize("view", ["expanded", "transposed", "strided"])
def test_captures_with_any_strides_match_oracle(attention, view):
    base = torch.randn(100, 130, dtype=torch.float64)
    bias = {
        "expanded": base[:1].expand(100, -1),
        "transposed": base.mT.contiguous().mT,
        "strided": torch.stack([base, base], -1)[..., 0],
    }[view].requires_grad_()
    attention(score=lambda s, b, h, q, kv, t: s + t[q, kv], captures=[bias]).check()
    attention(score=lambda s, b, h, q, kv, t: s + t[(q * 3) % 100, kv], captures=[bias]).check()


@pytest.mark.parametrize("tile", [None, 700], ids=["one-tile", "small-tiles"])
def test_nan_where_the_mask_is_false_reaches_nothing(attention, tile):
    got = attention(
        score=lambda s, b, h, q, kv, w: s + w[kv] * (q - kv).double().sqrt(),
        captures=[param(130)],
        mask=causal,
        tile=tile,
    ).check()
    assert all(g.isfinite().all() for n, g in got.items() if n.startswith("d"))


def test_nan_jacobian_where_the_mask_is_false_reaches_nothing(attention):
    got = attention(
        score=lambda s, b, h, q, kv, w: s * (1.0 + (q - kv).double().sqrt() * 0.01) + w[kv] / (q - kv + 1).double(),
        captures=[param(130)],
        mask=causal,
    ).check()
    assert all(g.isfinite().all() for n, g in got.items() if n.startswith("d"))


def test_mask_reading_past_a_captured_tensor_is_clamped(attention):
    length = torch.tensor([40, 90], dtype=torch.int32)  # only b in {0, 1} are in range
    case = attention(mask=lambda b, h, q, kv, t: kv < t[q], mask_captures=[length])
    assert case.run()["out"].isfinite().all()


def test_score_keep_hides_elements_of_full_blocks(attention, tools):
    case = attention(
        score=lambda s, b, h, q, kv: tools.where(q >= kv, s * 2.0, -math.inf), blocks=torch.full((1, 1, 4, 9), 2)
    )
    assert case.operands().plan.mods.score_keep is not None
    case.check()


def test_score_keep_with_a_mask_matches_oracle(attention, tools):
    attention(
        score=lambda s, b, h, q, kv: tools.where((q + kv + h) % 3 > 0, s * 2.0, -math.inf), mask=causal, tile=700
    ).check()


def test_second_call_with_another_length_matches_oracle(attention):
    for lengths in ((64, 64), (128, 128)):
        table = param(lengths[0] * 2)
        offset = lengths[0]
        attention(
            lengths=lengths, score=lambda s, b, h, q, kv, t, n=offset: s + t[q - kv + n], captures=[table], mask=causal
        ).check()


def test_changed_lists_are_seen_by_the_next_call(attention, tools):
    case = attention(blocks=torch.full((1, 1, 4, 9), 2))
    lists = tools.lists_of(case.blocks)
    case.check(lists)
    case.blocks[..., 3:] = 0
    for old, new in zip(lists.q_to_kv, tools.lists_of(case.blocks).q_to_kv, strict=True):
        old.copy_(new)
    case.check(lists)


def test_changed_mask_capture_is_seen_by_the_next_call(attention, tools):
    length = torch.tensor([40, 90], dtype=torch.int32)
    case = attention(mask=lambda b, h, q, kv, t: kv < t[b], mask_captures=[length])
    lists, op = tools.lists_of(case.blocks), case.operands()
    op = op._replace(blocks=lists)
    for lengths in ((40, 90), (7, 130)):
        length.copy_(torch.tensor(lengths))
        out, _, _ = cpu.forward(op)
        tools.assert_close(out, case.oracle()["out"], 1e-10, f"out at {lengths}")


def test_captures_are_not_written_to(attention):
    captures, mod = MODS["ignores-score"]
    before = captures[0].detach().clone()
    attention(score=mod, captures=captures).run()
    assert torch.equal(captures[0], before)


def test_only_captures_that_need_a_gradient_get_one(attention):
    captures = [param(4), param(130)]
    case = attention(
        score=lambda s, b, h, q, kv, t, u: s * t[h] + u[kv],
        captures=captures,
        needs=Needs(query=False, key=False, value=False, captures=(False, True)),
    )
    got = case.run()
    assert [n for n, g in got.items() if n.startswith("d") and g is not None] == ["dc1"]
    want = case.oracle()["dc1"]
    assert (got["dc1"] - want).abs().max() < 1e-10
