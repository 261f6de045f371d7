"""Lists from outside: kv-block lists and their faults, torch's BlockMask both ways, tabulated masks for torch."""

import inspect

import pytest
import torch
from torch.nn.attention import flex_attention as torch_flex

from flexbwd.errors import MaskError
from flexbwd.sparsity import BlockMask, IndexBase, and_masks, create_block_mask, from_torch_cached, noop_mask

I32 = torch.int32


def causal(b, h, q, k):
    return q >= k


def by_batch(b, h, q, k):
    return (q >= k) & (k >= b * 10)


def blocks(cnt, idx, **options):
    return BlockMask.from_kv_blocks(torch.tensor(cnt), torch.tensor(idx), **{"BLOCK_SIZE": 16} | options)


# -- kv-block lists ---------------------------------------------------------------------------------------------------
def test_order_and_garbage_past_the_counts_mean_nothing():
    tidy = blocks([2, 1, 0], [[0, 2, 0], [1, 0, 0], [0, 0, 0]])
    wild = blocks([2, 1, 0], [[2, 0, -7], [1, 10**9, 5], [-1, 99, 1]])
    assert torch.equal(tidy.element_mask(), wild.element_mask())
    assert torch.equal(tidy.kv_to_q.mask_block_cnt, wild.kv_to_q.mask_block_cnt)
    wild.check()


def test_both_directions_list_the_same_blocks():
    mask = blocks([2, 1, 2], [[2, 0], [1, 0], [0, 1]], seq_lengths=(48, 40))
    assert mask.kv_to_q.mask_block_cnt.tolist() == [[[2, 2, 1]]]
    assert mask.kv_to_q.mask_block_idx.tolist() == [[[[0, 2], [1, 2], [0, 0]]]]
    mask.check()


@pytest.mark.parametrize("dims", [2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_leading_dimensions_may_be_absent_and_int64_is_cast(dims, dtype):
    idx = torch.tensor([[0, 1], [1, 0]], dtype=dtype)[(None,) * (dims - 2)]
    mask = BlockMask.from_kv_blocks(torch.ones(idx.shape[:-1], dtype=dtype), idx, BLOCK_SIZE=16)
    assert mask.shape == (1, 1, 32, 32)
    assert {t.dtype for t in (*mask.q_to_kv[:2], *mask.kv_to_q[:2])} == {torch.int32}


def test_lengths_default_to_whole_blocks_as_torchs():
    theirs = torch_flex.BlockMask.from_kv_blocks(torch.ones(1, 1, 3, dtype=I32), torch.zeros(1, 1, 3, 5, dtype=I32))
    ours = BlockMask.from_kv_blocks(torch.ones(1, 1, 3, dtype=I32), torch.zeros(1, 1, 3, 5, dtype=I32))
    assert ours.shape == theirs.shape == (1, 1, 384, 640)


def test_partial_and_full_lists_share_leading_dimensions_by_broadcasting():
    ones, zeros = torch.ones(2, 1, 1, dtype=I32), torch.zeros(2, 1, 1, 1, dtype=I32)
    full = torch.ones(1, 3, 1, dtype=I32), torch.ones(1, 3, 1, 1, dtype=I32)
    mask = BlockMask.from_kv_blocks(ones, zeros, *full, BLOCK_SIZE=16, seq_lengths=(16, 32))
    assert mask.shape == (2, 3, 16, 32)
    assert mask.sparsity() == 0.0


def test_without_a_mask_mod_every_listed_element_is_kept():
    mask = blocks([1, 1], [[1], [0]], seq_lengths=(32, 32))
    want = torch.zeros(32, 32, dtype=torch.bool)
    want[:16, 16:] = want[16:, :16] = True
    assert torch.equal(mask.element_mask()[0, 0], want)


T = torch.tensor
FAULTS = {
    "not-a-tensor": (lambda a: a | {"kv_indices": [[0]]}, "kv_indices is a list"),
    "float": (lambda a: a | {"kv_indices": a["kv_indices"].float()}, "kv_indices has dtype torch.float32"),
    "bool-count": (lambda a: a | {"kv_num_blocks": a["kv_num_blocks"] > 0}, "kv_num_blocks has dtype torch.bool"),
    "shapes": (lambda a: a | {"kv_num_blocks": T([1])}, r"kv_num_blocks has shape \[1\] and kv_indices \[2, 2\]"),
    "vector": (lambda a: a | {"kv_num_blocks": T(1), "kv_indices": T([0])}, "must be"),
    "devices": (
        lambda a: a | {"kv_indices": a["kv_indices"].to("meta")},
        "kv_num_blocks is on cpu but kv_indices on meta",
    ),
    "count-too-large": (lambda a: a | {"kv_num_blocks": T([1, 3])}, r"kv_num_blocks\[0, 0, 1\] = 3.*room for 2"),
    "count-negative": (lambda a: a | {"kv_num_blocks": T([-1, 1])}, r"kv_num_blocks\[0, 0, 0\] = -1"),
    "index-too-large": (
        lambda a: a | {"kv_indices": T([[0, 1], [2, 0]])},
        r"kv_indices\[0, 0, 1, 0\] = 2.*2 kv blocks",
    ),
    "index-negative": (lambda a: a | {"kv_indices": T([[0, 1], [-1, 0]])}, r"kv_indices\[0, 0, 1, 0\] = -1"),
    "twice": (
        lambda a: a | {"kv_num_blocks": T([1, 2]), "kv_indices": T([[0, 1], [1, 1]])},
        r"kv_indices\[0, 0, 1\] lists kv block 1 more than once",
    ),
    "half-full": (
        lambda a: a | {"full_kv_num_blocks": T([1, 0])},
        "full_kv_num_blocks is given without full_kv_indices",
    ),
    "other-half": (lambda a: a | {"full_kv_indices": T([[1], [0]])}, "full_kv_indices is given without full_kv_num"),
    "full-rows": (
        lambda a: a | {"full_kv_num_blocks": T([1]), "full_kv_indices": T([[1]])},
        r"kv_num_blocks has shape \[1, 1, 2\] and full_kv_num_blocks \[1, 1, 1\]",
    ),
    "full-out-of-range": (
        lambda a: a | {"full_kv_num_blocks": T([1, 0]), "full_kv_indices": T([[7], [0]])},
        r"full_kv_indices\[0, 0, 0, 0\] = 7",
    ),
    "partial-and-full": (
        lambda a: a | {"full_kv_num_blocks": T([0, 1]), "full_kv_indices": T([[0], [1]])},
        r"kv block 1 of q block 1 \(batch 0, head 0\) is listed in both",
    ),
    "block-size": (lambda a: a | {"BLOCK_SIZE": 24}, "BLOCK_SIZE=24.*multiple of 16"),
    "block-pair": (lambda a: a | {"BLOCK_SIZE": (16, 16, 16)}, "BLOCK_SIZE="),
    "block-none": (lambda a: a | {"BLOCK_SIZE": None}, "BLOCK_SIZE=None"),
    "rows": (lambda a: a | {"seq_lengths": (64, 32)}, "2 rows but seq_lengths=.64, 32.*make 4"),
    "lengths": (lambda a: a | {"seq_lengths": 32}, "seq_lengths=32"),
    "length-negative": (lambda a: a | {"seq_lengths": (32, -1)}, "seq_lengths"),
    "mask-mod": (lambda a: a | {"mask_mod": torch.ones(2)}, "mask_mod is a Tensor"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_in_the_lists_is_named(name):
    spoil, message = FAULTS[name]
    good = {"kv_num_blocks": T([1, 1]), "kv_indices": T([[0, 1], [1, 0]]), "BLOCK_SIZE": 16}
    BlockMask.from_kv_blocks(**good)
    with pytest.raises(MaskError, match=message):
        BlockMask.from_kv_blocks(**spoil(good))


# -- torch ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("lengths", [(256, 256), (100, 300), (300, 100), (1, 257)], ids="q{0[0]}-kv{0[1]}".format)
@pytest.mark.parametrize("block", [64, (128, 64), 48])
@pytest.mark.parametrize("separate_full", [True, False], ids=["full", "no-full"])
def test_torch_masks_come_over_and_go_back_equal(lengths, block, separate_full):
    options = {"device": "cpu", "BLOCK_SIZE": block}
    if not separate_full:
        if "separate_full_blocks" not in inspect.signature(torch_flex.create_block_mask).parameters:
            pytest.skip("this torch always lists full blocks apart")
        options["separate_full_blocks"] = False
    theirs = torch_flex.create_block_mask(by_batch, 2, None, *lengths, **options)
    ours = BlockMask.from_torch(theirs)
    back = ours.to_torch()
    assert ours.shape == theirs.shape == back.shape
    assert (ours.mask_mod, back.mask_mod) == (by_batch, by_batch)
    assert back.BLOCK_SIZE == theirs.BLOCK_SIZE
    for name in ("kv_num_blocks", "full_kv_num_blocks", "q_num_blocks", "full_q_num_blocks"):
        assert same(getattr(back, name), getattr(theirs, name))
    for kind in ("kv", "full_kv", "q", "full_q"):
        cnt, want, got = (
            getattr(m, f"{kind}_{n}") for m, n in ((theirs, "num_blocks"), (theirs, "indices"), (back, "indices"))
        )
        assert same(got, want, cnt)
    ours.check()
    assert torch.equal(ours.element_mask(), torch_flex.create_mask(by_batch, 2, None, *lengths, device="cpu"))


def same(x, y, cnt=None):
    if x is None or y is None:
        return x is y
    inside = torch.ones_like(x, dtype=torch.bool) if cnt is None else torch.arange(x.shape[-1]) < cnt[..., None]
    return x.shape == y.shape and x.dtype == y.dtype and torch.equal(x[inside], y[inside])


def test_lists_in_any_order_keep_it_in_torch():
    ours = blocks([2, 1], [[1, 0], [1, 77]], seq_lengths=(32, 32))
    theirs = ours.to_torch()
    assert theirs.kv_indices.tolist() == [[[[1, 0], [1, 0]]]]
    assert torch.equal(theirs.to_dense(), ours.to_dense())


def test_torchs_mask_without_a_mask_mod_keeps_all_listed():
    theirs = torch_flex.BlockMask.from_kv_blocks(T([[[1]]], dtype=I32), T([[[[0]]]], dtype=I32))
    ours = BlockMask.from_torch(theirs)
    assert ours.mask_mod is None
    assert ours.to_torch().mask_mod is torch_flex.noop_mask


def test_torchs_lists_without_batch_come_over():
    theirs = torch_flex.BlockMask.from_kv_blocks(T([1], dtype=I32), T([[0]], dtype=I32), mask_mod=causal)
    assert BlockMask.from_torch(theirs).shape == (1, 1, 128, 128)


TABULATED = {
    "dense": lambda: create_block_mask(
        torch.rand(2, 3, 100, 70, generator=seeded()) > 0.3, 2, 3, 100, 70, BLOCK_SIZE=(16, 48)
    ),
    "shared": lambda: create_block_mask(torch.rand(100, 70, generator=seeded()) > 0.3, None, 3, 100, 70, BLOCK_SIZE=64),
    "full-blocks": lambda: create_block_mask(torch.ones(64, 64).tril() > 0, None, None, 64, 64, BLOCK_SIZE=16),
    "nothing": lambda: create_block_mask(torch.zeros(64, 64) > 0, None, None, 64, 64, BLOCK_SIZE=16),
    "sliced": lambda: create_block_mask(by_batch, 3, None, 64, 64, BLOCK_SIZE=16)[1:, :, [2, 0, 1]],
    "pinned": lambda: create_block_mask(by_batch, 3, None, 64, 64, BLOCK_SIZE=16)[2, 0, 1:],
    "combined": lambda: create_block_mask(and_masks(by_batch, noop_mask), 3, None, 64, 64, BLOCK_SIZE=16),
    "based": lambda: create_block_mask(
        by_batch,
        2,
        None,
        32,
        64,
        BLOCK_SIZE=16,
        index_base=IndexBase(1, 0, T([16, 32], dtype=I32), block_size=(16, 16)),
    ),
}


def seeded():
    return torch.Generator().manual_seed(3)


@pytest.mark.parametrize("name", TABULATED)
def test_torch_reads_the_same_elements_from_our_mask_mods(name):
    ours = TABULATED[name]()
    batch, heads, *lengths = ours.shape
    theirs = ours.to_torch()
    got = torch_flex.create_mask(theirs.mask_mod, batch, heads, *lengths, device="cpu")
    assert torch.equal(got, ours.element_mask())
    assert torch.equal(theirs.to_dense(), ours.to_dense())


def test_a_tabulated_mask_goes_through_torchs_operator():
    ours = TABULATED["dense"]()
    q, k, v = (torch.randn(2, 3, n, 8, dtype=torch.float64, generator=seeded()) for n in (100, 70, 70))
    flex = torch.compile(torch_flex.flex_attention, backend="eager", fullgraph=True)
    got = flex(q, k, v, block_mask=ours.to_torch())
    keep = ours.element_mask()
    want = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=keep)
    torch.testing.assert_close(got[keep.any(-1)], want[keep.any(-1)])


TORCH_FAULTS = {
    "type": (lambda: torch.ones(2), "got a Tensor"),
    "placeholder": (lambda: torch_flex._create_empty_block_mask(torch.ones(1), torch.ones(1)), "block_mask=None"),
    "sliced": (lambda: torch_block_mask()[0], "Convert first and slice then"),
    "sliced-rows": (lambda: with_mod(torch_block_mask()[:, :, :1]), "sliced along q"),
    "block-size": (lambda: torch_block_mask(BLOCK_SIZE=40), "multiple of 16"),
}


def torch_block_mask(**options):
    return torch_flex.create_block_mask(causal, None, None, 256, 256, device="cpu", **options)


def with_mod(mask):
    mask.mask_mod = causal
    return mask


@pytest.mark.parametrize("name", TORCH_FAULTS)
def test_a_torch_mask_that_lost_its_meaning_is_refused(name):
    make, message = TORCH_FAULTS[name]
    with pytest.raises(MaskError, match=message):
        BlockMask.from_torch(make())


def test_a_torch_mask_met_again_is_not_converted_again():
    theirs = torch_block_mask()
    first = from_torch_cached(theirs)
    assert from_torch_cached(theirs) is first
    theirs.mask_mod = by_batch
    second = from_torch_cached(theirs)
    assert second.mask_mod is by_batch
    theirs.kv_num_blocks.zero_()
    assert int(from_torch_cached(theirs).q_to_kv.mask_block_cnt.sum()) == 0


def test_a_torch_mask_enters_a_compiled_graph():
    theirs = torch_block_mask()

    @torch.compile(backend="eager", fullgraph=True)
    def work(x, mask):
        ours = from_torch_cached(mask)
        return x + ours.kv_to_q.mask_block_cnt.sum() + ours.seq_lengths[0]

    assert int(work(torch.zeros(1), theirs)) == int(theirs.q_num_blocks.sum()) + 256


def test_a_torch_mask_that_cannot_be_traced_comes_over_as_bits():
    def by_flag(b, h, q, k):
        return (q >= k) if flags[int(q) % 2] else (k < 30)

    flags = [True, False]
    lists = T([[[1, 1]]], dtype=I32), T([[[[0, 1], [1, 0]]]], dtype=I32)
    ours = BlockMask.from_torch(torch_flex.BlockMask.from_kv_blocks(*lists, BLOCK_SIZE=32, mask_mod=by_flag))
    assert ours.bits is not None
    rows, keys = torch.arange(64)[:, None], torch.arange(64)
    want = torch.where(rows % 2 == 0, rows >= keys, keys < 30) & ((rows < 32) == (keys < 32))
    assert torch.equal(ours.element_mask()[0, 0], want)
