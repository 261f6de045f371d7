"""The order in which the CPU backend visits a block mask: row steps, head groups and column chunks.

A walk is built from the lists alone and is all that the loops see; what no list names is in no step. Neighbouring rows
with equal lists become one step, neighbouring listed blocks one run of columns, and each step is cut so that its score
tile holds about `budget` elements.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from flexbwd.plan import BlockLists

from .remember import Memory

#: Score elements per step. CPU seconds of forward + backward, fp32, H8 S4096 D64, one core with 2 MiB of L2, for
#: 2^18 / 2^19 / 2^20: packed documents 0.23 / 0.20 / 0.20, causal 0.73 / 0.74 / 0.73.
DEFAULT_BUDGET = 1 << 19
_GEMM_ROWS = 256  # query rows (times query heads per key head) of one step
_MIN_COLUMNS = 64


class Grid(NamedTuple):
    """The extents a walk covers."""

    batch: int
    kv_heads: int
    group: int  # query heads per key head
    q_len: int
    kv_len: int


class Heads(NamedTuple):
    """A rectangle of [batch, kv head, query head of its group]."""

    b0: int
    b1: int
    k0: int
    k1: int
    g0: int
    g1: int

    @property
    def count(self) -> int:  # type: ignore[override]  # not tuple's
        """Independent matrices: (batch, kv head) pairs."""
        return (self.b1 - self.b0) * (self.k1 - self.k0)


class Partial(NamedTuple):
    """Columns [c0, c1) of a chunk, keys from k0 on, where the mask decides; `slot` of the bits, -1 without."""

    c0: int
    c1: int
    k0: int
    slot: int


@dataclass(frozen=True, eq=False)
class Chunk:
    runs: tuple[tuple[int, int], ...]  # key ranges, in column order
    columns: int
    partial: tuple[Partial, ...]
    index: Tensor | None  # int64 [columns], key of each column; None when there is one run


@dataclass(frozen=True, eq=False)
class RowStep:
    q0: int
    q1: int
    heads: tuple[Heads, ...]
    chunks: tuple[Chunk, ...]  # none: these rows keep nothing


class _Segment(NamedTuple):
    """Consecutive listed blocks of one kind."""

    k0: int
    k1: int
    partial: bool
    slot: int


class _Row(NamedTuple):
    """One row's listed blocks, ascending."""

    block: np.ndarray
    partial: np.ndarray
    slot: np.ndarray

    @property
    def key(self) -> bytes:
        return b"|".join(a.tobytes() for a in self)


def walk_of(grid: Grid, blocks: BlockLists | None, block_size: tuple[int, int], budget: int) -> tuple[RowStep, ...]:
    """The walk of these lists, remembered as long as the list tensors live and are not written to."""
    if blocks is None:
        return _walks.get(("all", grid, budget), (), lambda: _build_all(grid, budget))
    tensors = [*blocks.q_to_kv, None if blocks.bits is None else blocks.bits.q_to_kv_slot]
    listed = tuple(t is not None for t in tensors)
    held = [t for t in tensors if t is not None]
    key = (listed, grid, block_size, budget)
    return _walks.get(key, held, lambda: tuple(_build(grid, blocks, block_size, budget)))


_walks: Memory[tuple[RowStep, ...]] = Memory(64)


# -- building ----------------------------------------------------------------------------------------------------------
def _build_all(grid: Grid, budget: int) -> tuple[RowStep, ...]:
    heads = Heads(0, grid.batch, 0, grid.kv_heads, 0, grid.group)
    segments = [_Segment(0, grid.kv_len, False, -1)] if grid.kv_len else []
    return tuple(_steps(heads, 0, grid.q_len, segments, budget))


def _build(grid: Grid, blocks: BlockLists, block_size: tuple[int, int], budget: int) -> Iterator[RowStep]:
    table = _read_lists(blocks)
    q_block, kv_block = block_size
    for heads, rows in _head_groups(table, grid):
        keys = [row.key for row in rows]
        first = 0
        for r in range(1, len(rows) + 1):
            if r == len(rows) or keys[r] != keys[first]:
                segments = _segments(rows[first], kv_block, grid.kv_len)
                q0, q1 = first * q_block, min(r * q_block, grid.q_len)
                # bits are stored per block: a step must not cross a row of blocks
                step_rows = q_block if any(s.slot >= 0 for s in segments) else q1 - q0
                for start in range(q0, q1, max(step_rows, 1)):
                    yield from _steps(heads, start, min(start + step_rows, q1), segments, budget)
                first = r


def _read_lists(blocks: BlockLists) -> list[list[list[_Row]]]:
    """[B|1][H|1][rows] of sorted lists; nothing past a count is read."""
    lists = blocks.q_to_kv
    counts, index = lists.mask_block_cnt.cpu().numpy(), lists.mask_block_idx.cpu().numpy()
    full_counts = full_index = None
    if lists.full_block_cnt is not None and lists.full_block_idx is not None:
        full_counts, full_index = lists.full_block_cnt.cpu().numpy(), lists.full_block_idx.cpu().numpy()
    slots = None if blocks.bits is None else blocks.bits.q_to_kv_slot.cpu().numpy()
    nothing = np.empty(0, np.int32)

    def row(at: tuple[int, int, int]) -> _Row:
        n = counts[at]
        part = index[at][:n]
        full = nothing if full_counts is None or full_index is None else full_index[at][: full_counts[at]]
        block = np.concatenate([part, full])
        slot = np.full(len(block), -1, np.int32)
        if slots is not None:
            slot[:n] = slots[at][:n]
        order = np.argsort(block, kind="stable")
        return _Row(block[order], order < n, slot[order])

    batch, heads, rows = counts.shape
    return [[[row((b, h, r)) for r in range(rows)] for h in range(heads)] for b in range(batch)]


def _head_groups(table: list[list[list[_Row]]], grid: Grid) -> Iterator[tuple[Heads, list[_Row]]]:
    """Rectangles of heads that share all their lists."""
    spans: list[tuple[int, int, list[tuple[int, int, list[_Row]]]]] = []
    for b, per_head in enumerate(table):
        parts = _equal_spans(per_head)
        if spans and _same_parts(spans[-1][2], parts):
            spans[-1] = (spans[-1][0], b + 1, spans[-1][2])
        else:
            spans.append((b, b + 1, parts))
    for b0, b1, parts in spans:
        batch = (0, grid.batch) if len(table) == 1 else (b0, b1)
        for h0, h1, rows in parts:
            span = (0, grid.kv_heads * grid.group) if len(table[0]) == 1 else (h0, h1)
            for k0, k1, g0, g1 in _rectangles(*span, grid.group):
                yield Heads(*batch, k0, k1, g0, g1), rows


def _equal_spans(per_head: list[list[_Row]]) -> list[tuple[int, int, list[_Row]]]:
    parts: list[tuple[int, int, list[_Row]]] = []
    for h, rows in enumerate(per_head):
        if parts and _same_rows(parts[-1][2], rows):
            parts[-1] = (parts[-1][0], h + 1, rows)
        else:
            parts.append((h, h + 1, rows))
    return parts


def _same_rows(x: list[_Row], y: list[_Row]) -> bool:
    return all(np.array_equal(a, b) for p, q in zip(x, y, strict=True) for a, b in zip(p, q, strict=True))


def _same_parts(x: list[tuple[int, int, list[_Row]]], y: list[tuple[int, int, list[_Row]]]) -> bool:
    return len(x) == len(y) and all(p[:2] == q[:2] and _same_rows(p[2], q[2]) for p, q in zip(x, y, strict=True))


def _rectangles(h0: int, h1: int, group: int) -> Iterator[tuple[int, int, int, int]]:
    """Query heads [h0, h1) as rectangles (k0, k1, g0, g1) of the [kv head, group] grid."""
    while h0 < h1:
        kv, g = divmod(h0, group)
        if g == 0 and h1 - h0 >= group:
            whole = (h1 - h0) // group
            yield kv, kv + whole, 0, group
            h0 += whole * group
        else:
            g1 = min(group, g + h1 - h0)
            yield kv, kv + 1, g, g1
            h0 += g1 - g


def _segments(row: _Row, kv_block: int, kv_len: int) -> list[_Segment]:
    """A row's blocks as maximal runs of neighbours of one kind; blocks with bits stay single."""
    if not len(row.block):
        return []
    breaks = (np.diff(row.block) != 1) | (np.diff(row.partial) != 0) | (row.slot[1:] >= 0) | (row.slot[:-1] >= 0)
    starts = np.concatenate([[0], np.flatnonzero(breaks) + 1])
    ends = np.concatenate([starts[1:], [len(row.block)]])
    found = []
    for s, e in zip(starts.tolist(), ends.tolist(), strict=True):
        k0, k1 = int(row.block[s]) * kv_block, min((int(row.block[e - 1]) + 1) * kv_block, kv_len)
        if k0 < k1:
            found.append(_Segment(k0, k1, bool(row.partial[s]), int(row.slot[s])))
    return found


# -- cutting to size ---------------------------------------------------------------------------------------------------
def _steps(heads: Heads, q0: int, q1: int, segments: Sequence[_Segment], budget: int) -> Iterator[RowStep]:
    """The steps of rows [q0, q1), which all see `segments`."""
    total = sum(s.k1 - s.k0 for s in segments)
    if q0 >= q1 or not heads.count:
        return
    if not total:
        yield RowStep(q0, q1, (heads,), ())
        return
    group = heads.g1 - heads.g0
    rows = _even(q1 - q0, max(1, min(_GEMM_ROWS, max(budget // 256, 1)) // group))
    matrices = max(min(2, heads.count), min(heads.count, budget // (rows * group * total)))
    if matrices > 2:
        matrices -= matrices % 2  # an even split over two threads
    columns = max(_MIN_COLUMNS if budget >= DEFAULT_BUDGET else 1, budget // (rows * group * matrices))
    chunks = tuple(_chunks(segments, _even(total, columns)))
    head_steps = tuple(_split_heads(heads, matrices))
    for start in range(q0, q1, rows):
        yield RowStep(start, min(start + rows, q1), head_steps, chunks)


def _even(length: int, most: int) -> int:
    """Size of equal parts of `length`, each at most `most`, in multiples of 16 where that fits."""
    size = -(-length // -(-length // most))
    rounded = -(-size // 16) * 16
    return rounded if rounded <= most else size


def _split_heads(heads: Heads, matrices: int) -> Iterator[Heads]:
    per_batch = heads.k1 - heads.k0
    if matrices >= per_batch:
        step = matrices // per_batch
        for b in range(heads.b0, heads.b1, step):
            yield heads._replace(b0=b, b1=min(b + step, heads.b1))
        return
    for b in range(heads.b0, heads.b1):
        for k in range(heads.k0, heads.k1, matrices):
            yield heads._replace(b0=b, b1=b + 1, k0=k, k1=min(k + matrices, heads.k1))


def _chunks(segments: Sequence[_Segment], columns: int) -> Iterator[Chunk]:
    runs: list[list[int]] = []
    partial: list[Partial] = []
    used = 0
    for segment in segments:
        k0 = segment.k0
        while k0 < segment.k1:
            k1 = min(segment.k1, k0 + columns - used)
            if segment.partial:
                partial.append(Partial(used, used + k1 - k0, k0, segment.slot))
            if runs and runs[-1][1] == k0:
                runs[-1][1] = k1
            else:
                runs.append([k0, k1])
            used += k1 - k0
            k0 = k1
            if used == columns:
                yield _chunk(runs, used, partial)
                runs, partial, used = [], [], 0
    if used:
        yield _chunk(runs, used, partial)


def _chunk(runs: list[list[int]], columns: int, partial: list[Partial]) -> Chunk:
    index = None if len(runs) == 1 else torch.cat([torch.arange(k0, k1, device="cpu") for k0, k1 in runs])
    return Chunk(tuple((k0, k1) for k0, k1 in runs), columns, tuple(partial), index)
