"""Results of one key head and its query heads in fp32, dense, by autograd: what all implementations are held against.

One head costs milliseconds on a GPU even at 32k, so nothing is timed before its numbers are known to be right.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from flexbwd.cli.bench_gpu.operands import Operands
from flexbwd.cli.bench_gpu.workloads import Workload

NAMES = ("out", "dq", "dk", "dv")
TOLERANCE = 1e-2  # relative error in norm; right bf16 kernels stay below 5e-3, the known wrong ones are above 0.1
_ROWS = 2048  # query rows evaluated at a time


def expected(w: Workload, given: Operands) -> dict[str, Tensor]:
    """fp32 out, dq `[group, S, D]` and dk, dv `[S, D]` of the last key head of the last batch entry."""
    b, kv_head = w.batch - 1, w.key_heads - 1
    first = kv_head * w.group
    key, value = (t[b, kv_head].float().requires_grad_() for t in (given.key, given.value))
    kv_idx = torch.arange(w.length, device=key.device)[None]
    score_mod = given.score(given.capture)
    at = torch.tensor(b, device=key.device)
    outs, dqs = [], []
    dk, dv = torch.zeros_like(key), torch.zeros_like(value)
    for h in range(first, first + w.group):
        head = torch.tensor(h, device=key.device)
        for row in range(0, w.length, _ROWS):
            q = given.query[b, h, row : row + _ROWS].float().requires_grad_()
            q_idx = torch.arange(row, row + q.shape[0], device=key.device)[:, None]
            score = q @ key.mT * w.dim**-0.5
            if score_mod is not None:
                score = score_mod(score, at, head, q_idx, kv_idx)
            if given.mask is not None:
                score = score.masked_fill(~given.mask(at, head, q_idx, kv_idx), -torch.inf)
            out = score.softmax(-1) @ value
            upstream = given.grad_out[b, h, row : row + _ROWS].float()
            dq, dk_part, dv_part = torch.autograd.grad(out, (q, key, value), upstream)
            dk += dk_part
            dv += dv_part
            outs.append(out.detach())
            dqs.append(dq)
    shape = (w.group, w.length, w.dim)
    return {"out": torch.cat(outs).view(shape), "dq": torch.cat(dqs).view(shape), "dk": dk.detach(), "dv": dv.detach()}


def of_head(w: Workload, name: str, whole: Tensor) -> Tensor:
    """The part of a full `[B, heads, S, D]` result that `expected` has."""
    if name in ("dk", "dv"):
        return whole[-1, -1]
    return whole[-1, -w.group :]


def errors(w: Workload, want: Mapping[str, Tensor], got: Mapping[str, Tensor]) -> dict[str, float]:
    """Relative error in norm of each result; inf where anything of the full tensor is not finite."""
    found = {}
    for name, whole in got.items():
        part = of_head(w, name, whole).float()
        error = (part - want[name]).norm() / want[name].norm()
        found[name] = float(error) if bool(torch.isfinite(whole).all()) else float("inf")
    return found
