"""Bounds of a graph's value over ranges of its inputs, for many ranges at a time.

A mask block is empty when its predicate cannot be true, full when it cannot be false. Bounds are sound, never tight
by promise: what they leave undecided is evaluated element-wise by the caller. Three things make them tight where it
matters: linear integer expressions are summed per variable before they are bounded (`q - q % W`, and both sides of a
comparison together), `x % W` is exact where the quotient is one number, and loads are bounded by the elements that
their index range really covers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from .interval_base import Array, Interval, Range, Truth, either, fit, outward, point, whole
from .interval_float import FLOAT_OPS, float_square
from .interval_int import INT_OPS, int_square
from .ir import BOOL, COMPARE, DType, F, Node, topological
from .linear_form import LinearForm, linear_forms
from .range_table import CaptureBounds

_LIMIT = 2**62


def bounds(root: Node, ranges: Mapping[str, tuple[Array, Array]], captures: Sequence[Tensor]) -> tuple[Array, Array]:
    """Bounds of `root` while each input lies in its range.

    Args:
        ranges: input name -> inclusive `(lo, hi)` integer arrays; all of them broadcast together. An input that is
            absent can be anything.
        captures: the captured tensors by load slot, on any device.
    Returns:
        Broadcastable `(lo, hi)`; for a BOOL root `(can be false, can be true)`; NaN in both where a float may be NaN.
    """
    found = IntervalProgram(root, captures)(ranges)
    if isinstance(found, Truth) or found.nan is None:
        return found[0], found[1]
    return np.where(found.nan, np.nan, found.lo), np.where(found.nan, np.nan, found.hi)


class IntervalProgram:
    """`bounds` for repeated use: the captured tensors are read and indexed once. None: loads may be anything."""

    def __init__(self, root: Node, captures: Sequence[Tensor] | None):
        self.root = root
        self.nodes = list(topological([root]))
        used = {int(n.attr) for n in self.nodes if n.op == "load"}  # type: ignore[call-overload]
        if captures is None:
            self.captures = {}
        else:
            self.captures = {slot: CaptureBounds(_host_array(captures[slot])) for slot in used}
        self.forms = linear_forms(self.nodes)

    def __call__(self, ranges: Mapping[str, tuple[Array, Array]]) -> Interval:
        """The interval of the root."""
        return self.all(ranges)[self.root]

    def all(self, ranges: Mapping[str, tuple[Array, Array]]) -> dict[Node, Interval]:
        """The interval of every node."""
        with np.errstate(all="ignore"):
            walk = _Walk(self, ranges)
            for node in self.nodes:
                walk.found[node] = walk.visit(node)
            return walk.found


class _Walk:
    """One evaluation: the intervals found so far."""

    def __init__(self, program: IntervalProgram, ranges: Mapping[str, tuple[Array, Array]]):
        self.program = program
        self.ranges = ranges
        self.found: dict[Node, Interval] = {}
        self._sums: dict[Node, tuple[Array, Array] | None] = {}

    def visit(self, node: Node) -> Interval:
        args = [self.found[a] for a in node.args]
        if node.op == "in":
            return self._input(node)
        if node.op == "const":
            return point(node.value, node.dtype)
        if node.op == "load":
            return self._load(node, args)
        if node.op in COMPARE:
            return self._compare(node, args)
        if node.op == "where":
            return _select(*args)
        if node.op == "cast":
            return _cast(args[0], node.args[0].dtype, node.dtype)
        if node.op == "detach":
            return args[0]
        if node.dtype is BOOL:
            return _BOOL_OPS[node.op](*args)
        square = node.op == "mul" and node.args[0] is node.args[1]
        if node.dtype is F:
            return float_square(args[0]) if square else FLOAT_OPS[node.op](*args)  # type: ignore[arg-type]
        plain = int_square(args[0], node.dtype) if square else INT_OPS[node.op](*args, node.dtype)  # type: ignore[arg-type]
        return self._tighten(node, plain)

    def _input(self, node: Node) -> Interval:
        given = self.ranges.get(str(node.attr))
        if given is None:
            return whole(node.dtype)
        lo = np.asarray(given[0], dtype=np.int64)
        return Range(lo, lo if given[1] is given[0] else np.asarray(given[1], dtype=np.int64))

    def _load(self, node: Node, index: Sequence[Interval]) -> Interval:
        capture = self.program.captures.get(int(node.attr))  # type: ignore[call-overload]
        if capture is None or capture.values.size == 0:
            return whole(node.dtype)
        lo, hi, nan = capture.query([(i[0], i[1]) for i in index])
        return _typed_load(lo, hi, nan, node.dtype, exact=capture.values.dtype != np.float64)

    # -- linear forms -------------------------------------------------------------------------------------------------
    def _sum(self, form: LinearForm) -> tuple[Array, Array] | None:
        """Bounds of a linear form, or None where int64 cannot hold it."""
        size = abs(form.offset)
        if size >= _LIMIT or any(abs(f) >= _LIMIT for f in form.terms.values()):
            return None
        lo = hi = np.array(form.offset, dtype=np.int64)
        for (node, divisor), factor in form.terms.items():
            atom = self.found[node]
            low, high = atom[0], atom[1]
            if divisor != 1:
                low, high = low // divisor, high // divisor
            size += abs(factor) * max(abs(int(low.min(initial=0))), abs(int(high.max(initial=0))))
            if size >= _LIMIT:
                return None
            ends = (low * factor, high * factor) if factor > 0 else (high * factor, low * factor)
            lo, hi = lo + ends[0], hi + ends[1]
        return lo, hi

    def _node_sum(self, node: Node) -> tuple[Array, Array] | None:
        if node not in self._sums:
            self._sums[node] = self._sum(self.program.forms[node])
        return self._sums[node]

    def _tighten(self, node: Node, plain: Range) -> Range:
        """Meets `plain` with the bounds of the node's linear form, where that form does not wrap."""
        if not self.program.forms[node].merged:
            return plain
        found = self._node_sum(node)
        if found is None:
            return plain
        lo, hi = found
        low, high = whole(node.dtype)[:2]
        inside = (lo >= low) & (hi <= high)
        return Range(
            np.where(inside, np.maximum(lo, plain.lo), plain.lo), np.where(inside, np.minimum(hi, plain.hi), plain.hi)
        )

    def _compare(self, node: Node, args: Sequence[Interval]) -> Truth:
        x, y = args
        if isinstance(x, Truth) or isinstance(y, Truth):
            return _compare(node.op, _as_int(x), _as_int(y))
        plain = _compare(node.op, x, y)
        left, right = node.args
        if left.dtype is F:
            return plain
        forms = self.program.forms[left], self.program.forms[right]
        if not forms[0].shares(forms[1]):
            return plain
        sums = self._node_sum(left), self._node_sum(right), self._sum(forms[0].minus(forms[1]))
        if any(s is None for s in sums):
            return plain
        low, high = whole(left.dtype)[:2]
        safe = np.array(True)
        for lo, hi in sums[:2]:  # type: ignore[misc]
            safe = safe & (lo >= low) & (hi <= high)
        zero = np.array(0)
        joint = _compare(node.op, Range(*sums[2]), Range(zero, zero))  # type: ignore[misc]
        return Truth(plain.no & (joint.no | ~safe), plain.yes & (joint.yes | ~safe))


def _host_array(tensor: Tensor) -> Array:
    tensor = tensor.detach()
    if tensor.dtype in (torch.bfloat16, torch.float16):
        tensor = tensor.float()
    return tensor.cpu().numpy()


def _typed_load(lo: Array, hi: Array, nan: Array | None, dtype: DType, exact: bool) -> Interval:
    """A load's raw extremes as a value of the node's type."""
    if dtype is BOOL:
        return Truth(lo == 0, hi != 0)
    if dtype is F:
        lo, hi = lo.astype(np.float64), hi.astype(np.float64)
        return Range(lo, hi, nan) if exact else outward(lo, hi, nan)
    return fit(lo.astype(np.int64), hi.astype(np.int64), dtype)


def _compare(op: str, x: Range, y: Range) -> Truth:
    """NaN makes every comparison false, except `ne`."""
    nan = either(x.nan, y.nan)
    if op in ("gt", "ge"):
        op, x, y = {"gt": "lt", "ge": "le"}[op], y, x
    if op == "lt":
        no, yes = x.hi >= y.lo, x.lo < y.hi
    elif op == "le":
        no, yes = x.hi > y.lo, x.lo <= y.hi
    else:
        same = (x.lo == x.hi) & (y.lo == y.hi) & (x.lo == y.lo)
        no, yes = ~same, (x.lo <= y.hi) & (y.lo <= x.hi)
    if op == "ne":
        no, yes = yes, no if nan is None else no | nan
    elif nan is not None:
        no = no | nan
    return Truth(no, yes)


def _as_int(x: Interval) -> Range:
    """False and true as 0 and 1."""
    if isinstance(x, Range):
        return x
    return Range((~x.no).astype(np.int64), x.yes.astype(np.int64))


def _select(condition: Interval, x: Interval, y: Interval) -> Interval:
    assert isinstance(condition, Truth)
    no, yes = condition
    if isinstance(x, Truth):
        return Truth((yes & x[0]) | (no & y[0]), (yes & x[1]) | (no & y[1]))
    lo = np.where(no, np.where(yes, np.minimum(x[0], y[0]), y[0]), x[0])
    hi = np.where(no, np.where(yes, np.maximum(x[1], y[1]), y[1]), x[1])
    nan = either(x.nan if x.nan is None else x.nan & yes, y.nan if y.nan is None else y.nan & no)  # type: ignore[union-attr]
    return Range(lo, hi, nan)


def _cast(x: Interval, source: DType, target: DType) -> Interval:
    if target is BOOL:
        zero = np.array(0)
        return _compare("ne", _as_int(x), Range(zero, zero))
    x = _as_int(x)
    if target is F:
        return outward(x.lo.astype(np.float64), x.hi.astype(np.float64), x.nan)
    if source is not F:
        return fit(x.lo, x.hi, target)
    low, high = whole(target)[:2]
    bad = ~((x.lo > low.astype(np.float64)) & (x.hi < high.astype(np.float64)))
    bad = bad if x.nan is None else bad | x.nan
    return fit(_to_int(x.lo, bad), _to_int(x.hi, bad), target, bad)


def _to_int(x: Array, bad: Array) -> Array:
    return np.trunc(np.where(bad, 0.0, x)).astype(np.int64)


def _truth_and(x: Truth, y: Truth) -> Truth:
    return Truth(x.no | y.no, x.yes & y.yes)


def _truth_or(x: Truth, y: Truth) -> Truth:
    return Truth(x.no & y.no, x.yes | y.yes)


def _truth_xor(x: Truth, y: Truth) -> Truth:
    return Truth((x.no & y.no) | (x.yes & y.yes), (x.no & y.yes) | (x.yes & y.no))


_BOOL_OPS: dict[str, Callable[..., Truth]] = {
    "and": _truth_and,
    "or": _truth_or,
    "xor": _truth_xor,
    "min": _truth_and,
    "max": _truth_or,
    "not": lambda x: Truth(x.yes, x.no),
}
