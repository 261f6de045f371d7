"""Minimum and maximum of a captured tensor over index ranges, without visiting the elements again.

Used by interval analysis: a load whose index lies somewhere in `[lo, hi]` has a value between the smallest and the
largest element of that range.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

Array = np.ndarray
IndexRange = tuple[Array, Array]  # inclusive, broadcastable, inside the dimension

_CHUNK = 16  # mask blocks are multiples of 16, so ranges of whole blocks start and end on chunks
_MAX_OVERLAP = 4  # ranges that cover a dimension more often than this are widened to all of it


class RangeTable:
    """Reduces `values[..., lo : hi + 1]` with `op` (np.minimum or np.maximum) in O(1) per range.

    Exact when `lo == hi`, or when the range is not strictly inside one 16-element chunk; else a bound from the
    outside. Memory: 2 n elements + n / 16 · log2(n / 16).
    """

    def __init__(self, values: Array, op: np.ufunc):
        self.op = op
        self.inverse = np.maximum if op is np.minimum else np.minimum
        self.values = values
        pad = -values.shape[-1] % _CHUNK
        if pad:
            values = np.concatenate([values, np.repeat(values[..., -1:], pad, axis=-1)], axis=-1)
        chunks = values.reshape(*values.shape[:-1], -1, _CHUNK)
        self.prefix = op.accumulate(chunks, axis=-1).reshape(values.shape)
        self.suffix = op.accumulate(chunks[..., ::-1], axis=-1)[..., ::-1].reshape(values.shape)
        self.levels = self._levels(self.suffix[..., ::_CHUNK])

    def _levels(self, level: Array) -> Array:
        """`[levels, ..., chunks]`: entry (k, i) reduces the 2**k chunks from i on (fewer at the end)."""
        levels, step = [level], 1
        while 2 * step <= level.shape[-1]:
            below, above = levels[-1], levels[-1].copy()
            self.op(below[..., :-step], below[..., step:], out=above[..., :-step])
            levels.append(above)
            step *= 2
        return np.stack(levels)

    def query(self, points: Sequence[Array], lo: Array, hi: Array) -> Array:
        """Bounds of `values[points][..., lo : hi + 1]`, broadcast over all index arrays."""
        at = tuple(points)
        head, tail = self.suffix[(*at, lo)], self.prefix[(*at, hi)]
        first, last = lo // _CHUNK + 1, hi // _CHUNK - 1  # whole chunks strictly between the ends
        within = self.inverse(head, tail)  # both reach past the range: the closer one still bounds it
        found = np.where(first > last + 1, within, self.op(head, tail))
        found = np.where(lo == hi, self.values[(*at, lo)], found)
        count = last - first + 1
        if (count > 0).any():
            level = np.frexp(np.maximum(count, 1).astype(np.float64))[1] - 1
            start = np.minimum(first, self.levels.shape[-1] - 1)
            end = np.maximum(last - (1 << level) + 1, 0)
            middle = self.op(self.levels[(level, *at, start)], self.levels[(level, *at, end)])
            found = np.where(count > 0, self.op(found, middle), found)
        return found


def reduce_dim(values: Array, dim: int, span: IndexRange, op: np.ufunc) -> tuple[Array, Array]:
    """`values` with dimension `dim` reduced over each distinct range of `span`.

    Returns the reduced array and the index that selects, in its dimension `dim`, each range of `span`. Ranges that
    overlap a lot are widened to the whole dimension.
    """
    lo, hi = np.broadcast_arrays(*span)
    pairs, which = np.unique(np.stack([lo.ravel(), hi.ravel()]), axis=1, return_inverse=True)
    if int((pairs[1] - pairs[0] + 1).sum()) > _MAX_OVERLAP * values.shape[dim]:
        return op.reduce(values, axis=dim, keepdims=True), np.zeros_like(lo)
    pad = [(0, int(axis == dim)) for axis in range(values.ndim)]
    edges = np.stack([pairs[0], pairs[1] + 1], axis=1).ravel()  # reduceat takes [start, end) as neighbours
    reduced = op.reduceat(np.pad(values, pad, mode="edge"), edges, axis=dim)
    return np.take(reduced, np.arange(0, len(edges), 2), axis=dim), which.reshape(lo.shape)


class CaptureBounds:
    """Bounds of one captured tensor's elements over ranges of its indices."""

    def __init__(self, values: Array):
        self.values = values
        self.nan = np.isnan(values) if values.dtype.kind == "f" else None
        if self.nan is not None and not self.nan.any():
            self.nan = None
        self._tables: dict[tuple[int, str], RangeTable] = {}

    def query(self, index: Sequence[IndexRange]) -> tuple[Array, Array, Array | None]:
        """`(lo, hi, may_be_nan)` of the element at `index`; indices wrap once when negative, then clamp."""
        spans = [wrap_and_clamp(lo, hi, size) for (lo, hi), size in zip(index, self.values.shape, strict=True)]
        lo = self._reduce("min", spans)
        hi = self._reduce("max", spans)
        if self.nan is None:
            return lo, hi, None
        only_nan = lo > hi
        return np.where(only_nan, -np.inf, lo), np.where(only_nan, np.inf, hi), self._reduce("nan", spans)

    def _source(self, what: str) -> Array:
        if what == "nan":
            assert self.nan is not None
            return self.nan
        if self.nan is None:
            return self.values
        return np.where(self.nan, np.inf if what == "min" else -np.inf, self.values)

    def _reduce(self, what: str, spans: list[IndexRange]) -> Array:
        op = np.minimum if what == "min" else np.maximum
        wide = [d for d, (lo, hi) in enumerate(spans) if lo is not hi and not np.array_equal(lo, hi)]
        if not wide:
            return self._source(what)[tuple(lo for lo, _ in spans)]
        if len(wide) == 1:
            dim = wide[0]
            table = self._tables.get((dim, what))
            if table is None:
                table = self._tables[dim, what] = RangeTable(np.moveaxis(self._source(what), dim, -1), op)
            return table.query([lo for d, (lo, _) in enumerate(spans) if d != dim], *spans[dim])
        values = self._source(what)
        index = [lo for lo, _ in spans]
        for dim in sorted(wide, key=lambda d: _coverage(spans[d]) / values.shape[d]):
            values, index[dim] = reduce_dim(values, dim, spans[dim], op)
        return values[tuple(index)]


def wrap_and_clamp(lo: Array, hi: Array, size: int) -> IndexRange:
    """The positions that indices in `[lo, hi]` address in a dimension of `size`: negatives wrap, then all clamp."""
    if (lo >= 0).all():
        low, high = lo, hi
    else:  # a range that holds -1 and 0 reaches both ends
        across = (lo < 0) & (hi >= 0)
        low = np.where(across, 0, np.where(lo < 0, lo + size, lo))
        high = np.where(across, size - 1, np.where(hi < 0, hi + size, hi))
    if lo is hi:
        low = np.clip(low, 0, size - 1)
        return low, low
    return np.clip(low, 0, size - 1), np.clip(high, 0, size - 1)


def _coverage(span: IndexRange) -> int:
    return int((span[1] - span[0] + 1).sum())
