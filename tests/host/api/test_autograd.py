"""Gradients through autograd and everything that wraps it."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from flexbwd import create_block_mask, flex_attention
from flexbwd.errors import MaskError, UnsupportedError
from flexbwd.testing import make_case


def causal(b, h, q, k):
    return q >= k


def leaves(shape=(1, 2, 24, 8), dtype=torch.float64):
    g = torch.Generator().manual_seed(1)
    return [torch.randn(shape, generator=g, dtype=dtype).requires_grad_(True) for _ in range(3)]


def softcap(s, b, h, i, j):
    return 5 * torch.tanh(s / 5)


def test_gradcheck_of_all_inputs_captures_and_lse():
    q, k, v = leaves((1, 2, 5, 3))
    slopes = torch.tensor([0.3, -0.2], dtype=torch.float64, requires_grad=True)

    def run(q, k, v, slopes):
        def mod(s, b, h, i, j):
            return 5 * torch.tanh(s / 5) + slopes[h] * (i - j)

        return flex_attention(q, k, v, mod, mask_mod=causal, return_lse=True)

    assert torch.autograd.gradcheck(run, (q, k, v, slopes))


@pytest.mark.parametrize("frozen", ["q", "k", "v", "kv", "qk"])
def test_gradients_nobody_asked_for_are_not_computed(frozen):
    q, k, v = leaves()
    for name, t in zip("qkv", (q, k, v), strict=True):
        t.requires_grad_(name not in frozen)
    flex_attention(q, k, v, softcap, mask_mod=causal).sum().backward()
    for name, t in zip("qkv", (q, k, v), strict=True):
        assert (t.grad is None) == (name in frozen)


def test_a_loss_of_the_lse_alone_has_gradients():
    q, k, v = leaves()
    _, lse = flex_attention(q, k, v, return_lse=True)
    dq, dk, dv = torch.autograd.grad(lse.sum(), (q, k, v))
    want = torch.autograd.grad((q @ k.mT / 8**0.5).logsumexp(-1).sum(), (q, k))
    torch.testing.assert_close((dq, dk), want)
    assert not dv.any()


def test_complementary_masks_merge_through_their_lse():
    q, k, v = leaves((1, 2, 200, 16))
    o1, l1 = flex_attention(q, k, v, mask_mod=lambda b, h, i, j: j < 70, return_lse=True)
    o2, l2 = flex_attention(q, k, v, mask_mod=lambda b, h, i, j: j >= 70, return_lse=True)
    lse = torch.logaddexp(l1, l2)
    merged = o1 * (l1 - lse).exp()[..., None] + o2 * (l2 - lse).exp()[..., None]
    whole = flex_attention(q, k, v)
    up = torch.randn(merged.shape, dtype=merged.dtype, generator=torch.Generator().manual_seed(5))
    torch.testing.assert_close(merged, whole)
    torch.testing.assert_close(torch.autograd.grad(merged, (q, k, v), up), torch.autograd.grad(whole, (q, k, v), up))


def test_double_backward_is_refused_by_name():
    q, k, v = leaves()
    (dq,) = torch.autograd.grad(flex_attention(q, k, v).sum(), q, create_graph=True)
    with pytest.raises(UnsupportedError, match="differentiated twice"):
        dq.sum().backward()


def test_autocast_casts_query_key_value_only():
    q, k, v = leaves(dtype=torch.float32)
    bias = torch.zeros(2, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        out = flex_attention(q, k, v, lambda s, b, h, i, j: s + bias[h])
    assert out.dtype == torch.bfloat16
    grads = torch.autograd.grad(out.float().sum(), (q, bias))
    assert [g.dtype for g in grads] == [torch.float32, torch.float32]


def test_checkpointing_recomputes_the_same_gradients():
    q, k, v = leaves()

    def block(q, k, v):
        return flex_attention(q * 1.5, k, v, softcap, mask_mod=causal).sin()

    want = torch.autograd.grad(block(q, k, v).sum(), (q, k, v))
    got = torch.autograd.grad(checkpoint(block, q, k, v, use_reentrant=False).sum(), (q, k, v))
    torch.testing.assert_close(got, want, rtol=0, atol=0)


def test_selective_checkpointing_saves_the_operator_once():
    from torch.utils._python_dispatch import TorchDispatchMode

    calls = []

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is torch.ops.flexbwd.forward.default:
                calls.append(func)
            return func(*args, **(kwargs or {}))

    def contexts():
        return create_selective_checkpoint_contexts([torch.ops.flexbwd.forward.default])

    q, k, v = leaves()
    want = torch.autograd.grad(flex_attention(q, k, v, softcap).sin().sum(), (q, k, v))
    with Count():
        out = checkpoint(
            lambda q, k, v: flex_attention(q, k, v, softcap).sin(), q, k, v, use_reentrant=False, context_fn=contexts
        )
        got = torch.autograd.grad(out.sum(), (q, k, v))
    torch.testing.assert_close(got, want, rtol=0, atol=0)
    assert len(calls) == 1


@pytest.mark.parametrize("with_mask", [False, True], ids=["dense", "masked"])
def test_operators_pass_opcheck(with_mask):
    from flexbwd.calls import Options, prepare_call

    q, k, v = leaves((1, 2, 20, 8), torch.float32)
    bias = torch.zeros(2, requires_grad=True)
    options = Options(score_mod=lambda s, b, h, i, j: s + bias[h], mask_mod=causal if with_mask else None)
    q, k, v, captures, static = prepare_call(q, k, v, options).operands
    args = (q, k, v, captures, *static)
    torch.library.opcheck(torch.ops.flexbwd.forward, (*args, True))
    out, lse, _ = torch.ops.flexbwd.forward(*args, False)
    detached = [t.detach() for t in (torch.ones_like(out), torch.ones_like(lse), q, k, v, out, lse)]
    needs = [True] * (3 + len(captures))
    backward = (*detached, [c.detach() for c in captures], *static, needs)
    torch.library.opcheck(torch.ops.flexbwd.backward, backward)


def test_ddp_and_plain_training_agree(tmp_path):
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.slopes = torch.nn.Parameter(torch.tensor([0.1, 0.2]))
            self.proj = torch.nn.Linear(16, 48)

        def forward(self, x):
            q, k, v = self.proj(x).view(*x.shape[:2], 3, 2, 8).permute(2, 0, 3, 1, 4)
            return flex_attention(q, k, v, lambda s, b, h, i, j: s - self.slopes[h] * (i - j), mask_mod=causal)

    torch.manual_seed(0)
    layer, x = Layer(), torch.randn(2, 30, 16)
    layer(x).square().sum().backward()
    want = {n: p.grad.clone() for n, p in layer.named_parameters()}
    layer.zero_grad()
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        DistributedDataParallel(layer)(x).square().sum().backward()
    finally:
        dist.destroy_process_group()
    torch.testing.assert_close({n: p.grad for n, p in layer.named_parameters()}, want)


def test_gradients_are_bitwise_repeatable():
    case = make_case((300, 280), heads=(4, 2), head_dim=16, dtype=torch.float32)
    runs = []
    for _ in range(2):
        q, k, v = case.leaves()
        out = flex_attention(q, k, v, softcap, mask_mod=causal, deterministic=True)
        runs.append(torch.autograd.grad(out, (q, k, v), case.grad_out))
    torch.testing.assert_close(runs[0], runs[1], rtol=0, atol=0)


@pytest.mark.parametrize("reentrant", [False, True], ids=["hooks", "reentrant"])
def test_the_first_call_of_a_mod_may_be_inside_a_checkpoint(reentrant):
    q, k, v = leaves()
    slopes = torch.tensor([0.3, -0.2], dtype=torch.float64, requires_grad=True)

    def block(q, k, v, slopes):  # a mod of this test alone: it must be traced inside the checkpoint
        return flex_attention(q, k, v, lambda s, b, h, i, j: s * slopes[h].exp() + 0.137 * slopes[h] * j).sin()

    def grads(out):
        out.sum().backward()
        found = [t.grad for t in (q, k, v, slopes)]
        for t in (q, k, v, slopes):
            t.grad = None
        return found

    got = grads(checkpoint(block, q, k, v, slopes, use_reentrant=reentrant))
    torch.testing.assert_close(got, grads(block(q, k, v, slopes)), rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("tile", [None, 64], ids=["one-tile", "small-tiles"])
def test_rows_of_masking_constants_alone_average_the_values_in_both_passes(dtype, tile):
    q, k, v = leaves((1, 2, 40, 8), dtype)
    low = torch.finfo(dtype).min

    def mod(s, b, h, i, j):
        return torch.where((j <= i) & (i > 4), s, low)

    out = flex_attention(q, k, v, mod, kernel_options=None if tile is None else {"cpu_tile_elements": tile})
    i, j = torch.arange(40)[:, None], torch.arange(40)
    weights = torch.where((j <= i) & (i > 4), q @ k.mT / 8**0.5, low).softmax(-1)
    up = torch.randn(out.shape, dtype=dtype, generator=torch.Generator().manual_seed(5))
    want = torch.autograd.grad(weights @ v, (q, k, v), up)
    torch.testing.assert_close(torch.autograd.grad(out, (q, k, v), up), want)


def test_masks_and_tables_made_in_inference_mode_serve_training():
    q, k, v = leaves()
    with torch.inference_mode():
        keep = torch.arange(24) % 5 != 3
        block_mask = create_block_mask(lambda b, h, i, j: (i >= j) & keep[j], None, None, 24, 24, BLOCK_SIZE=16)
        flex_attention(q, k, v, softcap, mask_mod=lambda b, h, i, j: keep[j])  # its lists are cached
    for options in ({"block_mask": block_mask}, {"mask_mod": lambda b, h, i, j: keep[j]}):
        kept = keep & (torch.ones(24, 24, dtype=torch.bool).tril() if "block_mask" in options else True)
        weights = (5 * torch.tanh(q @ k.mT / 8**0.5 / 5)).masked_fill(~kept.clone(), -torch.inf).softmax(-1)
        want = torch.autograd.grad((weights @ v).sin().sum(), (q, k, v))
        got = torch.autograd.grad(flex_attention(q, k, v, softcap, **options).sin().sum(), (q, k, v))
        torch.testing.assert_close(got, want)


def test_autocast_joins_dtypes_that_differ():
    q, k, v = leaves(dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):  # rotary embeddings in fp32, values of a linear layer
        out = flex_attention(q, k, v.bfloat16(), mask_mod=causal)
        want = flex_attention(q.bfloat16(), k.bfloat16(), v.bfloat16(), mask_mod=causal)
    torch.testing.assert_close(out, want, rtol=0, atol=0)


def test_function_transforms_are_refused_by_name():
    q, k, v = (t.detach() for t in leaves())
    run = torch.func.grad(lambda q: flex_attention(q, k, v).sum())
    with pytest.raises(UnsupportedError, match=r"torch\.func transform"):
        run(q)
    with pytest.raises(UnsupportedError, match=r"torch\.func transform"):
        torch.func.vmap(flex_attention)(q[None], k[None], v[None])


def test_lists_written_to_before_the_backward_are_refused():
    import flexbwd

    q, k, v = leaves()
    mask = flexbwd.create_block_mask(causal, None, None, 24, 24)
    out = flex_attention(q, k, v, block_mask=mask)
    mask.q_to_kv.mask_block_cnt.zero_()
    with pytest.raises(MaskError, match="written to between forward and backward"):
        out.sum().backward()
