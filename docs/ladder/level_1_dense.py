"""Level 1: attention and its backward, written out densely.

The idea: softmax needs no Jacobian. Of everything that a row's softmax mixes, its backward needs one number, delta.

    forward     S = scale·Q Kᵀ      lse = ln Σ_j exp S      P = exp(S − lse)      O = P V

    backward    dV = Pᵀ dO          dP = dO Vᵀ              dS = P ∘ (dP − delta)
                dQ = scale·dS K     dK = scale·dSᵀ Q        delta_i = Σ_j P_ij dP_ij = Σ_d dO_id O_id

The last equality is what makes the rest of this ladder possible: delta comes from O and dO alone, a row at a time,
before any score is computed again. Cost of this level: three matrices of Sq × Skv elements.
"""

from __future__ import annotations

import torch
from common import Head, causal, check, head, oracle
from torch import Tensor


def forward(x: Head, keep: Tensor) -> tuple[Tensor, Tensor]:
    """(O, lse)."""
    score = (x.scale * x.query @ x.key.mT).masked_fill(~keep, -torch.inf)
    lse = score.logsumexp(-1)
    return (score - lse[:, None]).exp() @ x.value, lse


def backward(x: Head, keep: Tensor, out: Tensor, lse: Tensor) -> dict[str, Tensor]:
    score = (x.scale * x.query @ x.key.mT).masked_fill(~keep, -torch.inf)
    p = (score - lse[:, None]).exp()
    delta = (x.grad_out * out).sum(-1)
    dv = p.mT @ x.grad_out
    dp = x.grad_out @ x.value.mT
    ds = p * (dp - delta[:, None])
    return {"dq": x.scale * ds @ x.key, "dk": x.scale * ds.mT @ x.query, "dv": dv}


def main() -> None:
    x = head(200, 200, 32)
    keep = causal(torch.arange(200)[:, None], torch.arange(200)[None])
    out, lse = forward(x, keep)
    check({"out": out, **backward(x, keep, out, lse)}, oracle(x, keep), at_most=1e-13)


if __name__ == "__main__":
    main()
