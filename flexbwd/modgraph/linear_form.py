"""Integer expressions as sums: offset + Σ factor · floor(node / divisor), terms of one node collected.

`q - q % W` becomes `W · (q // W)`: what interval arithmetic loses by visiting `q` twice, the sum keeps.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from .ir import Node

Atom = tuple[Node, int]  # floor(node / divisor)


@dataclass(frozen=True, eq=False)
class LinearForm:
    """Equal to the expression modulo 2**32 (or 2**64): exact wherever its value fits the type."""

    offset: int
    terms: dict[Atom, int]
    merged: bool  # some node occurred more than once: bounds of the sum beat plain interval arithmetic

    def shares(self, other: LinearForm) -> bool:
        return not self.terms.keys().isdisjoint(other.terms)

    def plus(self, other: LinearForm) -> LinearForm:
        terms = dict(self.terms)
        for atom, factor in other.terms.items():
            terms[atom] = terms.get(atom, 0) + factor
        terms = {atom: factor for atom, factor in terms.items() if factor}
        return LinearForm(self.offset + other.offset, terms, self.merged or other.merged or self.shares(other))

    def times(self, factor: int) -> LinearForm:
        if factor == 0:
            return LinearForm(0, {}, True)
        return LinearForm(self.offset * factor, {a: f * factor for a, f in self.terms.items()}, self.merged)

    def minus(self, other: LinearForm) -> LinearForm:
        return self.plus(other.times(-1))


def linear_forms(nodes: Iterable[Node]) -> dict[Node, LinearForm]:
    """The sums that the integer nodes of a graph are; `nodes` in topological order."""
    forms: dict[Node, LinearForm] = {}
    for node in nodes:
        if node.dtype.is_int:
            forms[node] = _form(node, forms)
    return forms


def _form(node: Node, forms: Mapping[Node, LinearForm]) -> LinearForm:
    """A node that is no sum is its own single term."""
    if node.op == "const":
        return LinearForm(int(node.value), {}, False)
    if node.op in ("add", "sub"):
        x, y = (forms[a] for a in node.args)
        return x.plus(y) if node.op == "add" else x.minus(y)
    if node.op == "neg":
        return forms[node.args[0]].times(-1)
    if node.op == "mul":
        for x_node, factor in (node.args, node.args[::-1]):
            if factor.is_const:
                return forms[x_node].times(int(factor.value))
    if node.op in ("fdiv", "mod") and node.args[1].is_const and int(node.args[1].value) > 0:
        dividend, divisor = node.args[0], int(node.args[1].value)
        quotient = LinearForm(0, {(_same_number(dividend), divisor): 1}, False)
        if node.op == "fdiv":
            return quotient
        remainder = forms[dividend].minus(quotient.times(divisor))
        return LinearForm(remainder.offset, remainder.terms, False)
    return LinearForm(0, {(_same_number(node), 1): 1}, False)


def _same_number(node: Node) -> Node:
    """A widened input or load is the same number as itself; other casts may follow a wrap."""
    widened = node.op == "cast" and node.args[0].dtype.is_int and node.args[0].op in ("in", "load")
    return node.args[0] if widened else node
