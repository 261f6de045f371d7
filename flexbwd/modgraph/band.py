"""Masks that are a band around a diagonal: lo <= q_idx - kv_idx <= hi. Causal, and every sliding window, is one.

A band needs no block lists: which tiles are empty, full or cut by an edge follows from two numbers.
"""

from __future__ import annotations

from collections.abc import Iterator

from .affine import Affine, affine
from .ir import Node
from .modplan import Band

_LIMIT = 1 << 30  # beyond it a limit could overflow in int32 arithmetic


def band_of(mask: Node) -> Band | None:
    """The band that a BOOL graph is, or None where it is anything else."""
    lo: int | None = None
    hi: int | None = None
    for part in _conjuncts(mask):
        limits = _limits(part)
        if limits is None:
            return None
        lo = limits.lo if lo is None else lo if limits.lo is None else max(lo, limits.lo)
        hi = limits.hi if hi is None else hi if limits.hi is None else min(hi, limits.hi)
    if any(n is not None and abs(n) > _LIMIT for n in (lo, hi)):
        return None
    return Band(lo, hi)


def _conjuncts(node: Node) -> Iterator[Node]:
    if node.op == "and":
        for a in node.args:
            yield from _conjuncts(a)
    else:
        yield node


def _limits(node: Node) -> Band | None:
    """One comparison as limits of d = q_idx - kv_idx."""
    if node.is_value(True):
        return Band(None, None)
    if node.op not in ("lt", "le", "gt", "ge"):
        return None
    left, right = node.args
    if node.op in ("gt", "ge"):
        left, right = right, left
    room = 1 if node.op in ("lt", "gt") else 0  # left + room <= right, in integers
    if not left.dtype.is_int or not right.dtype.is_int:
        return None
    if left.op == "abs":
        inner, bound = affine(left.args[0]), affine(right)
        if inner is None or bound is None or bound.q or bound.kv or bound.terms or not _is_unit_difference(inner):
            return None
        width, shift = bound.const - room, inner.const * inner.q  # |±d + c| <= w:  -w <= d ± c <= w
        return Band(-width - shift, width - shift)
    below, above = affine(left), affine(right)
    if below is None or above is None:
        return None
    form = above.plus(below, -1)  # form >= room
    if not _is_unit_difference(form):
        return None
    return Band(room - form.const, None) if form.q == 1 else Band(None, form.const - room)


def _is_unit_difference(form: Affine) -> bool:
    return form.is_difference and abs(form.q) == 1 and not form.terms
