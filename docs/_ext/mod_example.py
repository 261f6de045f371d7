"""Parts of the page that follows one mod from Python into the kernel, made from the code itself."""

from __future__ import annotations

import importlib.util
import inspect
import textwrap
from typing import Any

import torch
from torch import Tensor

from flexbwd import check_mod
from flexbwd.modgraph.extents import Extents
from flexbwd.modgraph.frontend import ModKind, trace
from flexbwd.modgraph.ir import to_text, topological
from flexbwd.modgraph.plan_mods import build_mod_plan
from flexbwd.sm90.mods import ModConfig, ModUse

slopes = torch.full((8,), 0.1, requires_grad=True)


def capped_alibi(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return 30 * torch.tanh(score / 30) + slopes[h] * (kv_idx - q_idx)


_TIERS = {
    "UNIFORM": "once per work item",
    "Q": "once per query row",
    "KV": "once per key",
    "DIFFERENCE": "once per tile, then stepped from element to element",
}


def source() -> str:
    """The mod, as a user would write it."""
    text = inspect.getsource(capped_alibi).replace(": Tensor", "").replace(" -> Tensor", "")
    return f"```python\nimport torch\n\nslopes = torch.full((8,), 0.1, requires_grad=True)\n\n\n{text}```"


def report() -> str:
    """What `check_mod` says of it."""
    lines = str(check_mod(capped_alibi)).splitlines()
    return "\n".join(["```text", "capped_alibi", *lines[1:], "```"])


def config() -> tuple[Any, list[str]]:
    """The lowered mod as the backward gets it, and the names of its captures."""
    traced, captures = trace(capped_alibi, ModKind.SCORE, device="cpu")
    plan = build_mod_plan(traced, None, None)
    use = ModUse(Extents(1, 8, 4096, 4096), (128, 128), backward=True)
    return ModConfig.of(plan, captures, use)[0], [c.name for c in plan.captures]


def tiers() -> str:
    """Every value that is not a constant or an input, in order, and how often it is computed."""
    made, names = config()
    graph = made.graph
    values = [node for node in topological([graph.score, graph.factor]) if node.args]
    aliases = {node: f"v{n + 1}" for n, node in enumerate(values)}
    roots = {graph.score: " = s'·log2(e)", graph.factor: " = J"}
    rows = ["| value | is | computed |", "|---|---|---|"]
    for node, name in aliases.items():
        text = to_text(node, names, aliases=aliases)
        rows.append(f"| {name}{roots.get(node, '')} | `{text}` | {_TIERS.get(graph.kinds[node].name, 'per element')} |")
    return "\n".join(rows)


def listing() -> str:
    """The kernel's instructions, where the DSL can be had."""
    if importlib.util.find_spec("cutlass") is None:
        return "(The CuTe DSL is not installed where these pages were built.)"
    import mod_kernel

    return textwrap.dedent("```text\n{}\n```").format(mod_kernel.body(config()[0]))
