"""aten's views and gathers as renamings of coordinates.

An entry takes the Builder, the viewed `Value`, the result's shape and the operator's other arguments, and gives the
result's `Pull`. Coordinates may be negative with Python's meaning as long as a dimension keeps its extent; a view that
changes an extent wraps them first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .ir import Builder, Node
from .values import Coords, Pull, Value, aligned, wrapped

Shape = tuple[int, ...]
View = Callable[..., Pull]


def _same(b: Builder, v: Value, out: Shape, *_: Any) -> Pull:
    return v.at


def _detach(b: Builder, v: Value, out: Shape) -> Pull:
    return lambda c: b.emit("detach", v.at(c))


def _permute(b: Builder, v: Value, out: Shape, dims: Sequence[int]) -> Pull:
    rank = len(out)
    where = {d % rank: i for i, d in enumerate(dims)}
    return lambda c: v.at(tuple(c[where[d]] for d in range(rank)))


def _transpose(b: Builder, v: Value, out: Shape, first: int, second: int) -> Pull:
    rank = len(out)
    if rank == 0:
        return v.at
    dims = list(range(rank))
    dims[first % rank], dims[second % rank] = dims[second % rank], dims[first % rank]
    return _permute(b, v, out, dims)


def _t(b: Builder, v: Value, out: Shape) -> Pull:
    return _transpose(b, v, out, 0, 1) if len(out) == 2 else v.at


def _select(b: Builder, v: Value, out: Shape, dim: int, index: int) -> Pull:
    dim %= len(v.shape)
    at = b.const(index % v.shape[dim])
    return lambda c: v.at((*c[:dim], at, *c[dim:]))


def _slice(
    b: Builder, v: Value, out: Shape, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Pull:
    dim %= len(v.shape)
    first, _, _ = slice(start, end, step).indices(v.shape[dim])
    if first == 0 and step == 1 and out[dim] == v.shape[dim]:
        return v.at

    def pull(c: Coords) -> Node:
        moved = b.arith("mul", wrapped(b, c[dim], out[dim]), b.const(step))
        return v.at((*c[:dim], b.arith("add", moved, b.const(first)), *c[dim + 1 :]))

    return pull


def _unsqueeze(b: Builder, v: Value, out: Shape, dim: int) -> Pull:
    dim %= len(out)
    return lambda c: v.at((*c[:dim], *c[dim + 1 :]))


def _squeeze(b: Builder, v: Value, out: Shape, dims: int | Sequence[int] | None = None) -> Pull:
    rank = len(v.shape)
    asked = range(rank) if dims is None else [dims] if isinstance(dims, int) else dims
    gone = {d % rank for d in asked if v.shape[d] == 1} if rank else set()
    zero = b.const(0)

    def pull(c: Coords) -> Node:
        rest = iter(c)
        return v.at(tuple(zero if d in gone else next(rest) for d in range(rank)))

    return pull


def _expand(b: Builder, v: Value, out: Shape, *_: Any, **__: Any) -> Pull:
    return lambda c: v.at(aligned(c, v.shape, b.const(0)))


def _reshape(b: Builder, v: Value, out: Shape, *_: Any) -> Pull:
    """Through the flat position; dimensions of one element cost nothing."""

    def pull(c: Coords) -> Node:
        flat = b.const(0)
        for coord, size in zip(c, out, strict=True):
            if size != 1:
                flat = b.arith("add", b.arith("mul", flat, b.const(size)), wrapped(b, coord, size))
        inner, found = math.prod(v.shape), []
        for size in v.shape:
            inner //= max(size, 1)
            at = b.arith("fdiv", flat, b.const(inner)) if inner else flat
            found.append(b.arith("mod", at, b.const(size)) if size * inner != math.prod(v.shape) else at)
        return v.at(tuple(found))

    return pull


def _index(b: Builder, v: Value, out: Shape, indices: Sequence[Value | None]) -> Pull:
    indices = [*indices, *[None] * (len(v.shape) - len(indices))]
    used = [d for d, i in enumerate(indices) if i is not None]
    shape = torch.broadcast_shapes(*(i.shape for i in indices if i is not None))
    together = used == list(range(used[0], used[0] + len(used)))
    start, count = (used[0] if together else 0), len(shape)

    def pull(c: Coords) -> Node:
        middle, rest = c[start : start + count], iter((*c[:start], *c[start + count :]))
        zero = b.const(0)
        return v.at(tuple(next(rest) if i is None else i.at(aligned(middle, i.shape, zero)) for i in indices))

    return pull


def _index_select(b: Builder, v: Value, out: Shape, dim: int, index: Value) -> Pull:
    if not v.shape:
        return lambda c: v.at(())
    dim %= len(v.shape)
    return lambda c: v.at((*c[:dim], index.at(c[dim : dim + 1] if index.shape else ()), *c[dim + 1 :]))


def _gather(b: Builder, v: Value, out: Shape, dim: int, index: Value, **_: Any) -> Pull:
    if not v.shape:
        return lambda c: v.at(())
    dim %= len(v.shape)
    return lambda c: v.at((*c[:dim], index.at(c), *c[dim + 1 :]) if index.shape else (index.at(()),))


def _take(b: Builder, v: Value, out: Shape, index: Value) -> Pull:
    flat = v.at if len(v.shape) == 1 else _reshape(b, v, (math.prod(v.shape),))
    return lambda c: flat((index.at(c),))


def _embedding(b: Builder, v: Value, out: Shape, index: Value, *_: Any) -> Pull:
    rank = len(index.shape)
    return lambda c: v.at((index.at(c[:rank]), c[rank]))


def _unbind(b: Builder, v: Value, outs: Sequence[Shape], dim: int = 0) -> list[Pull]:
    return [_select(b, v, out, dim, i) for i, out in enumerate(outs)]


#: views whose every coordinate keeps its meaning: composed instead of computed, also on captured tensors
FREE_VIEWS: dict[str, View] = {
    "alias": _same,
    "detach": _detach,
    "t": _t,
    "transpose": _transpose,
    "permute": _permute,
    "select": _select,
    "unsqueeze": _unsqueeze,
    "squeeze": _squeeze,
    "expand": _expand,
}
VIEWS: dict[str, View] = {
    **FREE_VIEWS,
    "slice": _slice,
    "index": _index,
    "view": _reshape,
    "_unsafe_view": _reshape,
    "reshape": _reshape,
    "_reshape_copy": _reshape,
    "index_select": _index_select,
    "gather": _gather,
    "take": _take,
    "embedding": _embedding,
}
SPLITS: dict[str, Callable[..., list[Pull]]] = {"unbind": _unbind}
