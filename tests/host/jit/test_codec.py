"""Configurations as JSON: one text for equal ones, and a round trip that keeps graphs graphs."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from flexbwd.errors import ConfigError
from flexbwd.jit import codec
from flexbwd.modgraph.ir import Builder, topological
from flexbwd.sm90.tile import FwdTile
from flexbwd.sm90.walks import WalkKind


@dataclasses.dataclass(frozen=True)
class Config:
    tile: object = FwdTile(64, 64)
    dtype: torch.dtype = torch.bfloat16
    walk: tuple = WalkKind(has_lo=True)
    scale: float = math.inf
    sizes: tuple[int, ...] = (1, 2)
    graph: object = dataclasses.field(default=None, compare=False)


def test_equal_configurations_have_one_text():
    assert codec.canonical(Config()) == codec.canonical(Config(graph=object()))
    others = [Config(tile=FwdTile(64, 64, stages=3)), Config(dtype=torch.float16), Config(walk=WalkKind(has_hi=True)),
              Config(scale=1.5), Config(sizes=(2, 1)), Config(walk=(False, True, False))]  # fmt: skip
    assert len({codec.canonical(c) for c in [Config(), *others]}) == 7


@pytest.mark.parametrize(
    "value", [object(), [1], lambda: 0, torch.zeros(1)], ids=["object", "list", "function", "tensor"]
)
def test_what_has_no_text_is_refused(value):
    with pytest.raises(ConfigError, match="canonical form"):
        codec.canonical(Config(sizes=value))


def test_what_is_compared_by_identity_is_in_no_key():
    with pytest.raises(ConfigError, match="identity"):
        codec.canonical(Builder().const(1))


@pytest.mark.parametrize(
    "value",
    [None, True, -3, 0.1, -0.0, math.inf, "text", torch.float16, (1, (2.5,)), frozenset({1, 2}), {(1, 2): 3.0},
     FwdTile(128, 64, stages=3), WalkKind(lists=True)],
    ids=repr,
)  # fmt: skip
def test_values_come_back(value):
    back = codec.from_wire(codec.to_wire(value))
    assert back == value and type(back) is type(value)
    assert not isinstance(value, float) or math.copysign(1, back) == math.copysign(1, value)


def test_nan_comes_back():
    assert math.isnan(codec.from_wire(codec.to_wire((math.nan,)))[0])


def test_a_deep_graph_with_shared_nodes_comes_back_as_it_was():
    b = Builder()
    node = b.input("score")
    for i in range(3000):  # as a tree 2 ** 3000 nodes
        node = b.raw("add", node.dtype, (node, node) if i % 2 else (node, b.const(float(i))))
    back, same = codec.from_wire(codec.to_wire((node, node)))
    assert back is same
    originals, copies = list(topological([node])), list(topological([back]))
    assert [(n.op, n.dtype, n.attr, n.serial) for n in originals] == [(n.op, n.dtype, n.attr, n.serial) for n in copies]


@pytest.mark.parametrize("path", ["os:system", "flexbwdx.y:z", "subprocess:Popen", ":x"])
def test_nothing_outside_the_package_is_looked_up(path):
    with pytest.raises(ConfigError, match="not part of flexbwd"):
        codec.find(path)
    for document in ({"class": path, "fields": {}}, {"enum": path, "name": "X"}, {"new": path}):
        with pytest.raises(ConfigError, match="not part of flexbwd"):
            codec.from_wire({"shared": [], "value": document})


@pytest.mark.parametrize("item", [{"class": "flexbwd.jit.codec:find", "fields": {}}, {"dtype": "save"},
                                  {"enum": "flexbwd.sm90.tile:FwdTile", "name": "X"}])  # fmt: skip
def test_only_what_configurations_are_made_of_is_made(item):
    with pytest.raises(ConfigError, match="nothing that a kernel configuration is made of"):
        codec.from_wire({"shared": [], "value": item})


def test_a_configuration_with_mods_comes_back_whole():
    from flexbwd.modgraph.extents import Extents
    from flexbwd.modgraph.frontend import trace
    from flexbwd.modgraph.ir import canonical_hash
    from flexbwd.modgraph.plan_mods import build_mod_plan
    from flexbwd.modgraph.trace import ModKind
    from flexbwd.sm90.mods import ModConfig, ModUse

    slopes = torch.rand(4, requires_grad=True)

    def biased(score, b, h, q_idx, kv_idx):
        return 5 * torch.tanh(score / 5) + slopes[h] * (kv_idx - q_idx)

    def window(b, h, q_idx, kv_idx):
        return (q_idx >= kv_idx) & (q_idx - kv_idx < 300)

    score, captures = trace(biased, ModKind.SCORE, device="cpu")
    mask, _ = trace(window, ModKind.MASK, device="cpu")
    use = ModUse(Extents(1, 4, 1000, 1000), (64, 128), backward=True)
    config, _ = ModConfig.of(build_mod_plan(score, None, mask), captures, use)
    back = codec.from_wire(codec.to_wire(config))
    assert back == config and codec.canonical(back) == codec.canonical(config)
    assert canonical_hash(back.graph.roots) == canonical_hash(config.graph.roots)
    for field in dataclasses.fields(config.graph):
        mine, other = getattr(config.graph, field.name), getattr(back.graph, field.name)
        if field.name in ("guards", "shifts", "slopes", "nonnegative", "exact"):
            assert sorted(canonical_hash([n]) for n in mine) == sorted(canonical_hash([n]) for n in other), field.name
        assert type(mine) is type(other), field.name
