"""Which backend a call gets, and torch's own flex_attention behind our arguments."""

import warnings

import pytest
import torch

from flexbwd import AuxRequest, BlockMask, backends, create_block_mask, flex_attention
from flexbwd.errors import BackendNotice, DeviceError, OptionError, UnsupportedError
from flexbwd.sparsity.tensors import IndexBase

HOPPER, AMPERE = (9, 0), (8, 0)


def causal(b, h, q, k):
    return q >= k


def tanh_cap(s, b, h, i, j):
    return 3 * torch.tanh(s / 3) - 0.1 * (i - j).abs()


def inputs(heads=(4, 2), lengths=(100, 130), dim=16):
    g = torch.Generator().manual_seed(0)
    shapes = [(2, heads[0], lengths[0], dim), (2, heads[1], lengths[1], dim), (2, heads[1], lengths[1], dim)]
    return [torch.randn(s, generator=g) for s in shapes]


@pytest.fixture
def capability(monkeypatch):
    def set_to(value):
        monkeypatch.setattr(backends, "capability", lambda index: value)

    return set_to


@pytest.mark.parametrize(
    ("found", "device", "want"),
    [(HOPPER, "cpu", "cpu"), (HOPPER, "cuda", "sm90"), (AMPERE, "cuda", "torch"), ((10, 0), "cuda:1", "torch")],
)
def test_auto_takes_the_backend_of_the_device(capability, found, device, want):
    capability(found)
    assert backends.choose("auto", torch.device(device)) == want


@pytest.mark.parametrize(
    ("name", "found", "device", "error", "says"),
    [
        ("cpu", HOPPER, "cuda", DeviceError, "move it with .cpu"),
        ("sm90", HOPPER, "cpu", DeviceError, "cuda"),
        ("sm90", AMPERE, "cuda", DeviceError, "8.0"),
        ("auto", HOPPER, "mps", UnsupportedError, "backend='torch'"),
    ],
)
def test_a_backend_that_cannot_serve_the_device_is_an_error(capability, name, found, device, error, says):
    capability(found)
    with pytest.raises(error, match=says):
        backends.choose(name, torch.device(device))


def test_an_unknown_backend_is_an_error_that_lists_the_known():
    with pytest.raises(OptionError, match=r"'triton'.*'auto', 'cpu', 'sm90', 'torch'"):
        flex_attention(*inputs(), backend="triton")


def test_a_notice_comes_once_per_reason():
    backends.notice.cache_clear()
    with pytest.warns(BackendNotice, match="no such thing"):
        backends.notice("no such thing")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        backends.notice("no such thing")


def few_blocks(q_len, kv_len):
    """Lists that keep less than the mask_mod does."""
    cnt = torch.tensor([[[1, 2]]], dtype=torch.int32)
    idx = torch.tensor([[[[0, 0], [2, 0]]]], dtype=torch.int32)
    return BlockMask.from_kv_blocks(cnt, idx, BLOCK_SIZE=64, mask_mod=causal, seq_lengths=(q_len, kv_len))


CALLS = {
    "dense": {},
    "score_mod": {"score_mod": tanh_cap},
    "mask_mod": {"mask_mod": causal},
    "both, scaled": {"score_mod": tanh_cap, "mask_mod": causal, "scale": 0.3},
    "block mask": {"block_mask": create_block_mask(causal, None, None, 100, 130)},
    "torch's block mask": {"block_mask": create_block_mask(causal, None, None, 100, 130).to_torch()},
    "lists that keep less than the mask": {"block_mask": few_blocks(100, 130)},
    "a bool tensor": {"mask_mod": torch.rand(2, 1, 100, 130, generator=torch.Generator().manual_seed(3)) < 0.5},
}


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("name", CALLS)
def test_torch_gives_what_the_cpu_backend_gives(name):
    results = []
    for backend in ("cpu", "torch"):
        out, aux = flex_attention(*inputs(), **CALLS[name], backend=backend, return_lse=True)
        results.append((out, aux))
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, atol=2e-5, rtol=2e-5)


def test_torch_refuses_what_it_has_no_argument_for():
    with pytest.raises(UnsupportedError, match="score_mod_bwd"):
        flex_attention(*inputs(), tanh_cap, score_mod_bwd=lambda g, s, b, h, i, j: g, backend="torch")
    with pytest.raises(UnsupportedError, match="index_base"):
        flex_attention(*inputs(), backend="torch", index_base=IndexBase(b_off=1))


def test_what_torch_cannot_do_on_cpu_is_an_error_of_ours():
    query, key, value = inputs()
    with pytest.raises(UnsupportedError, match=r"max_scores.*backend='cpu'"):
        flex_attention(query, key, value, backend="torch", return_aux=AuxRequest(max_scores=True))
    with pytest.raises(UnsupportedError, match="backend='cpu'"):
        flex_attention(query.requires_grad_(), key, value, backend="torch")


def test_torch_serves_a_compiled_region():
    tensors = inputs()
    run = torch.compile(lambda q, k, v: flex_attention(q, k, v, tanh_cap, backend="torch"), backend="aot_eager")
    torch.testing.assert_close(run(*tensors), flex_attention(*inputs(), tanh_cap), atol=2e-5, rtol=2e-5)
