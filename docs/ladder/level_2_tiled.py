"""Level 2: tile by tile, so that no matrix of scores exists.

The idea: keep one number per row, the LSE, and compute scores again when they are needed.

    forward     a query tile walks the key tiles. It does not know the row's maximum in advance, so it keeps a running
                maximum m and sum l, and rescales what it has whenever m grows (online softmax); lse = m + ln l.
    backward    a key tile walks the query tiles. With lse, P = exp(S − lse) is right at once: no maximum, no rescaling.
                dK and dV of the key tile stay where they are (stationary); dQ receives a part from every key tile.

That last sentence shapes the GPU kernel: parts of one dQ row come from many workers, so there dQ is added up in global
memory, in fp32. Source of the order of loops: FlashAttention-2 (Dao 2023), Algorithms 1 and 2.
"""

from __future__ import annotations

import torch
from common import Head, causal, check, head, oracle
from torch import Tensor

TILE = 64


def tiles(length: int) -> list[slice]:
    """Rows of each tile; the last may be short."""
    return [slice(a, min(a + TILE, length)) for a in range(0, length, TILE)]


def score_tile(x: Head, rows: slice, cols: slice) -> Tensor:
    """Masked scores of one tile, the only ones in existence."""
    i, j = torch.arange(rows.start, rows.stop), torch.arange(cols.start, cols.stop)
    score = x.scale * x.query[rows] @ x.key[cols].mT
    return score.masked_fill(~causal(i[:, None], j[None]), -torch.inf)


def forward(x: Head) -> tuple[Tensor, Tensor]:
    out = torch.empty_like(x.query)
    lse = x.query.new_empty(len(x.query))
    for rows in tiles(len(x.query)):
        m = x.query.new_full((rows.stop - rows.start,), -torch.inf)
        total = torch.zeros_like(m)
        acc = torch.zeros_like(out[rows])
        for cols in tiles(len(x.key)):
            score = score_tile(x, rows, cols)
            higher = torch.maximum(m, score.amax(-1))
            offset = torch.where(higher == -torch.inf, 0.0, higher)  # a row that has kept nothing yet
            p = (score - offset[:, None]).exp()
            rescale = (m - offset).exp()
            total = total * rescale + p.sum(-1)
            acc = acc * rescale[:, None] + p @ x.value[cols]
            m = higher
        out[rows] = acc / total[:, None]
        lse[rows] = m + total.log()
    return out, lse


def backward(x: Head, out: Tensor, lse: Tensor) -> dict[str, Tensor]:
    delta = (x.grad_out * out).sum(-1)
    dq, dk, dv = (torch.zeros_like(t) for t in (x.query, x.key, x.value))
    for cols in tiles(len(x.key)):  # a CTA each
        for rows in tiles(len(x.query)):  # its walk
            p = (score_tile(x, rows, cols) - lse[rows, None]).exp()
            ds = p * (x.grad_out[rows] @ x.value[cols].mT - delta[rows, None])
            dv[cols] += p.mT @ x.grad_out[rows]  # stationary
            dk[cols] += x.scale * ds.mT @ x.query[rows]  # stationary
            dq[rows] += x.scale * ds @ x.key[cols]  # a part of many
    return {"dq": dq, "dk": dk, "dv": dv}


def main() -> None:
    x = head(300, 300, 32)
    out, lse = forward(x)
    keep = causal(torch.arange(300)[:, None], torch.arange(300)[None])
    check({"out": out, **backward(x, out, lse)}, oracle(x, keep), at_most=1e-13)
    print(f"largest matrix of scores: {TILE} x {TILE} instead of 300 x 300")


if __name__ == "__main__":
    main()
