"""Known failures 1, 5, 10, 13, 14: block lists of every form, rows and columns that keep nothing, ragged ends."""

from __future__ import annotations

import pytest
import torch

from flexbwd import BlockMask, create_block_mask, flex_attention
from flexbwd.errors import ModBoundsError
from flexbwd.testing import make_case
from tests.host.cases.oracle import causal, check, param, window

LENGTHS = "q{0[0]}-kv{0[1]}".format


def as_lists(mask_mod, lengths, form):
    """The mask as a user's own lists: full and partial blocks, all of them partial, or blocks with no mask_mod."""
    size = 32 if form == "lists only" else 128
    made = create_block_mask(mask_mod, None, None, *lengths, BLOCK_SIZE=size)
    lists = (made.kv_num_blocks, made.kv_indices, made.full_kv_num_blocks, made.full_kv_indices)
    if form == "all partial":
        blocks = made.to_dense()
        lists = (blocks.sum(-1, dtype=torch.int32), blocks.sort(dim=-1, descending=True, stable=True).indices.int())
    mod = None if form == "lists only" else mask_mod
    return BlockMask.from_kv_blocks(*lists, BLOCK_SIZE=size, mask_mod=mod, seq_lengths=lengths)


# -- 1: full and partial lists -----------------------------------------------------------------------------------------
@pytest.mark.parametrize("mask_mod", [causal, window], ids=lambda m: m.__name__)
@pytest.mark.parametrize("lengths", [(256, 256), (300, 300), (129, 400)], ids=LENGTHS)
@pytest.mark.parametrize("form", ["full and partial", "all partial", "lists only"])
def test_gradients_through_given_lists_match(mask_mod, lengths, form):
    case = make_case(lengths, heads=(4, 2), head_dim=64)
    check(case, block_mask=as_lists(mask_mod, lengths, form))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_gradients_through_given_lists_match_in_low_precision(dtype):
    check(make_case((300, 300), heads=(2, 1), dtype=dtype), block_mask=as_lists(causal, (300, 300), "full and partial"))


# -- 5: block sizes ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("size", [16, 64, (64, 128), (128, 64), 96, 256, "whole"], ids=str)
@pytest.mark.parametrize("lengths", [(200, 333), (333, 200), (64, 64), (7, 129)], ids=LENGTHS)
def test_any_block_size_matches(size, lengths):
    size = tuple(-(-n // 16) * 16 for n in lengths) if size == "whole" else size
    case = make_case(lengths, head_dim=16)
    for mask_mod in (causal, window):
        check(case, block_mask=create_block_mask(mask_mod, None, None, *lengths, BLOCK_SIZE=size))


# -- 10: rows and columns that keep nothing ----------------------------------------------------------------------------
DEAD = {
    "first rows": lambda b, h, i, j: (i >= 40) & (i >= j),
    "middle rows": lambda b, h, i, j: (i < 60) | (i >= 150),
    "whole q blocks": lambda b, h, i, j: (i < 64) | (i >= 192),
    "last rows": lambda b, h, i, j: i < 130,
    "all rows": lambda b, h, i, j: i < 0,
    "one row alone": lambda b, h, i, j: (i == 100) & (j == 3),
    "keys nobody reads": lambda b, h, i, j: (j < 30) | (j >= 230),
    "one batch entry": lambda b, h, i, j: (b == 1) & (i >= j),
    "one head": lambda b, h, i, j: (h != 2) & (i >= j),
}


@pytest.mark.parametrize("kind", DEAD)
@pytest.mark.parametrize("given", ["mask_mod", "block_mask", "tensor", "torch's block mask", "minus infinity"])
def test_rows_without_keys_are_zero_and_reach_nothing(kind, given):
    mask_mod, case = DEAD[kind], make_case((200, 260), heads=(4, 2), head_dim=16, batch=2)
    kept = torch.vmap(mask_mod)(*(c.flatten() for c in coordinates(case.shape))).view(case.shape)
    dead = ~kept.any(-1)
    case.grad_out[dead] = 1e300  # must not matter, nor overflow on its way
    bias = param(4)

    def score_mod(s, b, h, i, j):
        s = s + bias[h] * (i - j)
        return torch.where(mask_mod(b, h, i, j), s, -torch.inf) if given == "minus infinity" else s

    got = check_dead(case, score_mod, mask_mod, given)
    assert not got["out"][dead].any()
    assert (got["lse"][dead] == -torch.inf).all()
    assert not got["dq"][dead].any()
    unread = ~kept.any(-2).view(2, 2, 2, -1).any(2)  # by key head: query heads 0, 1 share the first
    assert not got["dk"][unread].any()
    assert not got["dv"][unread].any()


def coordinates(shape):
    return torch.meshgrid(*(torch.arange(n) for n in shape), indexing="ij")


def check_dead(case, score_mod, mask_mod, given):
    from torch.nn.attention.flex_attention import create_block_mask as torch_block_mask

    if given == "minus infinity":
        return check(case, score_mod, torch_too=False)
    if given == "mask_mod":
        return check(case, score_mod, mask_mod)
    if given == "tensor":
        kept = torch.vmap(mask_mod)(*(c.flatten() for c in coordinates(case.shape))).view(case.shape)
        return check(case, score_mod, kept)
    if given == "block_mask":
        return check(case, score_mod, block_mask=create_block_mask(mask_mod, *case.shape, BLOCK_SIZE=64))
    return check(case, score_mod, block_mask=torch_block_mask(mask_mod, *case.shape, device="cpu"))


def test_empty_lists_are_rows_without_keys():
    """Counts of zero in a user's lists: a row, a column, and everything."""
    case = make_case((96, 96), head_dim=16)
    index = torch.tensor([0, 2, 1]).expand(1, 1, 3, 3).int()
    for counts in ([0, 2, 2], [2, 0, 2], [0, 0, 0]):
        count = torch.tensor(counts, dtype=torch.int32).view(1, 1, 3)
        mask = BlockMask.from_kv_blocks(count, index, BLOCK_SIZE=32, seq_lengths=(96, 96))
        got = check(case, block_mask=mask)
        assert not got["dk"][:, :, 32:64].any()


# -- 13: order of the lists, garbage past the count --------------------------------------------------------------------
@pytest.mark.parametrize("order", ["descending", "shuffled"])
@pytest.mark.parametrize("mask_mod", [causal, window], ids=lambda m: m.__name__)
@pytest.mark.parametrize("garbage", [0, 4, 10**9, -1, 2**31 - 1], ids="garbage{}".format)
def test_lists_in_any_order_with_garbage_past_the_count_match(order, mask_mod, garbage):
    lengths = (170, 300)
    made = create_block_mask(mask_mod, None, None, *lengths, BLOCK_SIZE=32)
    generator = torch.Generator().manual_seed(3)
    pairs = []
    for count, index in ((made.kv_num_blocks, made.kv_indices), (made.full_kv_num_blocks, made.full_kv_indices)):
        mixed = torch.full((*index.shape[:3], index.shape[3] + 3), garbage, dtype=torch.int32)
        for row in range(index.shape[2]):
            n = int(count[0, 0, row])
            pick = torch.randperm(n, generator=generator) if order == "shuffled" else torch.arange(n).flip(0)
            mixed[0, 0, row, :n] = index[0, 0, row, pick]
        pairs += [count, mixed]
    given = BlockMask.from_kv_blocks(*pairs, BLOCK_SIZE=32, mask_mod=mask_mod, seq_lengths=lengths)
    case = make_case(lengths, heads=(4, 2), head_dim=16)
    check(case, block_mask=given)
    given.check()


def test_the_transpose_of_given_lists_lists_the_same_blocks():
    """dK and dV walk kv_to_q: NaN in an unlisted block of q or dO never reaches them."""
    case = make_case((128, 128), head_dim=16)
    count = torch.tensor([2, 1, 1, 0], dtype=torch.int32).view(1, 1, 4)
    index = torch.tensor([[3, 0, 9, 9], [1, 9, 9, 9], [3, 9, 9, 9], [9, 9, 9, 9]], dtype=torch.int32)
    mask = BlockMask.from_kv_blocks(count, index.view(1, 1, 4, 4), BLOCK_SIZE=32, seq_lengths=(128, 128))
    want = check(case, block_mask=mask)
    case.query[:, :, 96:], case.key[:, :, 64:96], case.value[:, :, 64:96] = (torch.nan,) * 3
    case.grad_out[:, :, 96:] = torch.nan
    q, k, v = case.leaves()
    dq, dk, dv = torch.autograd.grad(flex_attention(q, k, v, block_mask=mask, return_lse=True), (q, k, v),
                                     (case.grad_out, case.grad_lse))  # fmt: skip
    torch.testing.assert_close((dq, dk, dv), (want["dq"], want["dk"], want["dv"]), rtol=1e-12, atol=1e-12)


# -- 14: captured tensors at a ragged end ------------------------------------------------------------------------------
def fenced(values: torch.Tensor, fence: float) -> torch.Tensor:
    """The values as a view into a buffer that holds `fence` on either side."""
    flat = torch.full((values.numel() + 256,), fence, dtype=values.dtype)
    flat[128:-128] = values.flatten()
    return flat[128:-128].view(values.shape)


@pytest.mark.parametrize("lengths", [(129, 257), (1, 1), (100, 7), (65, 1000)], ids=LENGTHS)
@pytest.mark.parametrize("size", [16, 128, (64, 256)], ids=str)
def test_captured_tensors_end_where_the_lengths_end(lengths, size):
    case = make_case(lengths, heads=(2, 2), head_dim=16, batch=2)
    g = torch.Generator().manual_seed(4)
    q_ids = fenced(torch.randint(0, 3, (lengths[0],), generator=g), 1)
    kv_ids = fenced(torch.randint(0, 3, (2, lengths[1]), generator=g), 1)
    slope = fenced(torch.rand(2, lengths[0], generator=g, dtype=torch.float64), torch.nan).requires_grad_(True)

    def mask_mod(b, h, i, j):
        return (q_ids[i] >= kv_ids[b, j]) | (i == j)

    mask = create_block_mask(mask_mod, 2, None, *lengths, BLOCK_SIZE=size)
    assert torch.equal(mask.element_mask()[:, 0], (q_ids[:, None] >= kv_ids[:, None, :]) | torch.eye(*lengths).bool())
    check(case, lambda s, b, h, i, j: s * slope[h, i], block_mask=mask)
    check(case, mask_mod=mask_mod)


@pytest.mark.parametrize("size", [16, 64], ids=str)
@pytest.mark.parametrize("width", [1, 20, 70])
def test_an_index_guarded_by_the_mask_is_never_out_of_range(size, width):
    """A table of the window's width: every lane outside the window would read beside it, and is masked."""
    n = 70
    case, far = make_case((n, n), heads=2, head_dim=16), param(width + 256)
    far.data[:128] = far.data[128 + width :] = torch.nan  # beside the table, in its own memory
    table = far[128 : 128 + width].detach().requires_grad_(True)

    def mask_mod(b, h, i, j):
        return (i >= j) & (i - j < width)

    def score_mod(s, b, h, i, j):
        return s + table[i - j]

    check(case, score_mod, mask_mod, torch_too=False)  # torch reads masked lanes too, and raises
    blocks = create_block_mask(mask_mod, None, None, n, n, BLOCK_SIZE=size)
    check(case, score_mod, block_mask=blocks, torch_too=False)


def test_an_index_of_one_coordinate_that_runs_out_is_refused_and_its_clamped_form_is_right():
    n, weight = 70, param(70)
    case = make_case((n, n), heads=2, head_dim=16)
    with pytest.raises(ModBoundsError, match=r"weight has 70 entries .* clamp"):
        check(case, lambda s, b, h, i, j: s + weight[j + 1], lambda b, h, i, j: j + 1 < n)
    check(case, lambda s, b, h, i, j: s + weight[(j + 1).clamp(max=n - 1)], lambda b, h, i, j: j + 1 < n)
