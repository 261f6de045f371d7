"""Tabulated masks: lists equal brute force, and the bits of partial blocks give back every element."""

from __future__ import annotations

import pytest
import torch

from flexbwd.errors import MaskError
from flexbwd.sparsity import eager_mask
from flexbwd.sparsity.tabulate import pack_bits, tabulate_callable, tabulate_tensor, unpack_bits
from flexbwd.sparsity.tensors import BlockLists, IndexBase


def elements(
    lists: BlockLists, q_len: int, kv_len: int, block_size: tuple[int, int], by_kv: bool = False
) -> torch.Tensor:
    """The mask `[B, H, q_len, kv_len]` that the lists of one direction and the bits describe."""
    tensors, bits = (lists.kv_to_q, lists.bits.kv_to_q_slot) if by_kv else (lists.q_to_kv, lists.bits.q_to_kv_slot)
    blocks = unpack_bits(lists.bits.words, bits, block_size[1])
    B, H, rows = tensors.mask_block_cnt.shape
    padded = -(-q_len // block_size[0]) * block_size[0], -(-kv_len // block_size[1]) * block_size[1]
    out = torch.zeros(B, H, *padded, dtype=torch.bool)

    def place(b, h, row, other):
        i, j = (other, row) if by_kv else (row, other)
        return out[b, h, i * block_size[0] : (i + 1) * block_size[0], j * block_size[1] : (j + 1) * block_size[1]]

    for b, h, row in torch.cartesian_prod(torch.arange(B), torch.arange(H), torch.arange(rows)).tolist():
        for p in range(int(tensors.mask_block_cnt[b, h, row])):
            place(b, h, row, int(tensors.mask_block_idx[b, h, row, p]))[:] = blocks[b, h, row, p]
        for p in range(int(tensors.full_block_cnt[b, h, row])):
            place(b, h, row, int(tensors.full_block_idx[b, h, row, p]))[:] = True
    return out[:, :, :q_len, :kv_len]


def patchy(*shape: int) -> torch.Tensor:
    """Random elements, with empty and full regions."""
    mask = torch.rand(*shape, generator=torch.Generator().manual_seed(0)) < 0.5
    mask[..., :130, :150] = True
    mask[..., 140:, :100] = False
    return mask


def assert_describes(brute, lists, dense, block_size):
    want = brute.classes_of(dense, block_size)
    assert (brute.classes_in(lists.q_to_kv, want.shape[3]) == want).all()
    assert (brute.classes_in(lists.kv_to_q, want.shape[2]).transpose(2, 3) == want).all()
    for by_kv in (False, True):
        assert torch.equal(elements(lists, *dense.shape[2:], block_size, by_kv), dense)
    assert lists.bits.words.dtype == torch.int32
    assert lists.bits.q_to_kv_slot.shape == lists.q_to_kv.mask_block_idx.shape
    assert lists.bits.kv_to_q_slot.shape == lists.kv_to_q.mask_block_idx.shape


@pytest.mark.parametrize(
    "block_size", [(16, 16), (64, 128), (96, 96), (128, 64), (256, 256)], ids="{0[0]}x{0[1]}".format
)
@pytest.mark.parametrize("shape", [(300, 333), (2, 3, 300, 333), (2, 1, 300, 333)], ids=lambda s: "x".join(map(str, s)))
def test_a_dense_mask_comes_back_element_by_element(brute, shape, block_size):
    mask = patchy(*shape)
    B, H = (2, 3) if len(shape) == 4 else (None, None)
    lists = tabulate_tensor(mask, B, H, 300, 333, block_size)
    assert_describes(brute, lists, mask.expand(B or 1, H or 1, 300, 333), block_size)


def test_a_key_padding_mask_broadcasts_over_queries(brute):
    mask = torch.arange(200) < torch.tensor([[150], [0]])
    lists = tabulate_tensor(mask[:, None, None], 2, 2, 100, 200, 64)
    assert_describes(brute, lists, mask[:, None, None].expand(2, 2, 100, 200), (64, 64))
    assert lists.bits.words.shape[0] == 2  # one partial block per row of blocks, shared by the heads


def test_a_mask_without_partial_blocks_still_has_a_block_of_bits():
    lists = tabulate_tensor(torch.ones(100, 100, dtype=torch.bool), None, None, 100, 100, 64)
    assert lists.q_to_kv.mask_block_cnt.sum() == 0
    assert unpack_bits(lists.bits.words, lists.bits.q_to_kv_slot, 64).shape == (1, 1, 2, 1, 64, 64)


@pytest.mark.parametrize("kv_block", [16, 32, 48, 128])
def test_bits_lie_where_the_format_says(kv_block):
    blocks = torch.rand(5, 32, kv_block, generator=torch.Generator().manual_seed(1)) < 0.5
    words = torch.from_numpy(pack_bits(blocks.numpy()))
    assert words.shape == (5, 32, -(-kv_block // 32))
    j = torch.arange(kv_block)
    assert torch.equal((words[:, :, j // 32] >> (j % 32).int()) & 1, blocks.int())
    slots = torch.tensor([[4, 0], [2, 2]])
    assert torch.equal(unpack_bits(words, slots, kv_block), blocks[slots])


def test_bit_31_is_the_sign():
    words = pack_bits(torch.eye(32, dtype=torch.bool)[None].numpy())
    assert words[0, 31, 0] == -(2**31)
    assert words[0, 0, 0] == 1


def test_a_vectorisable_callable_equals_its_dense_mask(brute):
    lengths = torch.tensor([200, 90])

    def mask_mod(b, h, q_idx, kv_idx):
        return (q_idx >= kv_idx + h) & (kv_idx < lengths[b])

    q, kv = torch.arange(210)[:, None], torch.arange(190)
    dense = torch.stack([torch.stack([(q >= kv + h) & (kv < lengths[b]) for h in range(3)]) for b in range(2)])
    assert_describes(brute, tabulate_callable(mask_mod, 2, 3, 210, 190, 64), dense, (64, 64))


def test_a_callable_with_python_control_flow_is_called_element_by_element(brute):
    def mask_mod(b, h, q_idx, kv_idx):
        if q_idx.item() < 10:
            return True
        return (q_idx - kv_idx) % 3 == 0

    q, kv = torch.arange(100)[:, None], torch.arange(80)
    dense = ((q < 10) | ((q - kv) % 3 == 0))[None, None]
    assert_describes(brute, tabulate_callable(mask_mod, None, None, 100, 80, 64), dense, (64, 64))


def test_only_the_dimensions_a_callable_reads_are_evaluated(brute):
    lengths = torch.tensor([200, 90])
    lists = tabulate_callable(lambda b, h, q, k: k < lengths[b], 2, 64, 200, 200, 64)
    assert lists.q_to_kv.mask_block_cnt.stride()[:2] == (4, 0)
    dense = (torch.arange(200) < lengths[:, None])[:, None, None].expand(2, 64, 200, 200)
    assert_describes(brute, lists, dense, (64, 64))
    assert lists.bits.words.shape[0] == 4  # one ragged column of blocks, once for all heads


def test_a_callable_sees_global_coordinates(brute):
    base = IndexBase(1, 2, torch.tensor([100, 0], dtype=torch.int32), torch.tensor([0, 30, -50], dtype=torch.int32))
    q = (torch.arange(70) + base.q_base.repeat_interleave(64)[:70])[:, None]
    kv = torch.arange(130) + base.kv_base.repeat_interleave(64)[:130]
    dense = torch.stack([q + b >= kv * (h + 2) for b in (1, 2) for h in (0,)])[:, None]
    lists = tabulate_callable(lambda b, h, i, j: i + b >= j * h, 2, 1, 70, 130, 64, base)
    assert_describes(brute, lists, dense, (64, 64))


def test_strips_do_not_change_the_result(brute, monkeypatch):
    from flexbwd.sparsity import tabulate

    monkeypatch.setattr(tabulate, "_STRIP_ELEMENTS", 20_000)
    mask = patchy(2, 2, 300, 333)
    assert_describes(brute, tabulate_tensor(mask, 2, 2, 300, 333, 64), mask, (64, 64))


def _by_batch_with_if(b, h, q_idx, kv_idx):
    return True if b == 0 else bool(q_idx >= kv_idx)


@pytest.mark.parametrize(
    ("mask_mod", "B", "message"),
    [
        (lambda b, h, q, k: q - k, None, r"<lambda> yields torch.int32: it must yield a bool"),
        (lambda b, h, q, k: 1, None, r"<lambda> yields int: it must yield a bool"),
        (lambda b, h, q, k: {0: True}[int(q)], None, r"raised KeyError at b=0, h=0, q_idx=1, kv_idx=0"),
        (lambda b, h, q, k: torch.rand(()) > 0.5 + 0 * q, None, r"draws random numbers"),
        (lambda b, h, q, k: q >= k + b, None, r"B=None .* reads `b`: pass B=the number of batch entries"),
        (_by_batch_with_if, None, r"B=None .* _by_batch_with_if reads `b`"),
        (lambda b, h, q, k: [True, False][h], 2, r"H=None .* reads `h`: pass H=the number of query heads"),
    ],
    ids=["int-tensor", "int", "raises", "random", "reads-b", "reads-b-in-if", "reads-h-as-index"],
)
def test_wrong_callables_are_named(mask_mod, B, message):
    with pytest.raises(MaskError, match=message):
        tabulate_callable(mask_mod, B, None, 64, 64, 64)


def test_too_many_single_calls_are_refused(monkeypatch):
    monkeypatch.setattr(eager_mask, "MAX_CALLS", 1000)
    with pytest.raises(MaskError, match=r"would be called 4096 times, more than 1000: .* torch.where"):
        tabulate_callable(lambda b, h, q, k: True if q >= k else False, None, None, 64, 64, 64)  # noqa: SIM210


@pytest.mark.parametrize(
    ("mask", "sizes", "message"),
    [
        (torch.ones(64, 64), (None, None, 64, 64), "is torch.float32: it must be bool"),
        (torch.ones(64, 63).bool(), (None, None, 64, 64), r"shape \(64, 63\), which does not broadcast"),
        (torch.ones(2, 1, 64, 64).bool(), (None, None, 64, 64), r"\(2, 1, 64, 64\).*B=None"),
        (torch.ones(64).bool(), (None, None, 64, 64), r"shape \(64,\)"),
    ],
    ids=["float", "length", "batch", "one-dim"],
)
def test_wrong_tensors_are_named(mask, sizes, message):
    with pytest.raises(MaskError, match=message):
        tabulate_tensor(mask, *sizes, 64)
