"""torch.compile(fullgraph=True): mods from anywhere, gradients, guards, dynamic lengths."""

import pytest
import torch

import flexbwd
from flexbwd import flex_attention
from flexbwd.testing import make_case

BACKENDS = ["eager", "aot_eager"]


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


def causal(b, h, q, k):
    return q >= k


class Layer(torch.nn.Module):
    """Mods of every origin: a method, a closure made in forward, a tensor made in forward, a Python number."""

    def __init__(self, cap=5.0):
        super().__init__()
        self.slopes = torch.nn.Parameter(torch.tensor([0.1, -0.2], dtype=torch.float64))
        self.cap = cap

    def bias(self, h, i, j):
        return self.slopes[h] * (i - j)

    def forward(self, q, k, v, ids):
        shift = q.mean() * 0.1

        def mod(s, b, h, i, j):
            return self.cap * torch.tanh((s + self.bias(h, i, j)) / self.cap) + shift

        def mask(b, h, i, j):
            return (i >= j) & (ids[i] == ids[j])

        return flex_attention(q, k, v, mod, mask_mod=mask, return_lse=True)


def run(fn, *args, params=()):
    tensors = [a for a in args if isinstance(a, torch.Tensor) and a.requires_grad]
    out, lse = fn(*args)
    grads = torch.autograd.grad(out.sin().sum() + lse.sum(), [*tensors, *params])
    return out, lse, *grads


def inputs(length=150, batch=1):
    case = make_case((length, length), heads=(2, 2), head_dim=8, batch=batch)
    return [t.requires_grad_(True) for t in (case.query, case.key, case.value)]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_module_with_mods_made_in_forward_compiles_whole(backend):
    layer, ids = Layer(), torch.arange(150) // 60
    want = run(layer, *inputs(), ids, params=[layer.slopes])
    got = run(torch.compile(layer, backend=backend, fullgraph=True), *inputs(), ids, params=[layer.slopes])
    torch.testing.assert_close(got, want)


def test_new_mask_values_need_no_recompile_and_change_the_result():
    layer = Layer()
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    counter = torch._dynamo.utils.counters
    for width in (60, 30, 7):
        ids = torch.arange(150) // width
        torch.testing.assert_close(run(compiled, *inputs(), ids), run(layer, *inputs(), ids))
    assert counter["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize("backend", BACKENDS)
def test_another_captured_number_is_seen(backend):
    def attend(q, k, v, cap):
        return flex_attention(q, k, v, lambda s, b, h, i, j: cap * torch.tanh(s / cap), return_lse=True)

    compiled = torch.compile(attend, backend=backend, fullgraph=True)
    for cap in (2, 3, 4, 2.5, 3.5):
        torch.testing.assert_close(run(compiled, *inputs(), cap), run(attend, *inputs(), cap))


def test_mods_passed_in_are_told_apart():
    def scaled(factor):
        return lambda s, b, h, i, j: s * factor

    def attend(q, k, v, mod):
        return flex_attention(q, k, v, mod, return_lse=True)

    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
    for mod in (scaled(2.0), scaled(3.0), lambda s, b, h, i, j: s + j):
        torch.testing.assert_close(run(compiled, *inputs(), mod), run(attend, *inputs(), mod))


@pytest.mark.parametrize("kind", ["ours", "torchs", "lists-only", "tabulated"])
def test_block_masks_made_outside_are_inputs(kind):
    length = 300
    keep = torch.rand(length, length, generator=torch.Generator().manual_seed(0)) < 0.4
    if kind == "ours":
        mask = flexbwd.create_block_mask(causal, None, None, length, length)
    elif kind == "torchs":
        from torch.nn.attention.flex_attention import create_block_mask

        mask = create_block_mask(causal, None, None, length, length, device="cpu")
    elif kind == "lists-only":
        ours = flexbwd.create_block_mask(causal, None, None, length, length)
        mask = flexbwd.BlockMask.from_kv_blocks(*ours.q_to_kv, seq_lengths=(length, length))
    else:
        mask = flexbwd.create_block_mask(keep, None, None, length, length)

    def attend(q, k, v):
        return flex_attention(q, k, v, block_mask=mask, return_lse=True)

    want = run(attend, *inputs(length))
    torch.testing.assert_close(run(torch.compile(attend, backend="aot_eager", fullgraph=True), *inputs(length)), want)


def test_dynamic_lengths_share_a_graph():
    def attend(q, k, v):
        return flex_attention(q, k, v, lambda s, b, h, i, j: s - (i - j), mask_mod=causal, return_lse=True)

    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True, dynamic=True)
    counter = torch._dynamo.utils.counters
    for length in (150, 301, 1000):  # one block alone is a size of its own to torch
        torch.testing.assert_close(run(compiled, *inputs(length)), run(attend, *inputs(length)))
    assert counter["stats"]["unique_graphs"] == 1


def test_hand_written_backward_is_used():
    def mod(s, b, h, i, j):
        return 2 * s

    def wrong(g, s, b, h, i, j):
        return 5 * g

    def attend(q, k, v):
        return flex_attention(q, k, v, mod, score_mod_bwd=wrong, return_lse=True)

    torch.testing.assert_close(
        run(torch.compile(attend, backend="aot_eager", fullgraph=True), *inputs()), run(attend, *inputs())
    )


def test_fake_tensors_flow_through():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        q = torch.empty(2, 4, 100, 16).transpose(1, 2).contiguous().transpose(1, 2)
        k, v = torch.empty(2, 2, 130, 16), torch.empty(2, 2, 130, 24)
        bias = torch.empty(4)
        out, lse = flex_attention(q, k, v, lambda s, b, h, i, j: s + bias[h], mask_mod=causal, return_lse=True)
    assert out.shape == (2, 4, 100, 24)
    assert lse.shape == (2, 4, 100)
    assert out.transpose(1, 2).is_contiguous()


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_inductor_compiles_the_layer():
    layer, ids = Layer(), torch.arange(150) // 60
    want = run(layer, *inputs(), ids, params=[layer.slopes])
    got = run(torch.compile(layer, fullgraph=True), *inputs(), ids, params=[layer.slopes])
    torch.testing.assert_close(got, want)
