"""Under torch.compile a captured tensor is an input of the graph, wherever the mod keeps it; never baked in."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn

from flexbwd import flex_attention
from flexbwd.modgraph.frontend import ModKind, trace

H, S = 4, 16
GLOBAL = nn.Parameter(torch.linspace(0, 1, H * S).reshape(H, S))
SLOPES, GAIN = nn.Parameter(torch.linspace(-1, 1, H)), nn.Parameter(torch.tensor(2.0))

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch.compile's own imports


def closure():
    table, docs = nn.Parameter(torch.linspace(0, 2, H * S).reshape(H, S)), torch.arange(S)

    def mod(score, b, h, q_idx, kv_idx):
        same = docs[q_idx] == docs[kv_idx]
        literal = torch.tensor([1.0, 2.0, 3.0, 4.0])[h] + torch.arange(S)[q_idx]
        return score + table.t()[q_idx, h] * torch.exp(SLOPES)[h] + GLOBAL[h, kv_idx] * same * literal

    return mod


class Module(nn.Module):
    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.ones(H))
        self.tables = nn.ParameterList([nn.Parameter(torch.ones(H))])

    def forward(self, score, b, h, q_idx, kv_idx):
        return score + self.bias[h] + self.tables[0].exp()[h]

    def mod(self, score, b, h, q_idx, kv_idx):
        return score + self.bias.exp()[h]


def taking(x, score, b, h, q_idx, kv_idx):
    return score + x[h]


def with_defaults(score, b, h, q_idx, kv_idx, x=SLOPES, *, gain=GAIN):
    return score + x[h] * gain


def without_gradient(score, b, h, q_idx, kv_idx):
    with torch.no_grad():
        gate = torch.sigmoid(SLOPES)
    return score * gate[h] + torch.stack([SLOPES, SLOPES * 2]).amax(0)[h]


MODULE = Module()
FORMS = {
    "closure and global": closure(),
    "closure in a closure": (lambda f: lambda s, b, h, q, k: f(s, b, h, q, k) * 2)(closure()),
    "module": MODULE,
    "bound method": MODULE.mod,
    "closure over module": (lambda m: lambda s, b, h, q, k: m(s, b, h, q, k))(MODULE),
    "partial": functools.partial(taking, SLOPES),
    "defaults": with_defaults,
    "no_grad": without_gradient,
}


@pytest.mark.parametrize("name", FORMS)
def test_a_mod_of_any_origin_is_compiled_with_its_tensors_as_inputs(name):
    mod = FORMS[name]
    q, k, v = (torch.linspace(-1, 1, H * S * 4).reshape(1, H, S, 4).requires_grad_(True) for _ in range(3))
    learned = [t for t in trace(mod, ModKind.SCORE, device="cpu")[1] if t.requires_grad]
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    def attend(q, k, v):
        return flex_attention(q, k, v, mod)

    torch._dynamo.reset()
    compiled = torch.compile(attend, fullgraph=True, backend=backend)
    first = compiled(q, k, v)
    torch.testing.assert_close(first, attend(q, k, v))
    with torch.no_grad():
        for t in learned:
            t.mul_(1.5)
    second = compiled(q, k, v)
    assert len(graphs) == 1
    torch.testing.assert_close(second, attend(q, k, v))
    up = torch.linspace(-1, 2, second.numel()).view_as(second)
    torch.testing.assert_close(
        torch.autograd.grad(second, (q, *learned), up), torch.autograd.grad(attend(q, k, v), (q, *learned), up)
    )
