"""flex_attention on CUDA tensors, through the Hopper kernels, against the fp64 oracle; outputs pre-filled with NaN."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from flexbwd import AuxRequest, BlockMask, and_masks, create_block_mask, flex_attention, mods
from flexbwd.errors import UnsupportedError
from flexbwd.mods.registry import zoo
from flexbwd.sparsity import IndexBase
from flexbwd.testing import Case, assert_matches_reference, attention_grads, captured_parameters, make_case

pytestmark = pytest.mark.gpu


def problem(seqlens=(256, 256), heads=(2, 2), head_dim=64, dtype=torch.bfloat16, **rest: Any) -> Case:
    return make_case(seqlens, heads, head_dim, dtype, **rest).on("cuda")


def check(case: Case, score_mod: Any = None, mask_mod: Any = None, **options: Any) -> dict[str, Tensor]:
    """All outputs and gradients of one call on the kernels are within the budget of their dtype."""
    block_mask = options.pop("block_mask", None)
    captures = options.pop("captures", None)
    got = attention_grads(
        case, score_mod, mask_mod, captures=captures, block_mask=block_mask, backend="sm90", **options
    )
    mask = {"block_mask": block_mask, "index_base": options.get("index_base")}
    assert_matches_reference(case, got, score_mod, mask_mod, captures=captures, **mask)
    return got


def to_gpu(x: Any) -> Any:
    """Tensors of a mod's arguments on the GPU, as leaves where they were leaves."""
    if isinstance(x, Tensor):
        return x.detach().cuda().requires_grad_(x.requires_grad)
    return type(x)(map(to_gpu, x)) if isinstance(x, (list, tuple)) else x


def is_refused(mod: Any) -> bool:
    """Does the mod capture a tensor whose gradient the kernels do not give?"""
    return bool(captured_parameters(mod))


def check_example(case: Case, entry: Any, mask: Any) -> None:
    mod = example(entry, *case.shape)
    mods = (mod, mask) if entry.kind == "score" else (None, mod)
    if is_refused(mod):
        with pytest.raises(UnsupportedError, match=r"requires? grad"):
            check(case, *mods)
    else:
        check(case, *mods)


def example(entry: Any, *sizes: int) -> Any:
    """A mod of the zoo whose tensors, those that its factory makes included, lie on the GPU."""
    arguments = to_gpu(entry.example_arguments(*sizes))
    with torch.device("cuda"):
        return entry.instantiate(arguments)


def causal(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return i >= j


def softcap(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return 5.0 * torch.tanh(s / 5.0)


LENGTHS = [(1, 257), (7, 64), (64, 7), (100, 129), (129, 100), (257, 1000), (1000, 257), (1025, 1025)]
DIMS = [16, 64, 72, 80, 96, 104, 112, 128, 144, 192, (192, 128), (64, 128), (128, 64), 256, 20]
FEW_DIMS = [64, 128, (192, 128), 256]


# -- lengths, head dims, heads -----------------------------------------------------------------------------------------
@pytest.mark.parametrize("mask", [None, causal], ids=["dense", "causal"])
@pytest.mark.parametrize("head_dim", DIMS, ids=str)
@pytest.mark.parametrize("seqlens", LENGTHS, ids="q{0[0]}-kv{0[1]}".format)
def test_no_mods(seqlens, head_dim, mask):
    check(problem(seqlens, (4, 2), head_dim), None, mask)


@pytest.mark.parametrize("head_dim", FEW_DIMS, ids=str)
@pytest.mark.parametrize("seqlens", LENGTHS, ids="q{0[0]}-kv{0[1]}".format)
def test_mods_and_lists(seqlens, head_dim):
    documents = torch.arange(max(seqlens), device="cuda", dtype=torch.int32) // 90
    mask = and_masks(causal, mods.document(documents))
    check(problem(seqlens, (4, 2), head_dim), softcap, mask)


@pytest.mark.parametrize("heads", [(1, 1), (7, 1), (8, 1), (8, 2), (6, 3)], ids="{0[0]}-{0[1]}".format)
def test_grouped_heads(heads):
    slopes = torch.linspace(0.1, 1, heads[0], device="cuda")

    def bias(s, b, h, i, j):
        return s + slopes[h] * (j - i)

    def per_head(b, h, i, j):
        return i - j >= 16 * h - 40

    check(problem((200, 300), heads, 64, batch=2), bias, per_head)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scale", [0.0, -0.3, 1.0])
def test_scales(scale, dtype):
    check(replace(problem((130, 200), dtype=dtype), scale=scale), softcap, causal)
    check(replace(problem((130, 200), dtype=dtype), scale=scale))


def test_logits_times_thirty_stay_finite():
    case = problem((300, 300), head_dim=128)
    check(replace(case, scale=30 / math.sqrt(128)), None, causal)


# -- the zoo -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("entry", zoo(), ids=lambda e: e.name)
def test_zoo(entry, head_dim):
    case = problem((160, 160), (4, 2), head_dim, batch=2)
    check_example(case, entry, causal)


@pytest.mark.parametrize("entry", zoo("score"), ids=lambda e: e.name)
def test_score_mods_of_the_zoo_without_a_mask(entry):
    case = problem((100, 130), (2, 2), 64, torch.float16)
    check_example(case, entry, None)


# -- block masks -------------------------------------------------------------------------------------------------------
BLOCKS = [128, 64, (64, 128), (128, 64), 96, 256, 16, (48, 80), 512]


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_block_sizes(block, head_dim):
    ids = torch.arange(400, device="cuda", dtype=torch.int32) // 70
    mask = create_block_mask(mods.document(ids), None, None, 400, 390, "cuda", BLOCK_SIZE=block)
    check(problem((400, 390), (2, 2), head_dim), None, None, block_mask=mask)


def scattered(block, lengths, mask_mod=causal, heads=2, seed=0) -> BlockMask:
    """Random blocks in random order, some full, some partial; entries past the counts are garbage."""
    g = torch.Generator().manual_seed(seed)
    rows, cols = -(-lengths[0] // block), -(-lengths[1] // block)
    classes = torch.randint(0, 3, (1, heads, rows, cols), generator=g)
    shuffle = torch.rand(classes.shape, generator=g)

    def lists(kind):
        chosen = classes == kind
        idx = (shuffle + 2 * (~chosen)).argsort(-1).int()
        count = chosen.sum(-1).int()
        return count.cuda(), idx.masked_fill(torch.arange(cols) >= count[..., None], 1 << 20).cuda()

    return BlockMask.from_kv_blocks(*lists(1), *lists(2), BLOCK_SIZE=block, mask_mod=mask_mod, seq_lengths=lengths)


@pytest.mark.parametrize("mask_mod", [causal, None], ids=["with a mask_mod", "lists only"])
@pytest.mark.parametrize("block", [128, 64, 48])
@pytest.mark.parametrize("head_dim", FEW_DIMS, ids=str)
def test_lists_in_any_order(head_dim, block, mask_mod):
    check(problem((500, 450), (2, 2), head_dim), None, None, block_mask=scattered(block, (500, 450), mask_mod))


@pytest.mark.parametrize("kept", ["none", "one row", "one key", "first rows dead", "middle dead", "one batch entry"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_rows_and_keys_that_nothing_sees(head_dim, kept):
    keep: dict[str, Callable[..., Tensor]] = {
        "none": lambda b, h, i, j: i < 0,
        "one row": lambda b, h, i, j: i == 131,
        "one key": lambda b, h, i, j: j == 200,
        "first rows dead": lambda b, h, i, j: i >= 140 + j,
        "middle dead": lambda b, h, i, j: (i < 100) | (i > 290),
        "one batch entry": lambda b, h, i, j: (b == 1) & (i >= j),
    }
    got = check(problem((300, 300), (2, 2), head_dim, batch=2), softcap, keep[kept])
    if kept == "none":
        assert not got["out"].any()
        assert (got["lse"] == -math.inf).all()


@pytest.mark.parametrize("head_dim", [64, 256])
def test_a_mask_of_random_elements_is_read_from_bits(head_dim):
    dense = torch.rand(2, 1, 300, 280, generator=torch.Generator().manual_seed(0)) < 0.4
    check(problem((300, 280), (2, 2), head_dim, batch=2), None, dense.cuda())


def test_full_blocks_only_and_partial_blocks_only():
    for block_aligned in (True, False):
        mask = (lambda b, h, i, j: i // 128 >= j // 128) if block_aligned else (lambda b, h, i, j: (i + j) % 3 == 0)
        check(problem((512, 512), head_dim=128), None, mask)


@pytest.mark.parametrize("window", [(0, 100), (-64, 64), (None, -3), (5, None), (200, 210)], ids=str)
@pytest.mark.parametrize("head_dim", FEW_DIMS, ids=str)
def test_bands(head_dim, window):
    lo, hi = window

    def band(b, h, i, j):
        keep = i == i
        if lo is not None:
            keep = keep & (i - j >= lo)
        if hi is not None:
            keep = keep & (i - j <= hi)
        return keep

    check(problem((400, 350), (2, 2), head_dim), None, band)


# -- captured tensors --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int32, torch.int64, torch.int8])
def test_captures_of_any_dtype(dtype):
    table = torch.arange(-3, 5, device="cuda").to(dtype)
    check(problem((150, 170)), lambda s, b, h, i, j: s + 0.1 * table[(i + j) % 8], causal)


def test_captures_of_any_rank_and_stride():
    g = torch.Generator("cuda").manual_seed(0)
    scalar = torch.tensor(0.7, device="cuda")
    one = torch.tensor([0.3], device="cuda")
    pair = torch.randn(170, 150, device="cuda", generator=g).t()
    spread = torch.randn(2, 1, 1, device="cuda", generator=g).expand(2, 150, 170)

    def mod(s, b, h, i, j):
        return s * scalar + one[0] + pair[i, j] + spread[h, i, j] + pair[i, i]

    check(problem((150, 170)), mod)


def test_a_number_on_the_cpu_and_python_numbers():
    cap = torch.tensor(3.0)
    for window in (10, 60):
        check(
            problem((150, 170)),
            lambda s, b, h, i, j: cap * torch.tanh(s / cap),
            lambda b, h, i, j, window=window: i - j < window,
        )


def test_a_value_that_is_nan_where_masked_reaches_nothing():
    weight = torch.rand(300, device="cuda")

    def mod(s, b, h, i, j):
        return s + weight[j] * torch.sqrt((i - j).float())

    check(problem((300, 300)), mod, causal)


def test_a_score_mod_that_hides_elements():
    def mod(s, b, h, i, j):
        return torch.where((i + j) % 5 == 0, -float("inf"), s * 0.5)

    check(problem((200, 230)), mod)
    check(problem((200, 230)), mod, causal)


def test_index_base_moves_the_coordinates():
    base = IndexBase(b_off=1, h_off=2, q_base=torch.tensor([0, 300, 64], device="cuda", dtype=torch.int32),
                     kv_base=torch.tensor([128, 0], device="cuda", dtype=torch.int32))  # fmt: skip
    slopes = torch.linspace(0, 1, 4, device="cuda")

    def mod(s, b, h, i, j):
        return s + slopes[h] * (j - i) * 0.01 + b

    check(problem((300, 200)), mod, causal, index_base=base)


# -- strides and outputs -----------------------------------------------------------------------------------------------
def test_strides():
    case = problem((130, 140), (4, 4), 64)
    wide = torch.empty(1, 130, 4, 3, 64, device="cuda", dtype=torch.bfloat16)
    wide[..., 1, :] = case.query.transpose(1, 2)
    shared = case.key[:, :1].expand(-1, 4, -1, -1)
    check(replace(case, query=wide[..., 1, :].transpose(1, 2), key=shared), softcap, causal)
    check(replace(case, grad_out=torch.ones(1, device="cuda", dtype=torch.bfloat16).expand_as(case.grad_out)))
    odd = torch.empty(1, 4, 140, 67, device="cuda", dtype=torch.bfloat16)[..., 3:]
    odd.copy_(case.value)
    check(replace(case, value=odd), None, causal)


def test_max_scores():
    case = problem((200, 230))
    _, aux = flex_attention(
        case.query, case.key, case.value, softcap, mask_mod=lambda b, h, i, j: i > j,
        return_aux=AuxRequest(lse=True, max_scores=True), backend="sm90",
    )  # fmt: skip
    scores = 5 * torch.tanh(case.query.double() @ case.key.double().mT / 8 / 5)
    i, j = torch.arange(200, device="cuda")[:, None], torch.arange(230, device="cuda")
    want = scores.masked_fill(i <= j, -math.inf).amax(-1)
    torch.testing.assert_close(aux.max_scores.double(), want, atol=3e-3, rtol=0)


@pytest.mark.parametrize("needs", ["q", "k", "v", "qk", "qv", "kv"])
@pytest.mark.parametrize("head_dim", [64, 256])
def test_gradients_nobody_asked_for_are_not_computed(head_dim, needs):
    case = problem((200, 230), head_dim=head_dim)
    want = check(case, softcap, causal)
    tensors = dict(zip("qkv", (t.detach() for t in (case.query, case.key, case.value)), strict=True))
    for name, t in tensors.items():
        t.requires_grad_(name in needs)
    out, lse = flex_attention(*tensors.values(), softcap, mask_mod=causal, return_lse=True, backend="sm90")
    torch.autograd.backward([out, lse], [case.grad_out, case.grad_lse])
    for name, t in tensors.items():
        assert (t.grad is None) == (name not in needs)
        if t.grad is not None:
            torch.testing.assert_close(t.grad, want[f"d{name}"], atol=1e-2, rtol=1e-2)


def test_a_loss_of_the_lse_alone():
    case = problem((200, 230))
    check(replace(case, grad_out=torch.zeros_like(case.grad_out)), softcap, causal)


def test_more_heads_than_a_grid_dimension_holds():
    check(problem((16, 16), (2, 2), 16, batch=33000), None, causal)
