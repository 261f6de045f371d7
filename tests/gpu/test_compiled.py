"""flex_attention of CUDA tensors in compiled regions, checkpoints and CUDA graphs, under autocast, and on torch."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from flexbwd import create_block_mask, flex_attention, mods
from flexbwd.errors import BackendNotice, UnsupportedError
from flexbwd.reference import attention_reference

pytestmark = pytest.mark.gpu


def leaves(shape=(2, 4, 256, 64), dtype=torch.bfloat16):
    g = torch.Generator("cuda").manual_seed(0)
    return [torch.randn(shape, generator=g, device="cuda").to(dtype).requires_grad_(True) for _ in range(3)]


def causal(b, h, i, j):
    return i >= j


def softcap(s, b, h, i, j):
    return 5.0 * torch.tanh(s / 5.0)


def same(got, want):
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, atol=2e-2, rtol=2e-2)


def results(run, tensors):
    out = run(*tensors)
    return (out, *torch.autograd.grad(out.float().square().sum(), tensors))


@pytest.mark.parametrize("mask", ["band", "documents", "block mask"])
def test_a_compiled_region_gives_what_eager_gives(mask):
    ids = torch.arange(256, device="cuda", dtype=torch.int32) // 70
    documents = mods.document(ids)
    options = {
        "band": {"mask_mod": causal},
        "documents": {"mask_mod": documents},
        "block mask": {"block_mask": create_block_mask(documents, None, None, 256, 256, "cuda")},
    }[mask]

    def run(q, k, v):
        return flex_attention(q * 1.5, k, v, softcap, **options)

    same(results(torch.compile(run, fullgraph=True), leaves()), results(run, leaves()))


def test_checkpointing_gives_the_same_bits():
    def run(q, k, v):
        return flex_attention(q, k, v, softcap, mask_mod=causal, deterministic=True)

    want = results(run, leaves())
    got = results(lambda *t: checkpoint(run, *t, use_reentrant=False), leaves())
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)


def test_autocast_computes_in_bf16():
    tensors = leaves(dtype=torch.float32)
    with torch.autocast("cuda", torch.bfloat16):
        out = flex_attention(*tensors, mask_mod=causal)
    assert out.dtype is torch.bfloat16
    want, _ = attention_reference(*[t.double() for t in tensors], mask_mod=causal)
    assert (out.double() - want).norm() < 1e-2 * want.norm()


@pytest.mark.parametrize("options", [{}, {"deterministic": True}], ids=["default", "deterministic"])
def test_a_step_can_be_captured_and_replayed(options):
    tensors = leaves()
    grads = [torch.zeros_like(t) for t in tensors]

    def step():
        out = flex_attention(*tensors, softcap, mask_mod=causal, **options)
        for g, new in zip(grads, torch.autograd.grad(out.float().square().sum(), tensors), strict=True):
            g.copy_(new)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
        step()
    stream.synchronize()
    want = [g.clone() for g in grads]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for g in grads:
        g.fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize()
    same(grads, want)


def test_deterministic_gives_the_same_bits():
    tensors = leaves((2, 4, 700, 64))
    ids = torch.arange(700, device="cuda", dtype=torch.int32) // 150
    for mask in (causal, mods.document(ids)):
        runs = [
            results(lambda *t, m=mask: flex_attention(*t, softcap, mask_mod=m, deterministic=True), tensors)
            for _ in range(3)
        ]
        for other in runs[1:]:
            assert all(torch.equal(a, b) for a, b in zip(runs[0], other, strict=True))


def test_what_the_kernels_cannot_do_goes_to_torch_with_one_notice():
    tensors = leaves(dtype=torch.float32)
    with pytest.warns(BackendNotice, match="float32"):
        got = results(lambda *t: flex_attention(*t, softcap, mask_mod=causal), tensors)
    with warnings.catch_warnings():
        warnings.simplefilter("error", BackendNotice)
        flex_attention(*tensors, softcap, mask_mod=causal)
    with pytest.raises(UnsupportedError, match="float32"):
        flex_attention(*tensors, softcap, mask_mod=causal, backend="sm90")
    want = results(lambda *t: attention_reference(*t, softcap, causal)[0], tensors)
    same(got, want)


def test_torch_serves_masks_and_mods_as_the_kernels_do():
    def per_head(b, h, i, j):
        return i - j >= 16 * h - 40

    tensors = leaves()
    for options in ({"mask_mod": per_head}, {"mask_mod": causal, "score_mod": softcap}):
        ours = results(lambda *t, o=options: flex_attention(*t, **o, backend="sm90"), tensors)
        same(results(lambda *t, o=options: flex_attention(*t, **o, backend="torch"), tensors), ours)
