"""Checks of a mod's index arithmetic against the lengths it will run with.

A captured tensor too short for the sequence is the commonest slip with packed documents and tables. Backends clamp
what a masked lane may read outside; here an index that leaves its tensor is refused. One of a single coordinate is
refused also where mask_mod hides those rows or columns, as torch's own indexing would; one of both q_idx and kv_idx
is not.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from flexbwd.errors import ModBoundsError, ModOverflowWarning

from .affine import Affine, affine_forms
from .analyze import depends
from .ir import I32, Node, topological
from .trace import TracedMod

_INT32 = 2**31


class Extents(NamedTuple):
    """How far each coordinate goes; coordinates start at 0."""

    b: int
    h: int
    q_idx: int
    kv_idx: int

    def last(self, name: str) -> int:
        return int(getattr(self, name)) - 1


def check_extents(traced: TracedMod, extents: Extents, masked: bool) -> None:
    """Raise if an index leaves its captured tensor at these lengths; warn if int32 may overflow.

    Args:
        masked: some elements are not kept, so an index of both q_idx and kv_idx may reach its bounds only on those.
    Raises:
        ModBoundsError: names the capture, its dimension, and how far the index goes.
    """
    if 0 in extents:
        return
    nodes = list(topological([traced.output]))
    _check_overflow(traced, nodes, extents)
    forms = affine_forms([traced.output])
    reads = depends(nodes)
    for load in (n for n in nodes if n.op == "load"):
        spec = traced.captures[int(load.attr)]  # type: ignore[call-overload]
        for dim, (index, size) in enumerate(zip(load.args, spec.shape, strict=True)):
            form = forms.get(index)
            span = None if form is None else _attained(form, extents)
            if span is None or (masked and {"q_idx", "kv_idx"} <= reads[index]):
                continue
            lo, hi = span
            if lo < -size or hi >= size:
                raise ModBoundsError(
                    f"{spec.name} has {size} entries in dimension {dim}, but its index goes from {lo} to {hi} for "
                    f"B={extents.b}, H={extents.h}, Sq={extents.q_idx}, Skv={extents.kv_idx}",
                    mod=traced.name,
                    where=traced.source_lines.get(load, traced.where),
                    remedy="Make the tensor longer, or clamp the index",
                )


def _attained(form: Affine, extents: Extents) -> tuple[int, int] | None:
    """The least and the greatest value of a sum of independent coordinates, each surely reached; else None."""
    factors = {"q_idx": form.q, "kv_idx": form.kv}
    for node, factor in form.terms.items():
        if node.op != "in":
            return None
        factors[str(node.attr)] = factor
    ends = [(0, factor * extents.last(name)) for name, factor in factors.items()]
    return form.const + sum(map(min, ends)), form.const + sum(map(max, ends))


def _check_overflow(traced: TracedMod, nodes: Sequence[Node], extents: Extents) -> None:
    """Warn of int32 arithmetic on coordinates that can leave int32."""
    spans: dict[Node, tuple[int, int]] = {}
    for node in nodes:
        span = _span(node, spans, extents)
        if span is None:
            continue
        spans[node] = span
        if node.dtype is I32 and not -_INT32 <= span[0] <= span[1] < _INT32:
            where = traced.source_lines.get(node, traced.where)
            warnings.warn(
                f"{traced.name} ({where}): an int32 value may reach {max(span, key=abs)} and wrap around. "
                "Use .long() on one operand",
                ModOverflowWarning,
                stacklevel=2,
            )
            return


def _span(node: Node, spans: Mapping[Node, tuple[int, int]], extents: Extents) -> tuple[int, int] | None:
    """Bounds without wrapping, by Python integers; None where they are not known."""
    if node.op == "in" and node.attr in Extents._fields:
        return 0, extents.last(str(node.attr))
    if node.op == "const" and node.dtype.is_int:
        return int(node.value), int(node.value)
    parts = [spans[a] for a in node.args if a in spans]
    if not parts or len(parts) != len(node.args) or not node.dtype.is_int:
        return None
    (lo, hi), *rest = parts
    if node.op == "neg":
        return -hi, -lo
    if node.op == "cast":
        return lo, hi
    if not rest:
        return None
    other_lo, other_hi = rest[0]
    if node.op == "add":
        return lo + other_lo, hi + other_hi
    if node.op == "sub":
        return lo - other_hi, hi - other_lo
    corners = [x * y for x in (lo, hi) for y in (other_lo, other_hi)]
    if node.op == "mul":
        return min(corners), max(corners)
    if other_lo > 0 and node.op in ("fdiv", "mod"):
        return (lo // other_lo, hi // other_lo) if node.op == "fdiv" and lo >= 0 else (min(lo, 0), max(hi, other_hi))
    return None
