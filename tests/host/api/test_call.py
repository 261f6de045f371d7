"""flex_attention is torch's flex_attention with more in it: arguments, results, layouts, memory order."""

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask as torch_create_block_mask

import flexbwd
from flexbwd import AuxRequest, flex_attention
from flexbwd.reference import attention_reference
from flexbwd.testing import make_case


def causal(b, h, q, k):
    return q >= k


def test_positional_arguments_are_torchs():
    case = make_case((40, 40), heads=(4, 2), head_dim=16)
    q, k, v = case.query, case.key, case.value
    mask = torch_create_block_mask(causal, None, None, 40, 40, device="cpu")
    out, lse = flex_attention(q, k, v, lambda s, b, h, i, j: s + i - j, mask, 0.5, True, True, None)
    want, want_lse = attention_reference(q, k, v, lambda s, b, h, i, j: s + i - j, causal, 0.5)
    torch.testing.assert_close(out, want)
    torch.testing.assert_close(lse, want_lse)


@pytest.mark.parametrize("scale", [0.0, -0.3, 2, None])
def test_any_finite_scale_is_legal(scale):
    case = make_case((20, 30), head_dim=16)
    out = flex_attention(case.query, case.key, case.value, scale=scale)
    torch.testing.assert_close(out, attention_reference(case.query, case.key, case.value, scale=scale)[0])


def test_aux_request_returns_lse_and_max_scores():
    case = make_case((20, 30), head_dim=16)
    q, k, v = case.query, case.key, case.value
    _, aux = flex_attention(q, k, v, mask_mod=causal, return_aux=AuxRequest(lse=True, max_scores=True))
    scores = (q @ k.mT / 4).masked_fill(~torch.ones(20, 30, dtype=torch.bool).tril(), -torch.inf)
    torch.testing.assert_close(aux.max_scores, scores.amax(-1))
    torch.testing.assert_close(aux.lse, scores.logsumexp(-1))
    assert flex_attention(q, k, v, return_aux=AuxRequest())[1] == flexbwd.AuxOutput(None, None)


def test_bshd_layout_is_the_transpose():
    case = make_case((20, 30), heads=(4, 2), head_dim=16)
    swapped = [t.transpose(1, 2).contiguous() for t in (case.query, case.key, case.value)]
    got = flex_attention(*swapped, mask_mod=causal, layout="bshd")
    want = flex_attention(case.query, case.key, case.value, mask_mod=causal)
    torch.testing.assert_close(got.transpose(1, 2), want, rtol=0, atol=0)
    assert got.is_contiguous()


@pytest.mark.parametrize(
    "kind", ["bhsd", "bshd-transpose", "stride0-heads", "stride0-batch", "strided-last-dim", "big-stride"]
)
def test_any_strides_give_the_contiguous_result(kind):
    case = make_case((33, 47), heads=(4, 4), head_dim=16, batch=2)
    q, k, v = case.query, case.key, case.value
    make = {
        "bhsd": lambda t: t,
        "bshd-transpose": lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
        "stride0-heads": lambda t: t[:, :1].expand_as(t),
        "stride0-batch": lambda t: t[:1].expand_as(t),
        "strided-last-dim": lambda t: t.mT.contiguous().mT,
        "big-stride": lambda t: torch.cat([t, t], -1)[..., :16],
    }[kind]
    views = [make(t).detach().requires_grad_(True) for t in (q, k, v)]
    plain = [t.detach().clone(memory_format=torch.contiguous_format).requires_grad_(True) for t in views]
    outs = [flex_attention(*ts, mask_mod=causal) for ts in (views, plain)]
    grads = [torch.autograd.grad(o, ts, case.grad_out) for o, ts in zip(outs, (views, plain), strict=True)]
    torch.testing.assert_close(outs[0], outs[1])
    torch.testing.assert_close(grads[0], grads[1])


def test_output_and_gradients_keep_the_memory_order_of_their_input():
    q, k, v = (torch.randn(2, 50, 4, 16).transpose(1, 2).requires_grad_(True) for _ in range(3))
    out = flex_attention(q, k, v)
    grads = torch.autograd.grad(out.sum(), (q, k, v))
    for t in (out, *grads):
        assert t.transpose(1, 2).is_contiguous()


def test_key_and_value_of_batch_one_are_shared():
    q, k, v = torch.randn(3, 2, 20, 16), torch.randn(1, 2, 20, 16), torch.randn(1, 2, 20, 16)
    k.requires_grad_(True)
    out = flex_attention(q, k, v, mask_mod=causal)
    torch.testing.assert_close(
        out, flex_attention(q, k.expand(3, -1, -1, -1), v.expand(3, -1, -1, -1), mask_mod=causal)
    )
    assert torch.autograd.grad(out.sum(), k)[0].shape == k.shape


def test_mask_mod_alone_equals_its_block_mask():
    case = make_case((300, 200), head_dim=16)
    mask = flexbwd.create_block_mask(causal, None, None, 300, 200)
    got = flex_attention(case.query, case.key, case.value, mask_mod=causal)
    torch.testing.assert_close(got, flex_attention(case.query, case.key, case.value, block_mask=mask), rtol=0, atol=0)


def test_a_bool_tensor_is_a_mask():
    case = make_case((70, 150), head_dim=16)
    keep = torch.rand(70, 150, generator=torch.Generator().manual_seed(3)) < 0.3
    got = flex_attention(case.query, case.key, case.value, mask_mod=keep)
    want, _ = attention_reference(case.query, case.key, case.value, keep=keep)
    torch.testing.assert_close(got, want)


def test_an_untraceable_mask_is_tabulated():
    def odd(b, h, q, k):
        return q >= k if int(q) % 2 else q - k <= 3

    case = make_case((40, 40), head_dim=16)
    keep = torch.tensor([[(i >= j) if i % 2 else (i - j <= 3) for j in range(40)] for i in range(40)])
    got = flex_attention(case.query, case.key, case.value, mask_mod=odd)
    torch.testing.assert_close(got, attention_reference(case.query, case.key, case.value, keep=keep)[0])


def test_minus_infinity_branches_of_a_score_mod_skip_blocks():
    poison = make_case((256, 512), head_dim=16)
    k, v = poison.key.clone(), poison.value.clone()
    k[:, :, 256:], v[:, :, 256:] = torch.nan, torch.nan  # blocks that causal never lists
    out = flex_attention(poison.query, k, v, lambda s, b, h, i, j: torch.where(i >= j, s, -torch.inf))
    torch.testing.assert_close(out, flex_attention(poison.query, poison.key, poison.value, mask_mod=causal))


def test_import_needs_no_gpu_library():
    import subprocess
    import sys

    code = "import sys, flexbwd; assert not {'cutlass', 'matplotlib', 'rich'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("given", ["call", "mask", "both"])
def test_one_index_base_serves_mask_and_score(given):
    from flexbwd.sparsity import IndexBase

    case = make_case((200, 300), head_dim=16)
    base = IndexBase(1, 2, torch.tensor([256, 0], dtype=torch.int32), torch.tensor([128, 0, 64], dtype=torch.int32))

    def bias(s, b, h, i, j):
        return s + 0.1 * (h + b) * (i - j)

    mask = None if given == "call" else flexbwd.create_block_mask(causal, None, None, 200, 300, index_base=base)
    out = flex_attention(
        case.query,
        case.key,
        case.value,
        bias,
        mask,
        mask_mod=causal if given == "call" else None,
        index_base=None if given == "mask" else base,
    )
    want, _ = attention_reference(case.query, case.key, case.value, bias, causal, index_base=base)
    torch.testing.assert_close(out, want)


def test_a_mask_of_other_coordinates_is_refused():
    from flexbwd.errors import MaskError
    from flexbwd.sparsity import IndexBase

    case = make_case((200, 200), head_dim=16)
    near, far = (IndexBase(q_base=torch.full((2,), n, dtype=torch.int32)) for n in (0, 128))
    plain = flexbwd.create_block_mask(causal, None, None, 200, 200)
    based = flexbwd.create_block_mask(causal, None, None, 200, 200, index_base=near)
    for mask in (plain, based):
        with pytest.raises(MaskError, match="index_base"):
            flex_attention(case.query, case.key, case.value, block_mask=mask, index_base=far)
