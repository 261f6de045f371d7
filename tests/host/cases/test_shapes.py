"""Known failures 4, 11, 12, 19: head dims, ragged and empty lengths, strides, very many heads."""

from __future__ import annotations

import pytest
import torch

from flexbwd import create_block_mask, flex_attention
from flexbwd.reference import attention_reference
from flexbwd.sparsity import IndexBase
from flexbwd.testing import attention_grads, make_case, poisoned
from tests.host.cases.oracle import causal, check, param, window

LENGTHS = "q{0[0]}-kv{0[1]}".format


# -- 4: head dims ------------------------------------------------------------------------------------------------------
HEAD_DIMS = [72, 104, 144, (192, 128), 256, (128, 192), (16, 256), (256, 16), 1, 17]


@pytest.mark.parametrize("head_dim", HEAD_DIMS, ids=str)
@pytest.mark.parametrize("mask_mod", [causal, window], ids=lambda m: m.__name__)
def test_any_head_dim_matches_with_the_default_block_mask(head_dim, mask_mod):
    case = make_case((257, 257), heads=(2, 1), head_dim=head_dim)
    check(case, block_mask=create_block_mask(mask_mod, None, None, 257, 257))


@pytest.mark.parametrize("head_dim", HEAD_DIMS[:6], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_any_head_dim_matches_in_low_precision(head_dim, dtype):
    case = make_case((200, 200), heads=(2, 1), head_dim=head_dim, dtype=dtype)
    check(case, block_mask=create_block_mask(causal, None, None, 200, 200))


# -- 11: lengths -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "lengths", [(100, 100), (1, 100), (100, 1), (1, 1), (7, 1000), (1000, 7), (129, 64), (64, 129)], ids=LENGTHS
)
@pytest.mark.parametrize("mask_mod", [None, causal, lambda b, h, i, j: i >= 0], ids=["none", "causal", "all"])
def test_padding_is_never_counted(lengths, mask_mod):
    """Were keys past the end counted, a score_mod that raises late keys would make them win."""
    case, late = make_case(lengths, heads=(4, 2), head_dim=16), param(lengths[1] + 40)
    check(case, mask_mod=mask_mod)
    check(case, lambda s, b, h, i, j: s + 0.2 * j + late[j + 40], mask_mod)


@pytest.mark.parametrize("lengths", [(0, 5), (5, 0), (0, 0)], ids=LENGTHS)
@pytest.mark.parametrize("given", ["nothing", "mask_mod", "block_mask", "tensor"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.filterwarnings("ignore::flexbwd.errors.ModDtypeWarning")
def test_empty_lengths_give_zeros_and_minus_infinity(lengths, given, dtype):
    case, slopes = make_case(lengths, heads=(4, 2), head_dim=16, batch=2, dtype=dtype), param(4)
    options = {
        "nothing": {},
        "mask_mod": {"mask_mod": causal},
        "block_mask": {"block_mask": create_block_mask(causal, None, None, *lengths)},
        "tensor": {"mask_mod": torch.ones(lengths, dtype=torch.bool)},
    }[given]
    got = attention_grads(case, lambda s, b, h, i, j: s * slopes[h], **options)
    assert got["out"].shape == (2, 4, lengths[0], 16)
    assert got["lse"].shape == (2, 4, lengths[0])
    assert (got["lse"] == -torch.inf).all()
    assert not any(bool(got[n].any()) for n in ("out", "dq", "dk", "dv", "slopes"))
    assert [got[n].shape for n in ("dq", "dk", "dv")] == [case.query.shape, case.key.shape, case.value.shape]


@pytest.mark.parametrize("shape", [(0, 2, 5, 16), (0, 2, 0, 16)], ids=str)
def test_an_empty_batch_gives_empty_results(shape):
    q, k, v = (torch.randn(shape, requires_grad=True) for _ in range(3))
    out = flex_attention(q, k, v, mask_mod=causal)
    assert out.shape == shape
    assert [g.shape for g in torch.autograd.grad(out.sum(), (q, k, v))] == [shape] * 3


# -- 12: strides -------------------------------------------------------------------------------------------------------
def padded(t):
    wide = torch.full((*t.shape[:2], t.shape[2] + 3, t.shape[3] + 5), torch.nan, dtype=t.dtype)
    wide[:, :, :-3, :-5] = t
    return wide[:, :, :-3, :-5]


def every_other(t):
    wide = torch.full((*t.shape[:3], 2 * t.shape[3]), torch.nan, dtype=t.dtype)
    wide[..., ::2] = t
    return wide[..., ::2]


VIEWS = {
    "heads expanded": lambda t: t[:, :1].expand_as(t),
    "batch expanded": lambda t: t[:1].expand_as(t),
    "length expanded": lambda t: t[:, :, :1].expand_as(t),
    "all expanded": lambda t: t[:1, :1, :1].expand_as(t),
    "BSHD": lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
    "SBHD": lambda t: t.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3),
    "HBSD": lambda t: t.transpose(0, 1).contiguous().transpose(0, 1),
    "padded": padded,
    "last dim transposed": lambda t: t.mT.contiguous().mT,
    "every other element": every_other,
    "packed qkv": lambda t: torch.stack([t, torch.full_like(t, torch.nan), t], dim=3)[:, :, :, 0],
}


@pytest.mark.parametrize("kind", VIEWS)
@pytest.mark.parametrize("which", ["q", "k", "v", "qkv"])
def test_views_give_what_their_contiguous_copies_give(kind, which):
    case, table = make_case((70, 90), heads=(4, 4), head_dim=16, batch=2), param(4, 90)
    bases = [t.clone().requires_grad_(True) for t in (case.query, case.key, case.value)]

    def grads(contiguous):
        views = [VIEWS[kind](t) if n in which else t for n, t in zip("qkv", bases, strict=True)]
        views = [t.contiguous() if contiguous else t for t in views]
        out, lse = flex_attention(*views, lambda s, b, h, i, j: s + table[h, j], mask_mod=window, return_lse=True)
        grads = torch.autograd.grad((out, lse), (*bases, table), (case.grad_out, case.grad_lse))
        return (out, lse, *grads)

    with poisoned():
        torch.testing.assert_close(grads(False), grads(True), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", ["heads expanded", "batch expanded", "BSHD", "padded", "every other element"])
def test_the_upstream_gradient_may_be_a_view(kind):
    case = make_case((70, 90), heads=(4, 2), head_dim=16, batch=2)
    q, k, v = case.leaves()
    upstream = VIEWS[kind](case.grad_out)
    got = torch.autograd.grad(flex_attention(q, k, v, mask_mod=causal), (q, k, v), upstream)
    want = torch.autograd.grad(attention_reference(q, k, v, mask_mod=causal)[0], (q, k, v), upstream.contiguous())
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)


def test_a_huge_stride_does_not_overflow():
    """A dim of size 1 may have any stride; its products with an index must not be formed in 32 bits, or at all."""
    case = make_case((70, 90), heads=(1, 1), head_dim=16)
    huge = [t.as_strided(t.shape, (2**40, 2**33, 16, 1)) for t in (case.query, case.key, case.value)]
    out = flex_attention(*huge, mask_mod=causal)
    torch.testing.assert_close(out, attention_reference(case.query, case.key, case.value, mask_mod=causal)[0])


def test_a_view_that_spans_more_than_int32_elements_matches(tmp_path):
    """Rows 4 GiB apart, in a sparse file of which a few pages exist: offsets need 64 bits."""
    rows, stride = 5, 2**29 + 3
    flat = torch.from_file(str(tmp_path / "sparse"), shared=True, size=(rows - 1) * stride + 64, dtype=torch.float64)
    far = flat.as_strided((1, 1, rows, 16), (1, 1, stride, 1))
    far.copy_(torch.randn(1, 1, rows, 16, dtype=torch.float64))
    near = far.contiguous()
    out = flex_attention(near, far, far, mask_mod=causal)
    torch.testing.assert_close(out, flex_attention(near, near, near, mask_mod=causal), rtol=0, atol=0)


@pytest.mark.parametrize("kind", ["heads expanded", "BSHD", "last dim transposed", "every other element"])
def test_captured_views_give_what_their_copies_give(kind):
    case = make_case((70, 90), heads=(4, 2), head_dim=16, batch=2)
    base = param(2, 4, 70, 90)
    view = VIEWS[kind](base)
    keep = VIEWS[kind](torch.rand(2, 4, 70, 90, generator=torch.Generator().manual_seed(1)))

    def grads(bias, keep):
        q, k, v = case.leaves()
        out = flex_attention(q, k, v, lambda s, b, h, i, j: s + bias[b, h, i, j],
                             mask_mod=lambda b, h, i, j: keep[b, h, i, j] > 0.4)  # fmt: skip
        return (out, *torch.autograd.grad(out, (q, k, v, base), case.grad_out, retain_graph=True))

    got = grads(view, keep)
    torch.testing.assert_close(got, grads(view.contiguous(), keep.contiguous()), rtol=1e-12, atol=1e-12)


# -- 19: more heads than a grid dimension holds ------------------------------------------------------------------------
@pytest.mark.parametrize("shape", [(1, 65537), (33000, 2), (65540, 1)], ids="b{0[0]}-h{0[1]}".format)
@pytest.mark.parametrize("masked", [False, True], ids=["dense", "masked"])
def test_more_than_65535_heads_match(shape, masked):
    batch, heads = shape
    case = make_case((16, 16), heads=heads, head_dim=2, batch=batch, dtype=torch.float32)
    q, k, v = case.leaves()
    mask_mod = causal if masked else None
    got = flex_attention(q, k, v, mask_mod=mask_mod, return_lse=True)
    grads = torch.autograd.grad(got, (q, k, v), (case.grad_out, case.grad_lse))
    want = dense(q, k, v, causal=masked)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(grads, torch.autograd.grad(want, (q, k, v), (case.grad_out, case.grad_lse)))


def dense(q, k, v, causal):
    scores = q @ k.mT / q.shape[-1] ** 0.5
    if causal:
        scores = scores.masked_fill(~torch.ones(scores.shape[-2:], dtype=torch.bool).tril(), -torch.inf)
    return scores.softmax(-1) @ v, scores.logsumexp(-1)


@pytest.mark.parametrize("shape", [(1, 65600), (65600, 1)], ids="b{0[0]}-h{0[1]}".format)
def test_mods_see_the_index_of_the_last_of_many_heads(shape):
    """Both ends of the heads, each against the reference of that slice alone."""
    batch, heads = shape
    case, table = make_case((16, 16), heads=heads, head_dim=2, batch=batch), param(max(shape))

    def mod(s, b, h, i, j):
        return s + table[b + h] * (i - j)

    def mask_mod(b, h, i, j):
        return (i + b + h) % 16 >= j

    q, k, v = case.leaves()
    out = flex_attention(q, k, v, mod, mask_mod=mask_mod)
    grads = torch.autograd.grad(out, (q, k, v, table), case.grad_out)
    dim = 0 if batch > 1 else 1
    for start in (0, max(shape) - 40):
        part = [t.narrow(dim, start, 40).detach().requires_grad_(True) for t in (q, k, v)]
        base = IndexBase(b_off=start) if dim == 0 else IndexBase(h_off=start)
        want, _ = attention_reference(*part, mod, mask_mod, index_base=base)
        torch.testing.assert_close(out.narrow(dim, start, 40), want, rtol=1e-10, atol=1e-12)
        wanted = torch.autograd.grad(want, (*part, table), case.grad_out.narrow(dim, start, 40))
        for g, w in zip(grads[:3], wanted[:3], strict=True):
            torch.testing.assert_close(g.narrow(dim, start, 40), w, rtol=1e-10, atol=1e-12)
        here = slice(start, start + 40)
        torch.testing.assert_close(grads[3][here], wanted[3][here], rtol=1e-10, atol=1e-12)
