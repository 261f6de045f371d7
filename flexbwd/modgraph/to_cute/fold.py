"""Sums and products regrouped so that as little as possible is left to do per element.

    log2(e) * (scale * raw + slope * d)    becomes    raw * (scale * log2(e)) + (slope * log2(e)) * d

A sum of products is collected, then built again from what changes seldom to what changes often: constants, values of
one head, of one row or column, of one diagonal, of one pair, and last of the score. Only nodes that tolerate a
rounding error take part (`analyze.exactness` says which).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import NamedTuple

from flexbwd.modgraph.ir import Builder, F, Node, topological

from .kinds import Kind, KindTable

LOG2_E, LN_2 = math.log2(math.e), math.log(2.0)
_SUMS = frozenset({"add", "sub", "mul", "neg"})


class Term(NamedTuple):
    coefficient: float
    factors: tuple[Node, ...]


def decompose(builder: Builder, roots: Sequence[Node], exact: Collection[Node], kinds: KindTable) -> list[Node]:
    """Quotients as products with reciprocals, exponentials to base 2, sigmoids as tanh: what the hardware has.

    Values of one head are left as they are: exact forms cost nothing there.
    """
    done: dict[Node, Node] = {}
    for node in topological(roots):
        args = [done[a] for a in node.args]
        plain = node.dtype is not F or node in exact or kinds[node] is Kind.UNIFORM
        made = None if plain else _decomposed(builder, node.op, args)
        done[node] = builder.rebuild(node, args) if made is None else made
    return [done[r] for r in roots]


def _decomposed(b: Builder, op: str, args: Sequence[Node]) -> Node | None:
    if not args:
        return None
    x = args[0]
    if op == "div":
        y = args[1]
        inverse = b.const(1.0 / y.value) if y.is_const and y.value != 0 else b.emit("rcp", y)
        return b.emit("mul", x, inverse)
    if op == "exp":
        return b.emit("exp2", b.emit("mul", x, b.const(LOG2_E)))
    if op == "expm1":
        return b.emit("sub", b.emit("exp2", b.emit("mul", x, b.const(LOG2_E))), b.const(1.0))
    if op == "log":
        return b.emit("mul", b.emit("log2", x), b.const(LN_2))
    if op == "log1p":
        return b.emit("mul", b.emit("log2", b.emit("add", x, b.const(1.0))), b.const(LN_2))
    if op == "sigmoid":
        half = b.const(0.5)
        return b.emit("add", b.emit("mul", half, b.emit("tanh", b.emit("mul", half, x))), half)
    return None


class Folder:
    """Regroups the float sums and products below `roots`."""

    def __init__(self, builder: Builder, roots: Sequence[Node], exact: Collection[Node], kinds: KindTable) -> None:
        self.builder, self.exact, self.kinds = builder, exact, kinds
        self.uses: dict[Node, int] = {}
        for node in [*(a for n in topological(roots) for a in n.args), *roots]:
            self.uses[node] = self.uses.get(node, 0) + 1
        self._done: dict[Node, Node] = {}

    def node(self, node: Node) -> Node:
        """The regrouped version of `node`."""
        if node not in self._done:
            self._done[node] = self.build(self.expand(node)) if self._is_sum(node) else self._rebuilt(node)
        return self._done[node]

    def _rebuilt(self, node: Node) -> Node:
        return self.builder.rebuild(node, [self.node(a) for a in node.args])

    def _is_sum(self, node: Node) -> bool:
        return node.dtype is F and node.op in _SUMS and node not in self.exact

    # -- to terms ------------------------------------------------------------------------------------------------------
    def expand(self, node: Node) -> list[Term]:
        """`node`, a sum or product, as terms."""
        if node.op == "neg":
            return [Term(-c, f) for c, f in self._terms(node.args[0])]
        x, y = node.args
        if node.op == "add":
            return [*self._terms(x), *self._terms(y)]
        if node.op == "sub":
            return [*self._terms(x), *(Term(-c, f) for c, f in self._terms(y))]
        for choice, other in ((x, y), (y, x)):
            pushed = self._pushed(choice, other)
            if pushed is not None:
                return [Term(1.0, (pushed,))]
        left, right = self._terms(x), self._terms(y)
        if len(left) > 1 and len(right) > 1:
            left, right = [Term(1.0, (self.build(left),))], [Term(1.0, (self.build(right),))]
        return [Term(a.coefficient * b.coefficient, a.factors + b.factors) for a in left for b in right]

    def _terms(self, node: Node) -> list[Term]:
        """An operand: its terms where they may be taken apart, else itself as a factor."""
        if node.is_const:
            return [Term(float(node.value), ())]
        if self._is_sum(node):
            terms = self.expand(node)
            if self.uses.get(node, 1) == 1 or (len(terms) == 1 and self._is_light(terms[0])):
                return terms
        return [Term(1.0, (self.node(node),))]

    def _is_light(self, term: Term) -> bool:
        """One operation per element: to do it again costs no more than to use its result."""
        if not term.factors:
            return True
        top = max(self.kinds[f] for f in term.factors)
        return sum(self.kinds[f] is top for f in term.factors) == 1

    def _pushed(self, choice: Node, other: Node) -> Node | None:
        """factor * where(c, x, y) as where(c, factor * x, factor * y), if that makes neither branch dearer."""
        if choice.op != "where" or self.uses.get(choice, 1) > 1 or self.kinds[other] >= self.kinds[choice]:
            return None
        top = self.kinds[choice]
        if not all(b.op in ("mul", "neg", "const") or self.kinds[b] < top for b in choice.args[1:]):
            return None
        branches = [self.node(self.builder.emit("mul", other, b)) for b in choice.args[1:]]
        return self.builder.emit("where", self.node(choice.args[0]), *branches)

    # -- from terms ----------------------------------------------------------------------------------------------------
    def build(self, terms: Sequence[Term]) -> Node:
        """The sum of `terms`, seldom-changing parts first."""
        b = self.builder
        constant = sum(t.coefficient for t in terms if not t.factors)
        rest = [t for t in terms if t.factors and t.coefficient]
        if not rest:
            return b.const(constant)
        top = max(self.kinds[f] for t in rest for f in t.factors)
        groups: dict[tuple[Node, ...], list[Term]] = {}
        lower = [Term(constant, ())] if constant else []
        for term in rest:
            high = tuple(sorted((f for f in term.factors if self.kinds[f] is top), key=lambda n: n.serial))
            low = Term(term.coefficient, tuple(f for f in term.factors if self.kinds[f] is not top))
            if high:
                groups.setdefault(high, []).append(low)
            else:
                lower.append(low)
        total = self.build(lower) if lower else None
        for factors, coefficients in groups.items():
            total = self._add(total, factors, self.build(coefficients))
        return total if total is not None else b.const(0.0)

    def _add(self, total: Node | None, factors: tuple[Node, ...], coefficient: Node) -> Node:
        b = self.builder
        product = factors[0]
        for factor in factors[1:]:
            product = b.emit("mul", product, factor)
        negative = coefficient.is_const and coefficient.value < 0
        if negative:
            coefficient = b.const(-coefficient.value)
        if not coefficient.is_value(1.0):
            product = b.emit("mul", product, coefficient)
        if total is None:
            return b.emit("neg", product) if negative else product
        return b.emit("sub" if negative else "add", total, product)


def fold(builder: Builder, roots: Sequence[Node], exact: Collection[Node], kinds: KindTable) -> list[Node]:
    """`roots`, regrouped; as they are where the graph is too deep to walk."""
    folder = Folder(builder, roots, exact, kinds)
    try:
        return [folder.node(r) for r in roots]
    except RecursionError:
        return list(roots)
