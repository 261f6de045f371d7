"""Captured tensors: every way to index them, what the prologue computes, and where gradients go.

Oracle: the callable itself, called with plain scalars one element at a time, and autograd through that.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from flexbwd.modgraph.derive import jacobians
from flexbwd.modgraph.frontend import ModKind, trace
from flexbwd.modgraph.ir import topological
from flexbwd.modgraph.to_torch import evaluate

B, H, S = 2, 3, 5
POINTS = list(itertools.product(range(B), range(H), (0, 2, 4), (1, 2, 4)))


def parameter(*shape):
    return nn.Parameter(torch.linspace(-1, 2, max(1, torch.Size(shape).numel()), dtype=torch.float64).reshape(shape))


BIAS, PAIR, SLOPES, GATE = parameter(B, H, S, S), parameter(H, 2 * S), parameter(H), parameter()
SQUARE, ONE = parameter(S, S), parameter(1)
DOCS = torch.tensor([[0, 0, 1, 1, 2], [0, 1, 1, 2, 2]], dtype=torch.int32)
BYTES = torch.tensor([3, 1, 2, 0, 4], dtype=torch.uint8)
OFFSET, COLUMN = torch.tensor(2), torch.tensor([1, 0, 2])
PARAMETERS = (BIAS, PAIR, SLOPES, GATE, SQUARE, ONE)


def points():
    b, h, q, k = torch.tensor(POINTS, dtype=torch.int32).unbind(1)
    return {"b": b, "h": h, "q_idx": q, "kv_idx": k}


def graph_values_and_gradients(traced, tensors):
    """The graph at `points()`, and the gradient of its sum for every captured parameter, through the prologue."""
    inputs = {"score": torch.linspace(-2, 2, len(POINTS), dtype=torch.float64), **points()}
    derived = traced.prologue.run(tensors)
    values = [d.detach() for d in derived]
    loads = [n for n in topological([traced.output]) if n.op == "load" and traced.captures[n.attr].requires_grad]
    slopes = jacobians(traced.builder, traced.output, loads)
    grads = [torch.zeros_like(v) for v in values]
    for load, slope in zip(loads, slopes, strict=True):
        factor = evaluate([slope], inputs, values, torch.float64)[0].double().expand(len(POINTS))
        index = [i.expand(len(POINTS)).long() for i in evaluate(load.args, inputs, values, torch.float64)]
        if index:
            grads[load.attr].index_put_(tuple(index), factor, accumulate=True)
        else:
            grads[load.attr] += factor.sum()
    flows = [(d, g) for d, g, c in zip(derived, grads, traced.captures, strict=True) if c.requires_grad]
    for p in PARAMETERS:
        p.grad = None
    if flows:
        torch.autograd.backward(*map(list, zip(*flows, strict=True)))
    (out,) = evaluate([traced.output], inputs, values, torch.float64)
    return out.expand(len(POINTS)), [p.grad for p in PARAMETERS]


def eager_values_and_gradients(mod):
    """The same, by calling `mod` once per element."""
    score = torch.linspace(-2, 2, len(POINTS), dtype=torch.float64)
    for p in PARAMETERS:
        p.grad = None
    out = torch.stack([mod(score[i], *map(torch.tensor, at)).double() for i, at in enumerate(POINTS)])
    if out.requires_grad:
        out.sum().backward()
    return out.detach(), [p.grad for p in PARAMETERS]


def doubled(x):
    return x * 2


def no_grad_table(s, b, h, q, k):
    with torch.no_grad():
        gate = torch.sigmoid(SLOPES)[h]
    return s * gate + SLOPES[h]


def no_grad_scalars(s, b, h, q, k):
    with torch.no_grad():
        gate = torch.sigmoid(SLOPES[h] * s)
    return s * gate + SLOPES[h] * GATE


INDEXING = {
    "all at once": lambda s, b, h, q, k: s + BIAS[b, h, q, k],
    "chained": lambda s, b, h, q, k: s + BIAS[b][h][q][k],
    "mixed": lambda s, b, h, q, k: s + BIAS[b, h][q, k] + BIAS[b][h, q][k],
    "kept dimension": lambda s, b, h, q, k: s + BIAS[b, :, q, 0][h] + BIAS[b, h, :, 1][k],
    "ellipsis": lambda s, b, h, q, k: s + BIAS[..., k][b, h, q] + BIAS[b, ..., 2][h, q],
    "none": lambda s, b, h, q, k: s + SLOPES[None, h][0] + SLOPES[:, None][h, 0] + SLOPES[h][None][0],
    "negative constant": lambda s, b, h, q, k: s + PAIR[h, -1] + PAIR[-2][k],
    "negative index": lambda s, b, h, q, k: s + PAIR[h, q - k],
    "negative index into a slice": lambda s, b, h, q, k: s + PAIR[:, 2:8][h, q - k - 1] + PAIR[h, 1:9][q - k],
    "strided slice": lambda s, b, h, q, k: s + PAIR[:, ::2][h, q] + PAIR[h, 1::2][k],
    "negative index into a slice of a row": lambda s, b, h, q, k: s + PAIR[h][1:9][q - k] + PAIR[h][1::3][b - 1],
    "relative": lambda s, b, h, q, k: s + PAIR[h, q - k + S - 1],
    "0-dim": lambda s, b, h, q, k: s * GATE + GATE,
    "one element": lambda s, b, h, q, k: s + ONE[0] * ONE.squeeze() + ONE.view(()),
    "used twice": lambda s, b, h, q, k: s + SLOPES[h] * SLOPES[b] + SLOPES[h],
    "captured index": lambda s, b, h, q, k: s + PAIR[COLUMN[h], q] + PAIR[h, OFFSET] + PAIR[:, OFFSET][h],
    "index of an index": lambda s, b, h, q, k: s + SLOPES[DOCS[b, q]] + PAIR[h, DOCS[b, k] + 1],
    "vector index": lambda s, b, h, q, k: s + PAIR[COLUMN][h, q] + PAIR[h, COLUMN][b] + PAIR[COLUMN, h][q % 3],
    "long and bool": lambda s, b, h, q, k: s + PAIR[h.long(), (q > k).int()],
    "transposed": lambda s, b, h, q, k: s + PAIR.t()[q, h] + PAIR.T[k, h] + BIAS.transpose(1, 2)[b, q, h, k],
    "permuted": lambda s, b, h, q, k: s + BIAS.permute(3, 0, 2, 1)[k, b, q, h] + BIAS.mT[b, h, k, q],
    "expanded": lambda s, b, h, q, k: s + SLOPES[:, None].expand(H, S)[h, q] + SLOPES.expand(B, H)[b, h],
    "unbind": lambda s, b, h, q, k: s + PAIR.unbind(0)[1][q] + PAIR[h].unbind()[2] + BIAS[b, h].unbind(-1)[0][q],
    "reshaped": lambda s, b, h, q, k: s + BIAS.reshape(-1, S)[(b * H + h) * S + q, k] + BIAS.flatten()[q],
    "reshaped row": lambda s, b, h, q, k: s + BIAS[b, h].reshape(-1)[q * S + k] + BIAS[b].view(-1, S)[h * S + q][k],
    "reshaped row, negative": lambda s, b, h, q, k: s + BIAS[b, h].reshape(-1)[q - k],
    "take": lambda s, b, h, q, k: s + torch.take(SLOPES, h.long()) + PAIR.take((h * 10 + q).long()),
    "index_select": lambda s, b, h, q, k: s + PAIR.index_select(0, h)[0, q] + SLOPES.index_select(0, h)[0],
    "gather": lambda s, b, h, q, k: s + SLOPES.gather(0, h.long()[None])[0] + PAIR[h].gather(0, q.long()[None])[0],
    "embedding": lambda s, b, h, q, k: s + F.embedding(h, PAIR)[q] + F.embedding(q.long(), SQUARE)[k],
    "vector arithmetic": lambda s, b, h, q, k: s + (PAIR[h] * 2 + SLOPES[h])[k] + torch.exp(PAIR[h])[q],
    "broadcast arithmetic": lambda s, b, h, q, k: s + (SQUARE[q] + SQUARE[:, :1].t())[0, k] + (ONE + PAIR[h])[q],
    "row times table": lambda s, b, h, q, k: s + (SQUARE[q][None] * SQUARE)[k, 1] + torch.where(q > k, PAIR[h], 0.0)[k],
    "where of rows": lambda s, b, h, q, k: s + torch.where(q > k, PAIR[h], PAIR[b])[k],
    "unsqueezed row": lambda s, b, h, q, k: s + PAIR[h][None].squeeze()[k] + PAIR[h][:, None].expand(10, 2)[q, 1],
    "exp of slopes": lambda s, b, h, q, k: s + torch.exp(SLOPES)[h] * (q - k).abs(),
    "computed table": lambda s, b, h, q, k: s + (SQUARE @ SQUARE)[q, k] + SQUARE.softmax(-1)[q, k] * SQUARE.sum(0)[k],
    "computed 0-dim": lambda s, b, h, q, k: s * GATE.exp() + SLOPES.sum() * PAIR.mean() + SQUARE.max(),
    "stacked": lambda s, b, h, q, k: s + torch.stack([SLOPES, SLOPES * 2])[b, h] + torch.cat([SLOPES, ONE])[h + 1],
    "helper": lambda s, b, h, q, k: s + doubled(SLOPES)[h] + doubled(SLOPES[h]),
    "arange": lambda s, b, h, q, k: s + torch.arange(S)[q] * torch.arange(0.0, 1.0, 0.1)[k],
    "literal": lambda s, b, h, q, k: s + torch.tensor([1.0, 2.0, 4.0])[h] * torch.tensor(0.5) + torch.tensor([3])[0],
    "literal slopes": lambda s, b, h, q, k: s + torch.exp2(-torch.arange(1, H + 1))[h] * (q - k),
    "constant tables": lambda s, b, h, q, k: s + torch.zeros(S)[q] + torch.full((S,), 2.0)[k] + torch.eye(S)[q, k],
    "bytes": lambda s, b, h, q, k: s + BYTES[q] + PAIR[h, BYTES[k].long()] + (BYTES[q] == 3) * SLOPES[h],
    "detached": lambda s, b, h, q, k: s + SLOPES.detach()[h] * SLOPES[h] + SLOPES[h].detach() + SLOPES.data[h],
    "detached computation": lambda s, b, h, q, k: s + SLOPES.exp().detach()[h] * GATE + (GATE * 2).detach() * s,
    "no_grad": no_grad_table,
    "no_grad, per element": no_grad_scalars,
    "ignores the score": lambda s, b, h, q, k: SQUARE[q, k],
    "boolean mask of a table": lambda s, b, h, q, k: s + torch.where(SQUARE > 0, SQUARE, 0.0)[q, k],
    "split": lambda s, b, h, q, k: s + PAIR.split(5, dim=1)[1][h, q] + PAIR.chunk(2, 1)[0][h, k],
    "max with indices": lambda s, b, h, q, k: s + SQUARE.max(0).values[k] + SQUARE.topk(2, 0).values[b, q],
}  # fmt: skip


@pytest.mark.parametrize("name", INDEXING)
def test_values_and_gradients_match_elementwise_calls(name):
    mod = INDEXING[name]
    traced, tensors = trace(mod, ModKind.SCORE, device="cpu")
    got, got_grads = graph_values_and_gradients(traced, tensors)
    want, want_grads = eager_values_and_gradients(mod)
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)
    for p, g, w in zip(PARAMETERS, got_grads, want_grads, strict=True):
        torch.testing.assert_close(
            torch.zeros_like(p) if g is None else g, torch.zeros_like(p) if w is None else w, rtol=1e-6, atol=1e-6
        )


@pytest.mark.parametrize(
    "mod",
    [
        INDEXING["chained"],
        INDEXING["transposed"],
        lambda s, b, h, q, k: s + PAIR[0][k] + PAIR[:, 0][h] + SLOPES.expand(B, H)[b, h] + BIAS[:, h, :, k][b, q],
        lambda s, b, h, q, k: s + SLOPES.detach()[h],
    ],
    ids=["chained", "transposed", "constant and expanded", "detached"],
)
def test_pure_views_cost_no_prologue(mod):
    traced, tensors = trace(mod, ModKind.SCORE, device="cpu")
    assert traced.prologue.is_identity
    assert all(a is b for a, b in zip(traced.prologue.run(tensors), tensors, strict=True))


def test_a_chained_load_is_the_same_graph_as_a_flat_one():
    first, _ = trace(INDEXING["chained"], ModKind.SCORE, device="cpu")
    second, _ = trace(INDEXING["all at once"], ModKind.SCORE, device="cpu")
    assert repr(first.output) == repr(second.output) == "(score + capture0[b, h, q_idx, kv_idx])"
    assert first.captures == second.captures


def test_what_nobody_reads_is_not_computed():
    def mod(score, b, h, q_idx, kv_idx):
        _unused = (SQUARE @ SQUARE)[q_idx, kv_idx] * GATE
        return score + SLOPES[h]

    traced, tensors = trace(mod, ModKind.SCORE, device="cpu")
    assert len(tensors) == 1
    assert tensors[0] is SLOPES
    assert not traced.prologue.steps


def test_captures_carry_names_shapes_and_gradients():
    def mod(score, b, h, q_idx, kv_idx):
        return score + torch.exp(SLOPES)[h] * GATE + DOCS[b, q_idx] + SLOPES.detach().exp()[h]

    traced, _ = trace(mod, ModKind.SCORE, device="cpu")
    assert [(c.name, c.shape, c.requires_grad) for c in traced.captures] == [
        ("exp(SLOPES)", (H,), True),
        ("GATE", (), True),
        ("DOCS", (B, S), False),
        ("exp(detach(SLOPES))", (H,), False),
    ]
    assert traced.captures[2].dtype == torch.int32


def test_ambient_modes_do_not_reach_the_trace():
    mod = INDEXING["exp of slopes"]
    want, _ = trace(mod, ModKind.SCORE, device="cpu")
    from flexbwd.modgraph.frontend import clear_cache

    for context in (torch.no_grad(), torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16)):
        clear_cache()
        with context:
            got, _ = trace(mod, ModKind.SCORE, device="cpu")
        assert got.signature == want.signature


def test_a_fake_capture_is_traced_like_a_real_one():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        table = torch.empty(H, S)
        traced, tensors = trace(lambda s, b, h, q, k: s + table.exp()[h, q], ModKind.SCORE, device="cpu")
        (derived,) = traced.prologue.run(tensors)
    assert tensors[0] is table
    assert derived.shape == (H, S)


def test_numbers_of_the_mods_own_text_are_python_numbers():
    def mod(score, b, h, q_idx, kv_idx):
        gain = torch.tensor(2.0).item() + float(torch.tensor([1, 2])[1]) + int(torch.full((), 3))
        return score * gain if torch.tensor(True) else score

    traced, _ = trace(mod, ModKind.SCORE, device="cpu")
    assert repr(traced.output) == "(score * 7.0)"


def test_factories_on_a_device_that_is_not_here_are_traced():
    def mod(score, b, h, q_idx, kv_idx):
        slopes = torch.exp2(-torch.arange(1, H + 1, device=score.device))
        table = torch.tensor([1.0, 2.0, 3.0], device=q_idx.device)
        return score + slopes[h] * table[kv_idx] + torch.full((), 2.0, device=b.device) * torch.ones_like(score)

    traced, _ = trace(mod, ModKind.SCORE, device="cuda")
    assert [c.shape for c in traced.captures] == [(H,), (3,)]
    assert "2.0" in repr(traced.output)
