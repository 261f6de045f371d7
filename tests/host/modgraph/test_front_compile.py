"""Under torch.compile a captured tensor is an input of the graph: read by its path, never baked in."""

from __future__ import annotations

import functools
import warnings

import pytest
import torch
from torch import nn

from flexbwd.modgraph.frontend import ModKind, capture_paths, trace

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
def test_paths_and_prologue_compile_into_graph_inputs(name):
    mod = FORMS[name]
    traced, tensors = trace(mod, ModKind.SCORE, device="cpu")
    paths, prologue = capture_paths(mod, traced), traced.prologue

    def total(x):
        return x + sum(t.sum() for t in prologue.run([p.read(mod) for p in paths]))

    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compiled = torch.compile(total, fullgraph=True, backend=backend)
        x = torch.zeros(())
        first = compiled(x)
        torch.testing.assert_close(first, total(x))
        learned = [t for t in tensors if t.requires_grad]
        with torch.no_grad():
            for t in learned:
                t += 0.5
        second = compiled(x)
    assert len(graphs) == 1
    assert not [n for n in graphs[0].graph.nodes if n.op == "get_attr"]
    torch.testing.assert_close(second, total(x))
    assert not torch.allclose(second, first)
    got = torch.autograd.grad(second, learned)
    want = torch.autograd.grad(total(x), learned)
    torch.testing.assert_close(got, want)
