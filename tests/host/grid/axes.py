"""The regression grid of design.md §6: its axes, and small selections of rows that cover every pair of values."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence
from typing import Any

LENGTHS = (1, 7, 64, 100, 129, 257, 1000, 1025)
HEAD_DIMS = (16, 64, 72, 80, 96, 104, 128, 192, 256, (192, 128), (64, 96), (16, 256))
HEADS = ((2, 2), (4, 2), (7, 1), (8, 1))  # groups of 1, 2, 7, 8
MASKS = (
    "none", "mask_mod only", "lists only", "both", "no full blocks", "no partial blocks", "dead rows",
    "empty kv columns", "tensor", "everything dead", "torch's",
)  # fmt: skip
BLOCK_SIZES = (16, 64, (64, 128), (128, 64), 96, 256, "SxS")
STRIDES = ("contiguous", "stride-0 heads", "stride-0 batch", "BSHD", "transposed", "padded")
CAPTURES = (
    "none", "0-d", "[1]", "by h", "by q", "by k", "by q-k", "2-D", "by b and k", "expanded", "used twice",
    "two scalars", "fp32", "bf16", "int",
)  # fmt: skip
LOSSES = ("out", "lse", "out and lse")
BASES = ("local", "global")

AXES: dict[str, Sequence[Any]] = {
    "q_len": LENGTHS, "kv_len": LENGTHS, "head_dim": HEAD_DIMS, "heads": HEADS, "mask": MASKS,
    "block_size": BLOCK_SIZES, "strides": STRIDES, "capture": CAPTURES, "loss": LOSSES, "base": BASES,
}  # fmt: skip

Row = dict[str, Any]


def product(**axes: Sequence[Any]) -> list[Row]:
    """Every combination."""
    return [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]


def pairwise(axes: Mapping[str, Sequence[Any]], seed: int = 0, tries: int = 20) -> list[Row]:
    """Rows that together hold every pair of values of every two axes: greedy, seeded, about as few as are needed."""
    names, rng = list(axes), random.Random(seed)
    missing = {
        (a, x, b, y)
        for a, b in itertools.combinations(range(len(names)), 2)
        for x in range(len(axes[names[a]]))
        for y in range(len(axes[names[b]]))
    }
    rows: list[Row] = []
    while missing:
        start = min(missing)
        candidates = [_grow(start, [len(axes[n]) for n in names], missing, rng) for _ in range(tries)]
        best = max(candidates, key=lambda row: len(_pairs(row) & missing))
        missing -= _pairs(best)
        rows.append({n: axes[n][i] for n, i in zip(names, best, strict=True)})
    return rows


def _grow(pair: tuple[int, int, int, int], sizes: list[int], missing: set[Any], rng: random.Random) -> tuple[int, ...]:
    """A row holding `pair`, its other values chosen one by one for the missing pairs they add."""
    chosen = {pair[0]: pair[1], pair[2]: pair[3]}
    for axis in rng.sample(range(len(sizes)), len(sizes)):
        if axis not in chosen:
            gains = [sum(_ordered(axis, v, b, y) in missing for b, y in chosen.items()) for v in range(sizes[axis])]
            most = max(gains)
            chosen[axis] = rng.choice([v for v, gain in enumerate(gains) if gain == most])
    return tuple(chosen[axis] for axis in range(len(sizes)))


def _ordered(a: int, x: int, b: int, y: int) -> tuple[int, int, int, int]:
    return (a, x, b, y) if a < b else (b, y, a, x)


def _pairs(row: tuple[int, ...]) -> set[tuple[int, int, int, int]]:
    return {(a, row[a], b, row[b]) for a, b in itertools.combinations(range(len(row)), 2)}


def row_id(row: Row) -> str:
    """A test id that reproduces the row."""
    return "-".join(f"{v[0]}x{v[1]}" if isinstance(v, tuple) else str(v).replace(" ", "_") for v in row.values())
