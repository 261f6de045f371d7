"""Masks written inside a score_mod: where(c, X, -inf) becomes the condition c and the score X.

A score of -inf has probability 0, so the element is masked; said as a condition, whole blocks can be skipped, and X
alone is differentiated. Found under sums, negation, products with a constant, `min`, `where` and `detach`. Only a
condition that the score does not enter is split off: block lists must be able to evaluate it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from .analyze import depends
from .ir import Builder, Node

_INF = math.inf


@dataclass(frozen=True, eq=False)
class _Part:
    """An expression as `value` where `keep` holds, and an infinity elsewhere; keep None: everywhere."""

    value: Node
    keep: Node | None = None


def split_neg_inf(builder: Builder, node: Node) -> tuple[Node, Node | None]:
    """`(score', keep)` with node = score' where keep holds and -inf elsewhere; keep None when nothing was split off.

    Elements that are not kept may have any value in score'. Large finite numbers (-1e30, finfo.min) are scores, not
    masks: a row made of nothing else still sums to 1.
    """
    part = _Splitter(builder, node).split(node, -_INF)
    keep = part.keep
    if keep is None or keep.is_value(True):
        return part.value, None
    return part.value, keep


class _Splitter:
    def __init__(self, builder: Builder, root: Node) -> None:
        self.builder = builder
        self.reads = depends([root])
        self.done: dict[tuple[Node, float], _Part] = {}

    def split(self, node: Node, infinity: float) -> _Part:
        """`node`, with the elements where it is structurally `infinity` split off."""
        key = (node, infinity)
        if key not in self.done:
            self.done[key] = self._split(node, infinity)
        return self.done[key]

    def _split(self, node: Node, infinity: float) -> _Part:
        if node.is_value(infinity):
            return _Part(self.builder.const(0.0), self.builder.const(False))
        if node.op == "where":
            return self._where(node, infinity)
        if node.op in ("neg", "detach"):
            return self._one(node, -infinity if node.op == "neg" else infinity)
        if node.op in ("add", "sub"):
            return self._both(node, infinity, infinity if node.op == "add" else -infinity)
        if (node.op == "min" and infinity < 0) or (node.op == "max" and infinity > 0):
            return self._both(node, infinity, infinity)
        if node.op in ("mul", "div"):
            return self._scaled(node, infinity)
        return _Part(node)

    def _where(self, node: Node, infinity: float) -> _Part:
        cond, x_node, y_node = node.args
        if self.reads[cond] & {"score", "grad"}:
            return _Part(node)
        x, y = self.split(x_node, infinity), self.split(y_node, infinity)
        if x.keep is None and y.keep is None:
            return _Part(node)
        emit, true = self.builder.emit, self.builder.const(True)
        x_keep, y_keep = x.keep or true, y.keep or true
        if y_keep.is_value(False):
            return _Part(x.value, emit("and", cond, x_keep))
        if x_keep.is_value(False):
            return _Part(y.value, emit("and", emit("not", cond), y_keep))
        value = emit("where", cond, x.value, y.value)
        if x.keep is None:
            return _Part(value, emit("or", cond, y_keep))
        if y.keep is None:
            return _Part(value, emit("or", emit("not", cond), x_keep))
        return _Part(value, emit("where", cond, x_keep, y_keep))

    def _one(self, node: Node, infinity: float) -> _Part:
        part = self.split(node.args[0], infinity)
        return _Part(node) if part.keep is None else _Part(self.builder.emit(node.op, part.value), part.keep)

    def _both(self, node: Node, left: float, right: float) -> _Part:
        """Ops that are the infinity as soon as one operand is."""
        x, y = self.split(node.args[0], left), self.split(node.args[1], right)
        keeps = [p.keep for p in (x, y) if p.keep is not None]
        if not keeps:
            return _Part(node)
        keep = keeps[0] if len(keeps) == 1 else self.builder.emit("and", *keeps)
        return _Part(self.builder.emit(node.op, x.value, y.value), keep)

    def _scaled(self, node: Node, infinity: float) -> _Part:
        """A product with, or quotient by, a finite nonzero constant."""
        pairs = (node.args, node.args[::-1]) if node.op == "mul" else (node.args,)
        for x, factor in pairs:
            if not factor.is_const or factor.value == 0 or not math.isfinite(factor.value):
                continue
            part = self.split(x, infinity if factor.value > 0 else -infinity)
            if part.keep is not None:
                return _Part(self.builder.emit(node.op, part.value, factor), part.keep)
        return _Part(node)
