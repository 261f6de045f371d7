"""Level 3: block lists, and three bodies of the loop.

The idea: decide about the mask per tile, before the loop; inside a tile that is kept whole, there is nothing to decide.

    empty    nothing is kept: the tile is not listed, so it costs nothing at all
    full     everything is kept: no mask, no compare
    partial  the mask is evaluated, element by element
    edge     everything is kept, but the tile hangs over the ragged end of the keys: one compare per column

A walk is one sequence of tile numbers: its partial tiles, then its edges, then its full ones. The three runs are three
loops whose bodies are compiled apart, so a causal mask given as a Python function costs what a built-in flag would.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

import torch
from common import Head, check, head, oracle
from torch import Tensor

TILE = 64
WINDOW = 300


def window(i: Tensor, j: Tensor) -> Tensor:
    """A causal window: query i sees its last WINDOW keys."""
    return (i >= j) & (i - j < WINDOW)


class Walk(NamedTuple):
    """Query tiles that a key tile visits."""

    partial: list[int]
    edge: list[int]
    full: list[int]


def walks(q_len: int, kv_len: int) -> list[Walk]:
    """The walk of every key tile. Here by looking at each element; flexbwd proves it from the mask's graph instead."""
    made = []
    for n in range(-(-kv_len // TILE)):
        j = torch.arange(n * TILE, (n + 1) * TILE)[None]
        walk = Walk([], [], [])
        for m in range(-(-q_len // TILE)):
            kept = window(torch.arange(m * TILE, (m + 1) * TILE)[:, None], j)
            if kept.all():
                (walk.edge if (n + 1) * TILE > kv_len else walk.full).append(m)
            elif kept.any():
                walk.partial.append(m)
        made.append(walk)
    return made


def padded(t: Tensor, rows: int, fill: float = 0.0) -> Tensor:
    """Whole tiles, as the copy engine delivers them: what lies beyond the tensor reads as `fill`."""
    missing = -(-rows // TILE) * TILE - rows
    return torch.cat([t, t.new_full((missing, *t.shape[1:]), fill)])


def backward(x: Head, out: Tensor, lse: Tensor) -> tuple[dict[str, Tensor], Counter[str]]:
    """Gradients, and how many elements went through which body."""
    q_len, kv_len = len(x.query), len(x.key)
    q, do, k, v = (padded(t, len(t)) for t in (x.query, x.grad_out, x.key, x.value))
    delta = padded((x.grad_out * out).sum(-1), q_len)
    lse = padded(lse, q_len, torch.inf)  # exp(s − inf) = 0: rows beyond the end vanish without a compare
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    elements: Counter[str] = Counter()
    for n, walk in enumerate(walks(q_len, kv_len)):
        cols = slice(n * TILE, (n + 1) * TILE)
        j = torch.arange(cols.start, cols.stop)[None]
        for body, run in walk._asdict().items():
            for m in run:
                rows = slice(m * TILE, (m + 1) * TILE)
                score = x.scale * q[rows] @ k[cols].mT
                if body == "partial":
                    i = torch.arange(rows.start, rows.stop)[:, None]
                    score = score.masked_fill(~(window(i, j) & (j < kv_len)), -torch.inf)
                elif body == "edge":
                    score = score.masked_fill(j >= kv_len, -torch.inf)
                p = (score - lse[rows, None]).exp()
                ds = p * (do[rows] @ v[cols].mT - delta[rows, None])
                dv[cols] += p.mT @ do[rows]
                dk[cols] += x.scale * ds.mT @ q[rows]
                dq[rows] += x.scale * ds @ k[cols]
                elements[body] += TILE * TILE
    return {"dq": dq[:q_len], "dk": dk[:kv_len], "dv": dv[:kv_len]}, elements


def main() -> None:
    q_len, kv_len = 1250, 1000
    x = head(q_len, kv_len, 32)
    keep = window(torch.arange(q_len)[:, None], torch.arange(kv_len)[None])
    score = (x.scale * x.query @ x.key.mT).masked_fill(~keep, -torch.inf)
    out, lse = score.softmax(-1) @ x.value, score.logsumexp(-1)  # level 2's forward would do
    got, elements = backward(x, out, lse)
    check(got, oracle(x, keep), at_most=1e-13)
    total = TILE * TILE * -(-q_len // TILE) * -(-kv_len // TILE)
    print("elements by body: " + ", ".join(f"{b} {e / total:.1%}" for b, e in elements.items()))
    print(f"never touched: {1 - elements.total() / total:.1%}; kept by the mask: {float(keep.double().mean()):.1%}")


if __name__ == "__main__":
    main()
