"""Float values that are straight lines along the elements: one multiply-add from the first element's value.

slope * float(q - kv)   over columns   is   value at column 0  +  offset * slope
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from flexbwd.modgraph.ir import Builder, F, Node, topological

from .kinds import Kind, KindTable
from .lanes import Bounds

_EXACT_FLOAT = 1 << 24  # whole numbers up to it are floats
_STRAIGHT = (Kind.Q, Kind.KV, Kind.DIFFERENCE)


def slopes(
    builder: Builder,
    roots: Sequence[Node],
    kinds: KindTable,
    exact: Collection[Node],
    bounds: Bounds,
) -> dict[Node, Node]:
    """By float node: what it gains per step of its coordinate (of q - kv, where it reads the difference)."""
    found: dict[Node, Node] = {}
    for node in topological(roots):
        if node.dtype is not F or kinds[node] not in _STRAIGHT:
            continue
        slope = _slope(builder, node, kinds, found)
        if slope is not None and (node not in exact or _is_whole(node, bounds)):
            found[node] = slope
    return found


def _is_whole(node: Node, bounds: Bounds) -> bool:
    """A cast of integers that floats hold: stepping it is exact."""
    low, high = bounds.get(node.args[0], (-(2**31), 2**31)) if node.op == "cast" else (-(2**31), 2**31)
    return low > -_EXACT_FLOAT and high < _EXACT_FLOAT


def _slope(b: Builder, node: Node, kinds: KindTable, found: dict[Node, Node]) -> Node | None:
    if node.op == "cast":
        step = kinds.step(node.args[0])
        return None if step is None else b.const(float(step[1] if kinds[node] is Kind.KV else step[0]))
    if node.op == "neg":
        return b.emit("neg", found[node.args[0]]) if node.args[0] in found else None
    if node.op not in ("add", "sub", "mul"):
        return None
    x, y = node.args
    flat = [kinds[a] is Kind.UNIFORM for a in node.args]
    if node.op == "mul":
        if flat[1] and x in found:
            return b.emit("mul", found[x], y)
        return b.emit("mul", found[y], x) if flat[0] and y in found else None
    if flat[1] and x in found:
        return found[x]
    if flat[0] and y in found:
        return found[y] if node.op == "add" else b.emit("neg", found[y])
    if x in found and y in found and kinds[x] is kinds[y]:
        return b.emit(node.op, found[x], found[y])
    return None
