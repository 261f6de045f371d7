"""What a node's value depends on among the elements of a score tile: that says how often it is computed."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping

from flexbwd.modgraph.affine import Affine, affine_forms
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


def kinds(roots: Iterable[Node]) -> dict[Node, Kind]:
    """The kind of every node reachable from `roots`."""
    roots = list(roots)
    forms = affine_forms(roots)
    found: dict[Node, Kind] = {}
    for node in topological(roots):
        found[node] = kind_of_node(node, found, forms)
    return found


def kind_of_node(node: Node, found: Mapping[Node, Kind], forms: Mapping[Node, Affine]) -> Kind:
    """The kind of `node`, whose operands' are `found`; `forms` are affine forms."""
    if node.op == "in":
        return _POSITION.get(str(node.attr), Kind.UNIFORM)
    form = forms.get(node)
    if form is not None:
        if form.q and form.kv:
            return Kind.DIFFERENCE if form.q == -form.kv else Kind.PAIR
        return Kind.Q if form.q else Kind.KV if form.kv else Kind.UNIFORM
    return join(found[a] for a in node.args)


def join(kinds_of_operands: Iterable[Kind]) -> Kind:
    """The kind of a function of values of these kinds."""
    result = Kind.UNIFORM
    for kind in kinds_of_operands:
        if kind is Kind.UNIFORM or kind is result:
            continue
        result = kind if result is Kind.UNIFORM else max(kind, result, Kind.PAIR)
    return result
