"""Tiled forward: online softmax over the column chunks of each row step."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from flexbwd.plan import Operands
from flexbwd.problem import empty_like_order

from .masks import hide
from .tiles import Problem, exp_minus
from .walk import Heads, RowStep


@torch.no_grad()
def forward(op: Operands, want_max: bool = False) -> tuple[Tensor, Tensor, Tensor | None]:
    """Attention over the listed blocks.

        out_i = Σ_j exp(s'_ij − lse_i) · v_j      lse_i = ln Σ_kept exp(s'_ij)

    Args:
        op: the problem; `op.query` may have any strides.
        want_max: also return each row's largest kept s'.
    Returns:
        out `[B, Hq, Sq, Dv]` in query's dtype and stride order, lse `[B, Hq, Sq]` fp32 (fp64 for fp64), and the row
        maxima like lse, or None. A row that keeps nothing: 0, -inf, -inf.
    """
    problem = Problem(op)
    out = empty_like_order(op.query, (*op.query.shape[:3], problem.value_dim))
    lse = torch.empty(op.query.shape[:3], dtype=problem.acc, device="cpu")
    maxima = torch.empty_like(lse) if want_max else None
    views = [problem.by_group(out), problem.by_group(lse.unsqueeze(-1))]
    if maxima is not None:
        views.append(problem.by_group(maxima.unsqueeze(-1)))
    for step in problem.walk:
        for heads in step.heads:
            for view, value in zip(views, _rows(problem, heads, step), strict=False):
                target = problem.step_rows(view, heads, step)
                target.copy_(value.view(target.shape)) if isinstance(value, Tensor) else target.fill_(value)
    return out, lse, maxima


def _rows(problem: Problem, heads: Heads, step: RowStep) -> tuple[Tensor | float, Tensor | float, Tensor | float]:
    """out, lse and row maximum of one step, `[matrices, group * rows, ...]`; numbers where nothing is listed."""
    if not step.chunks:
        return 0.0, -math.inf, -math.inf
    query = problem.rows(problem.query, heads, step).to(problem.acc) * problem.scale
    top = total = acc = None
    for chunk in step.chunks:
        scratch = problem.scratch.get("score", *query.shape[:2], chunk.columns)
        score = torch.bmm(query, problem.columns(problem.key, heads, chunk).mT, out=scratch)
        score = problem.apply_score_mod(score, heads, step, chunk)
        keeps = problem.masks.keeps(heads, step, chunk)
        if keeps:
            hide(problem.as_mod_tile(score, heads, step), keeps)
        value = problem.columns(problem.value, heads, chunk)
        chunk_top = score.amax(-1, keepdim=True)
        new_top = chunk_top if top is None else torch.maximum(top, chunk_top)
        # rows that kept nothing yet: subtract a number, not -inf, so that exp gives 0
        shift = new_top.clamp_min(torch.finfo(problem.acc).min)
        weight = exp_minus(score, shift)
        chunk_total = weight.sum(-1, keepdim=True)
        if acc is None:
            total, acc = chunk_total, torch.bmm(weight, value)
        else:
            assert top is not None and total is not None
            fade = exp_minus(top, shift)
            total = total.mul_(fade).add_(chunk_total)
            acc = acc.mul_(fade).baddbmm_(weight, value)
        top = new_top
    assert top is not None and total is not None and acc is not None
    lse = total.log().add_(top)
    return acc.div_(total.masked_fill_(total == 0, 1.0)), lse, top
