"""What a prepared graph costs, in words: how often each of its operations runs in a forward kernel."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from flexbwd.modgraph.ir import Node, topological

from .kinds import Kind
from .prepare import ModGraph
from .words import wordable

_HOW_OFTEN = (
    ("per element", (Kind.SCORE, Kind.PAIR)),
    ("per diagonal of a tile", (Kind.DIFFERENCE,)),
    ("per key", (Kind.KV,)),
    ("per query", (Kind.Q,)),
    ("per head", (Kind.UNIFORM,)),
)
_FREE = frozenset({"in", "const", "detach"})


def summary(graph: ModGraph) -> list[str]:
    """One line per tier that has something to do, e.g. "per element: add, mul; 1 load"."""
    predicates = [p for p in (graph.keep, graph.mask) if p is not None]
    words = wordable(predicates, dict(graph.runs.get("kv_idx", {})), "kv_idx") if predicates else set()
    maximal = _outside(predicates, words)
    nodes = list(topological([r for r in (graph.score, graph.factor) if r is not None]))
    nodes += [n for n in maximal if n not in nodes]
    lines = []
    for name, kinds in _HOW_OFTEN:
        text = _counted([n for n in nodes if graph.kinds[n] in kinds and n.op not in _FREE])
        if text:
            lines.append(f"{name}: {text}")
    runs = sum(n in graph.runs.get("kv_idx", {}) for n in words)
    if runs:
        lines.append(f"as words of 32 elements: {runs} comparison{'s' if runs > 1 else ''}")
    return lines


def _outside(predicates: Collection[Node], words: Collection[Node]) -> list[Node]:
    """Nodes of the predicates that no word stands for."""
    found: dict[Node, None] = {}

    def visit(node: Node) -> None:
        if node not in words and node not in found:
            found[node] = None
            for a in node.args:
                visit(a)

    for predicate in predicates:
        visit(predicate)
    return list(found)


def _counted(nodes: Collection[Node]) -> str:
    loads = sum(n.op == "load" for n in nodes)
    ops = Counter(n.op for n in nodes if n.op != "load")
    parts = [", ".join(op if n == 1 else f"{n} {op}" for op, n in sorted(ops.items()))] if ops else []
    if loads:
        parts.append(f"{loads} load{'s' if loads > 1 else ''}")
    return "; ".join(parts)
