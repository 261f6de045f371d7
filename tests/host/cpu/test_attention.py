"""The tiled CPU backend equals dense fp64 attention, whatever the shapes, lists and strides."""

from __future__ import annotations

import pytest
import torch

from flexbwd.plan import Needs
from flexbwd.sparsity.tensors import IndexBase


def causal(b, h, q, kv):
    return q >= kv


def banded(b, h, q, kv):
    return ((q - kv) < 40) & ((kv - q) < 25)


def per_head(b, h, q, kv):
    return (q + 3 * h) >= kv


def per_batch(b, h, q, kv, length):
    return kv < length[b]


SEQLENS = [(1, 1), (7, 64), (64, 100), (129, 129), (257, 100), (100, 257), (1, 130)]


@pytest.mark.parametrize("lengths", SEQLENS, ids="q{0[0]}-kv{0[1]}".format)
@pytest.mark.parametrize("tile", [None, 700], ids=["one-tile", "small-tiles"])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (7, 1)], ids="heads{0[0]}-{0[1]}".format)
def test_dense_attention_matches_oracle(attention, lengths, tile, heads):
    attention(lengths=lengths, tile=tile, heads=heads).check()


@pytest.mark.parametrize("mask", [causal, banded, per_head], ids=lambda m: m.__name__)
@pytest.mark.parametrize("tile", [None, 700], ids=["one-tile", "small-tiles"])
@pytest.mark.parametrize("lengths", SEQLENS, ids="q{0[0]}-kv{0[1]}".format)
def test_masked_attention_matches_oracle(attention, mask, tile, lengths):
    attention(mask=mask, tile=tile, lengths=lengths).check()


@pytest.mark.parametrize("leading", [(1, 1), (2, 1), (1, 4), (2, 4)], ids="b{0[0]}-h{0[1]}".format)
@pytest.mark.parametrize("tile", [None, 1500], ids=["one-tile", "small-tiles"])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (4, 1)], ids="heads{0[0]}-{0[1]}".format)
def test_lists_per_batch_and_head_match_oracle(attention, leading, tile, heads):
    table = torch.randint(0, 3, (*leading, 4, 9), generator=torch.Generator().manual_seed(1))
    table[..., 2, :] = 0  # a row of blocks that keeps nothing
    table[..., 5] = 0  # a column that nobody reads
    attention(blocks=table, mask=causal, tile=tile, heads=heads).check()


def test_neighbouring_heads_with_equal_lists_match_oracle(attention):
    table = torch.randint(0, 3, (1, 6, 4, 9), generator=torch.Generator().manual_seed(1))
    table[:, 1:5] = table[:, :1]
    attention(blocks=table, mask=causal, heads=(6, 2)).check()


def test_many_scattered_blocks_match_oracle(attention):
    table = torch.zeros(1, 1, 4, 40)
    table[..., ::2] = 1
    table[..., ::4] = 2
    attention(blocks=table, mask=causal, lengths=(120, 633)).check()


def test_lists_in_any_order_with_garbage_past_the_count_match_oracle(attention):
    table = torch.randint(0, 3, (1, 1, 4, 9), generator=torch.Generator().manual_seed(3))
    plain = attention(blocks=table, mask=causal).check()
    shuffled = attention(blocks=table, mask=causal, shuffle=True).check()
    assert all(torch.equal(plain[n], shuffled[n]) for n in plain)


def test_mask_that_reads_captured_lengths_matches_oracle(attention):
    attention(mask=per_batch, mask_captures=[torch.tensor([17, 0], dtype=torch.int32)]).check()


@pytest.mark.parametrize("block_size", [(16, 16), (96, 48), (256, 256), (128, 16)], ids="{0[0]}x{0[1]}".format)
def test_any_block_size_matches_oracle(attention, block_size):
    rows, columns = (-(-n // m) for n, m in zip((100, 130), block_size, strict=True))
    table = torch.ones(1, 1, rows, columns)
    table[..., 0, 0] = 2
    attention(mask=causal, blocks=table, block_size=block_size).check()


@pytest.mark.parametrize("lengths", [(0, 5), (5, 0), (0, 0)], ids="q{0[0]}-kv{0[1]}".format)
def test_empty_sequences_give_zeros(attention, lengths):
    got = attention(lengths=lengths).run()
    assert not got["out"].any()
    assert (got["lse"] == -torch.inf).all()
    assert not any(got[n].any() for n in ("dq", "dk", "dv"))


def test_rows_that_keep_nothing_are_zero_even_with_nan_upstream(attention):
    case = attention(mask=lambda b, h, q, kv: q >= kv + 20)
    case.tensors["do"][:, :, :20] = torch.nan
    case.tensors["dlse"][:, :, :20] = torch.nan
    got = case.run()
    assert not got["out"][:, :, :20].any()
    assert (got["lse"][:, :, :20] == -torch.inf).all()
    assert not got["dq"][:, :, :20].any()
    assert all(got[n].isfinite().all() for n in ("dq", "dk", "dv"))


def test_unlisted_blocks_are_never_read(attention):
    table = torch.randint(0, 3, (1, 1, 4, 9), generator=torch.Generator().manual_seed(1))
    table[..., [1, 4, 8]] = 0
    clean = attention(blocks=table, mask=causal).run()
    poisoned = attention(blocks=table, mask=causal)
    for block in (1, 4, 8):
        for name in "kv":
            poisoned.tensors[name][:, :, block * 16 : block * 16 + 16] = torch.nan
    got = poisoned.run()
    assert all(torch.equal(got[n], clean[n]) for n in clean)


def test_one_rows_blocks_are_not_read_by_another(attention):
    """Every row reads its own key block only: NaN in one block stays in its row."""
    case = attention(blocks=torch.eye(4)[None, None] * 2, lengths=(128, 64), tile=1 << 30)
    case.tensors["k"][:, :, 16:32] = torch.nan
    got = case.run()
    rows = got["out"].isnan().any(-1).any(0).any(0)
    assert rows[32:64].all()
    assert not rows[:32].any()
    assert not rows[64:].any()


@pytest.mark.parametrize("kind", ["bshd", "expanded-heads", "expanded-batch", "huge-stride", "transposed"])
def test_strides_do_not_matter_and_outputs_keep_them(attention, kind):
    case = attention(heads=(4, 4), dims=(16, 16), mask=causal)
    plain = {n: case.tensors[n].clone() for n in "qkv"}
    if kind == "expanded-heads":
        plain["k"] = plain["k"][:, :1].expand(-1, 4, -1, -1)
        plain["v"] = plain["v"][:, :1].expand(-1, 4, -1, -1)
    if kind == "expanded-batch":
        plain["k"] = plain["k"][:1].expand(2, -1, -1, -1)
    if kind == "bshd":
        plain = {n: t.transpose(1, 2).contiguous().transpose(1, 2) for n, t in plain.items()}
    if kind == "huge-stride":
        plain = {n: torch.nn.functional.pad(t, (0, 5, 0, 0, 0, 2))[:, :4, :, :16] for n, t in plain.items()}
    if kind == "transposed":
        plain = {n: t.mT.contiguous().mT for n, t in plain.items()}
    case.tensors.update(plain)
    got = case.check()
    for name, source in (("out", "q"), ("dq", "q"), ("dk", "k"), ("dv", "v")):
        if kind in ("bshd", "transposed"):
            assert got[name].stride() == plain[source].stride()


def test_logits_of_thirty_sigma_stay_finite(attention):
    got = attention(scale=30.0, mask=causal).check(rtol=1e-9)
    assert all(got[n].isfinite().all() for n in ("dq", "dk", "dv"))


@pytest.mark.parametrize("scale", [0.0, -0.5], ids=str)
def test_zero_and_negative_scales_match_oracle(attention, scale):
    attention(scale=scale, mask=causal).check()


def test_index_base_shifts_what_mods_see(attention):
    base = IndexBase(1, 2, torch.tensor([0, 64, -32, 7], dtype=torch.int32), torch.arange(9, dtype=torch.int32) * 3)
    bias = torch.randn(4, 8, dtype=torch.float64, requires_grad=True)
    attention(
        mask=lambda b, h, q, kv: (q + h) >= kv,
        score=lambda s, b, h, q, kv, t: s + (q - kv).double() * 0.01 + t[b, h],
        captures=[bias],
        base=base,
    ).check()


@pytest.mark.parametrize("needed", ["query", "key", "value"])
def test_gradients_nobody_needs_are_absent(attention, needed):
    needs = Needs(**{n: n == needed for n in ("query", "key", "value")})
    got = attention(mask=causal, needs=needs).check()
    assert [n for n in ("dq", "dk", "dv") if got[n] is not None] == ["d" + needed[0]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_low_precision_inputs_accumulate_in_fp32(attention, dtype):
    case = attention(dtype=dtype, mask=causal, lengths=(200, 300), with_dlse=False)
    got, want = case.run(), case.oracle()
    rounding = torch.finfo(dtype).eps
    for name in ("out", "dq", "dk", "dv"):
        assert got[name].dtype == dtype
        # 16 fp32 roundings in the sums, the output's own rounding, and delta, which reads the rounded output
        limit = (4 * rounding if dtype != torch.float32 else 16 * rounding) * want[name].abs().max()
        assert (got[name].double() - want[name]).abs().max() <= limit
    assert got["lse"].dtype == torch.float32
    assert (got["lse"].double() - want["lse"]).nan_to_num().abs().max() <= 1e-5


def test_two_runs_are_bitwise_equal(attention):
    table = torch.randn(4, 40, requires_grad=True)
    case = attention(
        dtype=torch.float32,
        mask=banded,
        score=lambda s, b, h, q, kv, t: s * 0.5 + t[h, (q * kv) % 40],
        captures=[table],
        lengths=(300, 300),
    )
    first, second = case.run(), case.run()
    assert all(torch.equal(first[n], second[n]) for n in first)


def test_more_than_65535_heads_match_oracle(attention):
    attention(batch=16400, heads=(4, 4), lengths=(3, 2), dims=(2, 3)).check()
