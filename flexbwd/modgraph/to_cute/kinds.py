"""What a node's value depends on among the elements of a score tile: that says how often it is computed."""

from __future__ import annotations

import enum
from collections.abc import Iterable

from flexbwd.modgraph.ir import INPUTS, Builder, DType, F, Node, topological

#: Leaves of prepared graphs beside the mods' own inputs: the raw product q·k, scale, and scale * log2(e).
RAW, SCALE, SCALE_LOG2 = "raw", "scale", "scale_log2"
_LEAVES: dict[str, DType] = {**INPUTS, RAW: F, SCALE: F, SCALE_LOG2: F}


class LoweringBuilder(Builder):
    """A Builder that knows the kernels' leaves."""

    def input(self, name: str) -> Node:
        return self._intern("in", _LEAVES[name], (), name)


class Kind(enum.IntEnum):
    """Ordered by cost: a value of a higher kind is computed more often."""

    UNIFORM = 0  # b, h, scale, captures read at those
    Q = 1  # q_idx
    KV = 2  # kv_idx
    DIFFERENCE = 3  # q_idx - kv_idx: one value per diagonal
    PAIR = 4
    SCORE = 5  # reads the score itself


_POSITION = {"q_idx": Kind.Q, "kv_idx": Kind.KV, RAW: Kind.SCORE, "score": Kind.SCORE, "grad": Kind.SCORE}


def join(kinds_of_operands: Iterable[Kind]) -> Kind:
    """The kind of a function of values of these kinds."""
    result = Kind.UNIFORM
    for kind in kinds_of_operands:
        if kind is Kind.UNIFORM or kind is result:
            continue
        result = kind if result is Kind.UNIFORM else max(kind, result, Kind.PAIR)
    return result


Step = tuple[int, int]  # what an integer gains per step of q_idx and of kv_idx, modulo its width
_STILL: Step = (0, 0)


class KindTable:
    """Kinds of nodes, found when asked for; and the steps of integers that are affine in q_idx and kv_idx."""

    wire_empty = True  # it fills itself: a worker process starts with an empty one (jit/codec.py)

    def __init__(self) -> None:
        self._known: dict[Node, tuple[Kind, Step | None]] = {}

    def __getitem__(self, node: Node) -> Kind:
        return self._of(node)[0]

    def step(self, node: Node) -> Step | None:
        """The steps of an affine integer that moves at all; None of anything else."""
        step = self._of(node)[1]
        return None if step == _STILL else step

    def _of(self, node: Node) -> tuple[Kind, Step | None]:
        known = self._known.get(node)
        if known is None:
            if all(a in self._known for a in node.args):
                self._known[node] = self._found(node)
            else:
                for n in topological([node]):
                    if n not in self._known:
                        self._known[n] = self._found(n)
            known = self._known[node]
        return known

    def _found(self, node: Node) -> tuple[Kind, Step | None]:
        """`node`, whose operands are known."""
        step = self._step(node) if node.dtype.is_int else None
        if step is not None:
            q, kv = step
            if q and kv:
                return Kind.DIFFERENCE if q == -kv else Kind.PAIR, step
            return Kind.Q if q else Kind.KV if kv else Kind.UNIFORM, step
        if node.op == "in":
            return _POSITION.get(str(node.attr), Kind.UNIFORM), None
        return join(self._known[a][0] for a in node.args), None

    def _step(self, node: Node) -> Step | None:
        if node.op == "in":
            return {"q_idx": (1, 0), "kv_idx": (0, 1)}.get(str(node.attr), _STILL)
        if all(self._known[a][0] is Kind.UNIFORM for a in node.args):
            return _STILL
        steps = [s for s in (self._known[a][1] for a in node.args) if s is not None]
        if len(steps) < len(node.args) or node.op not in ("add", "sub", "neg", "cast", "mul"):
            return None
        (q, kv), *rest = steps
        if node.op == "cast":
            return q, kv
        if node.op == "neg":
            return -q, -kv
        if node.op != "mul":
            sign = 1 if node.op == "add" else -1
            return q + sign * rest[0][0], kv + sign * rest[0][1]
        for factor, (a, b) in zip(reversed(node.args), steps, strict=True):
            if factor.is_const:
                return a * int(factor.value), b * int(factor.value)
        return None
