"""Checks: lists against mask_mod, masks against the call they are used in, arguments of create_block_mask."""

import pytest
import torch
from torch.nn.attention import flex_attention as torch_flex

from flexbwd.errors import MaskError, ModDtypeError, OptionError
from flexbwd.sparsity import BlockMask, create_block_mask, validate_for
from flexbwd.sparsity.tensors import BlockLists

I32 = torch.int32


def causal(b, h, q, k):
    return q >= k


def by_batch(b, h, q, k):
    return k >= b * 10


def by_head(b, h, q, k):
    return k >= h * 10


def untraceable(b, h, q, k):
    return (q >= k) if int(q) % 2 else (k <= q)


# -- lists against the mask -------------------------------------------------------------------------------------------
def causal_lists(full=((), (0,), (0, 1)), partial=((0,), (1,), (2,)), mask_mod=causal):
    """The lists of a causal 3 x 3 mask of 16-element blocks, unless told otherwise."""
    tensors = []
    for rows in (partial, full):
        tensors.append(torch.tensor([[[len(r) for r in rows]]], dtype=I32))
        tensors.append(torch.tensor([[[[*r, *(9,) * (3 - len(r))] for r in rows]]], dtype=I32))
    return BlockMask.from_kv_blocks(*tensors, BLOCK_SIZE=16, mask_mod=mask_mod, seq_lengths=(48, 40))


@pytest.mark.parametrize("mask_mod", [causal, untraceable, None], ids=["traced", "tabulated", "lists-only"])
def test_right_lists_pass(mask_mod):
    causal_lists(mask_mod=mask_mod).check()


def test_more_blocks_than_the_mask_keeps_are_no_fault():
    causal_lists(partial=((0, 2), (1,), (2, 1)), full=((), (0,), (0,))).check()


FAULTS = {
    "dropped": ({"full": ((), (), (0, 1))}, r"q_block 1, kv_block 0\) is not listed.*causal\) keeps all"),
    "dropped-some": ({"partial": ((0,), (1,), ())}, r"q_block 2, kv_block 2\) is not listed.*keeps some"),
    "not-full": (
        {"partial": ((0,), (), (2,)), "full": ((), (0, 1), (0, 1))},
        r"q_block 1, kv_block 1\) is listed as full.*only some",
    ),
    "not-at-all": ({"full": ((2,), (0,), (0, 1))}, r"q_block 0, kv_block 2\) is listed as full.*none"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_the_first_wrong_block_is_named(name):
    wrong, message = FAULTS[name]
    with pytest.raises(MaskError, match=r"block \(batch 0, head 0, " + message):
        causal_lists(**wrong).check()


def test_the_first_wrong_batch_and_head_are_named():
    good = create_block_mask(by_head, 2, 3, 64, 64, BLOCK_SIZE=16)
    lists = [t.clone() for t in good.q_to_kv]
    lists[2][1, 2, 3] = 0
    with pytest.raises(MaskError, match="batch 1, head 2, q_block 3, kv_block 2"):
        BlockMask.from_kv_blocks(*lists, BLOCK_SIZE=16, mask_mod=by_head, seq_lengths=(64, 64)).check()


def test_directions_that_disagree_are_a_fault():
    good = causal_lists()
    wrong = BlockLists(good.q_to_kv, good.kv_to_q._replace(mask_block_cnt=torch.zeros_like(good.kv_to_q[0])))
    with pytest.raises(MaskError, match=r"q_block 0, kv_block 0\) is partial in q_to_kv but not listed in kv_to_q"):
        BlockMask(wrong, (16, 16), (48, 40), causal).check()


@pytest.mark.parametrize("field", ["q_to_kv_slot", "kv_to_q_slot"])
@pytest.mark.parametrize("shift", [1, 1000])
def test_bits_that_belong_to_another_block_are_a_fault(field, shift):
    good = create_block_mask(
        torch.rand(64, 64, generator=torch.Generator().manual_seed(0)) > 0.5, None, None, 64, 64, BLOCK_SIZE=16
    )
    good.check()
    bits = good.bits._replace(**{field: getattr(good.bits, field) + shift})
    with pytest.raises(MaskError, match=r"q_block 0, kv_block 0\) has bits at slot"):
        BlockMask(BlockLists(good.q_to_kv, good.kv_to_q, bits), (16, 16), (64, 64)).check()


# -- use in a call ----------------------------------------------------------------------------------------------------
def test_a_fitting_mask_passes():
    validate_for(create_block_mask(causal, None, None, 64, 96), 5, 7, 64, 96, "cpu")
    validate_for(create_block_mask(causal, 2, 3, 64, 96), 2, 3, 64, 96)
    validate_for(create_block_mask(by_batch, 1, 3, 64, 96), 1, 3, 64, 96, torch.device("cpu"))
    validate_for(create_block_mask(by_batch, 2, None, 64, 96)[1], 6, 3, 64, 96)


MISUSES = {
    "longer-mask": (lambda: create_block_mask(causal, None, None, 4096, 4096), r"\(4096, 4096\).*adjust\(64, 96\)"),
    "shorter-mask": (lambda: create_block_mask(causal, None, None, 64, 64), r"\(64, 64\).*\(64, 96\); create one for"),
    "batch": (lambda: create_block_mask(causal, 3, None, 64, 96), "B=3 batch, but query has 2; create it with B=2"),
    "heads": (lambda: create_block_mask(causal, 2, 2, 64, 96), "H=2 query heads, but query has 4; create it with H=4"),
    "one-batch": (lambda: create_block_mask(by_batch, 1, None, 64, 96), "by_batch.*reads `b`.*create it with B=2"),
    "one-head": (lambda: create_block_mask(by_head, None, 1, 64, 96), "by_head.*reads `h`.*create it with H=4"),
    "torch-none": (
        lambda: BlockMask.from_torch(torch_flex.create_block_mask(by_batch, None, None, 64, 96, device="cpu")),
        "reads `b`.*create it with B=2",
    ),
    "device": (lambda: create_block_mask(causal, None, None, 64, 96).to("meta"), "on meta but query is on cpu"),
}


@pytest.mark.parametrize("name", MISUSES)
def test_a_mask_of_another_problem_says_what_to_do(name):
    make, message = MISUSES[name]
    with pytest.raises(MaskError, match=message):
        validate_for(make(), 2, 4, 64, 96, "cpu")


def test_shared_lists_with_a_mask_that_reads_b_are_a_users_choice():
    lists = torch.ones(1, 1, 1, dtype=I32), torch.zeros(1, 1, 1, 1, dtype=I32)
    validate_for(BlockMask.from_kv_blocks(*lists, BLOCK_SIZE=64, mask_mod=by_batch), 3, 1, 64, 64)


# -- create_block_mask ------------------------------------------------------------------------------------------------
ARGUMENTS = {
    "reads-b": ({"mask_mod": by_batch}, MaskError, "B=None.*reads `b`"),
    "reads-h": ({"mask_mod": by_head}, MaskError, "H=None.*reads `h`"),
    "not-callable": ({"mask_mod": 3}, MaskError, "mask_mod is a int.*noop_mask"),
    "none": ({"mask_mod": None}, MaskError, "mask_mod is a NoneType"),
    "float-tensor": ({"mask_mod": torch.ones(32, 48)}, MaskError, "bool"),
    "tensor-shape": ({"mask_mod": torch.ones(32, 47) > 0}, MaskError, "broadcast"),
    "tensor-batch": ({"mask_mod": torch.ones(2, 1, 32, 48) > 0}, MaskError, "B=None"),
    "block-size": ({"BLOCK_SIZE": 100}, MaskError, "BLOCK_SIZE=100.*multiple of 16"),
    "block-string": ({"BLOCK_SIZE": "128"}, MaskError, "BLOCK_SIZE='128'"),
    "length": ({"Q_LEN": -1}, MaskError, "Q_LEN=-1"),
    "length-float": ({"KV_LEN": 4.0}, MaskError, "KV_LEN=4.0"),
    "batch": ({"B": True}, MaskError, "B=True"),
    "compile": ({"_compile": True}, OptionError, "_compile=True of torch's.*Leave it out"),
    "full": ({"separate_full_blocks": False}, OptionError, "separate_full_blocks=False"),
    "unknown": ({"blocksize": 64}, OptionError, "no option blocksize=64; it takes"),
    "index-base": ({"index_base": (1, 2)}, OptionError, "index_base is a tuple"),
    "int-mask": ({"mask_mod": lambda b, h, q, k: q - k}, ModDtypeError, "bool"),
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_a_bad_argument_is_named(name):
    wrong, kind, message = ARGUMENTS[name]
    arguments = {"mask_mod": causal, "B": None, "H": None, "Q_LEN": 32, "KV_LEN": 48} | wrong
    with pytest.raises(kind, match=message):
        create_block_mask(**arguments)


def test_a_tensor_has_no_index_base():
    from flexbwd.sparsity import IndexBase

    with pytest.raises(OptionError, match="index_base"):
        create_block_mask(torch.ones(4, 4) > 0, None, None, 4, 4, index_base=IndexBase())


def test_the_device_is_that_of_captured_tensors():
    table = torch.arange(64)
    assert create_block_mask(lambda b, h, q, k: table[q] >= k, None, None, 64, 64).device == table.device


def test_lists_can_be_checked_as_they_are_given():
    def causal(b, h, q_idx, kv_idx):
        return q_idx >= kv_idx

    good = (torch.tensor([1, 1]), torch.tensor([[0, 1], [1, 0]]), torch.tensor([0, 1]), torch.tensor([[0, 0], [0, 0]]))
    BlockMask.from_kv_blocks(*good, BLOCK_SIZE=16, mask_mod=causal, check=True)
    with pytest.raises(MaskError, match="q_block 1, kv_block 0"):
        BlockMask.from_kv_blocks(*good[:2], BLOCK_SIZE=16, mask_mod=causal, check=True)
    BlockMask.from_kv_blocks(*good[:2], BLOCK_SIZE=16, mask_mod=causal)
