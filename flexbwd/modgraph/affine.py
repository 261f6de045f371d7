"""Integer index expressions as sums that are linear in q_idx and kv_idx."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .ir import Node, topological

_VARYING = ("q_idx", "kv_idx", "score", "grad")  # differ between the elements of one head


@dataclass(frozen=True, eq=False)
class Affine:
    """const + q · q_idx + kv · kv_idx + Σ factor · node, where no node depends on q_idx or kv_idx.

    Equal to the expression modulo 2**32 (or 2**64): exact wherever nothing overflows.
    """

    const: int = 0
    q: int = 0
    kv: int = 0
    uniform: Mapping[Node, int] | None = None  # factors are nonzero

    @property
    def terms(self) -> Mapping[Node, int]:
        return self.uniform or {}

    @property
    def is_difference(self) -> bool:
        """A multiple of q_idx − kv_idx, plus what is the same for a whole head."""
        return self.q == -self.kv and self.q != 0

    def plus(self, other: Affine, sign: int = 1) -> Affine:
        uniform = dict(self.terms)
        for node, factor in other.terms.items():
            uniform[node] = uniform.get(node, 0) + sign * factor
        uniform = {n: f for n, f in uniform.items() if f}
        return Affine(self.const + sign * other.const, self.q + sign * other.q, self.kv + sign * other.kv, uniform)

    def times(self, factor: int) -> Affine:
        uniform = {n: f * factor for n, f in self.terms.items() if f * factor}
        return Affine(self.const * factor, self.q * factor, self.kv * factor, uniform)


def affine(node: Node) -> Affine | None:
    """The affine form of an integer node, or None where it has none (`q_idx // 2`, `table[q_idx]`)."""
    return affine_forms([node]).get(node)


def affine_forms(roots: Sequence[Node]) -> dict[Node, Affine]:
    """Affine forms of all integer nodes reachable from `roots` that have one."""
    forms: dict[Node, Affine] = {}
    varying: set[Node] = set()
    for node in topological(roots):
        if (node.op == "in" and node.attr in _VARYING) or any(a in varying for a in node.args):
            varying.add(node)
        if not node.dtype.is_int:
            continue
        form = _sum(node, forms)
        if form is None and node not in varying:
            form = Affine(uniform={node: 1})
        if form is not None:
            forms[node] = form
    return forms


def _sum(node: Node, forms: Mapping[Node, Affine]) -> Affine | None:
    """The form of `node` from those of its operands, or None where the op is no sum."""
    if node.op == "const":
        return Affine(int(node.value))
    if node.op == "in":
        return {"q_idx": Affine(q=1), "kv_idx": Affine(kv=1)}.get(str(node.attr))
    args = [forms[a] for a in node.args if a in forms]
    if len(args) != len(node.args):
        return None
    if node.op in ("add", "sub"):
        return args[0].plus(args[1], 1 if node.op == "add" else -1)
    if node.op == "neg":
        return args[0].times(-1)
    if node.op == "cast":
        return args[0]
    if node.op == "mul":
        for x, factor in zip(args, reversed(node.args), strict=True):
            if factor.is_const:
                return x.times(int(factor.value))
    if node.op == "shl" and node.args[1].is_const and 0 <= int(node.args[1].value) < 64:
        return args[0].times(1 << int(node.args[1].value))
    return None
