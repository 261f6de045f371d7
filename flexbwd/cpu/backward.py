"""Tiled backward: one walk by query rows; dQ is local to a step, dK and dV are added up in full-size buffers."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from flexbwd.plan import Gradients, Needs, Operands
from flexbwd.problem import empty_like_order

from .masks import keep_only
from .programs import Factor
from .tiles import FEW_RUNS, Problem, exp_minus, own_tile
from .walk import Chunk, Heads, RowStep

_LSE_ERROR = 1e-4  # relative error of p from rounding lse, above which p is normalised anew: |lse| > 800 in fp32


@torch.no_grad()
def backward(
    op: Operands, out: Tensor, lse: Tensor, grad_out: Tensor, grad_lse: Tensor | None, needs: Needs
) -> Gradients:
    """Gradients of `forward` at `grad_out` `[B, Hq, Sq, Dv]` and `grad_lse` `[B, Hq, Sq]` or None (zeros).

        ds' = p ∘ (dO·Vᵀ − delta)     delta = Σ dO∘O − dLSE     ds = ds' · ∂s'/∂s
        dQ = scale · ds·K     dK = scale · dsᵀ·Q     dV = pᵀ·dO     d(capture) = Σ ds' · ∂s'/∂(capture)

    Args:
        out, lse: what `forward` returned.
        needs: gradients nobody needs are not computed.
    Returns:
        Gradients in the dtype and stride order of their tensors; None where not needed.
    """
    if not (needs.query or needs.key or needs.value or any(needs.captures)):
        return Gradients(captures=[None] * len(op.captures))
    run = _Backward(op, out, lse, grad_out, grad_lse, needs)
    for step in run.problem.walk:
        for heads in step.heads:
            run.rows(heads, step)
    return run.results()


class _Backward:
    def __init__(
        self, op: Operands, out: Tensor, lse: Tensor, grad_out: Tensor, grad_lse: Tensor | None, needs: Needs
    ) -> None:
        self.problem = problem = Problem(op)
        self.op, self.needs = op, needs
        self.out, self.lse, self.grad_out = map(problem.by_group, (out, lse.unsqueeze(-1), grad_out))
        self.grad_lse = None if grad_lse is None else problem.by_group(grad_lse.unsqueeze(-1))
        wanted = (*needs.captures, *[False] * (len(op.captures) - len(needs.captures)))
        self.mods = problem.programs.backward(wanted, needs.query or needs.key)
        self.through_score = self.mods.score_factor != 0.0  # a mod that ignores the score: dQ = dK = 0
        self.dq = empty_like_order(op.query, op.query.shape) if needs.query else None
        self.dk = empty_like_order(op.key, op.key.shape, problem.acc).zero_() if needs.key else None
        self.dv = empty_like_order(op.value, op.value.shape, problem.acc).zero_() if needs.value else None
        self.dcaptures = [
            torch.zeros(c.shape, dtype=problem.acc, device="cpu") if need else None
            for c, need in zip(op.captures, wanted, strict=True)
        ]

    def results(self) -> Gradients:
        op = self.op
        dk = None if self.dk is None else self.dk.to(op.key.dtype)
        dv = None if self.dv is None else self.dv.to(op.value.dtype)
        captures = [None if g is None else g.to(c.dtype) for g, c in zip(self.dcaptures, op.captures, strict=True)]
        return Gradients(self.dq, dk, dv, captures)

    def rows(self, heads: Heads, step: RowStep) -> None:
        """One row step: its dQ, and its share of everything else."""
        problem = self.problem
        dq = self._chunks(heads, step) if step.chunks else None
        if self.dq is not None:
            target = problem.step_rows(problem.by_group(self.dq), heads, step)
            if dq is None:
                target.zero_()
            elif dq.dtype is target.dtype:
                torch.mul(dq.view(target.shape), problem.scale, out=target)
            else:
                target.copy_(dq.mul_(problem.scale).view(target.shape))

    def _chunks(self, heads: Heads, step: RowStep) -> Tensor | None:
        """Adds up dK, dV and captured gradients; returns ds·K, or None if nobody needs it."""
        problem = self.problem
        query = problem.rows(problem.query, heads, step).to(problem.acc) * problem.scale
        grad_out, lse, delta = self._row_terms(heads, step)
        total = self._row_totals(query, lse, heads, step)
        dq: Tensor | None = None
        for chunk in step.chunks:
            key = problem.columns(problem.key, heads, chunk)
            weight, values = self._weights(query, key, lse, heads, step, chunk)
            if total is not None:
                weight.div_(total)
            if self.dv is not None:
                self._add(self.dv, torch.bmm(weight.mT, grad_out), heads, chunk)
            if not (self.through_score or self.mods.sites):
                continue
            grad = self._modified_grad(weight, grad_out, delta, heads, chunk)
            if self.mods.sites:
                self._capture_grads(grad, weight, values, heads, step, chunk)
            if not self.through_score:
                continue
            self._through_mod(grad, weight, values, heads, step)
            if self.needs.query:
                dq = torch.bmm(grad, key) if dq is None else dq.baddbmm_(grad, key)
            if self.dk is not None:
                self._add(self.dk, torch.bmm(grad.mT, query), heads, chunk)
        return dq

    def _row_terms(self, heads: Heads, step: RowStep) -> tuple[Tensor, Tensor, Tensor]:
        """dO, lse and delta of a step; a row that keeps nothing has lse +inf, so that its weights are 0."""
        problem = self.problem
        grad_out = problem.rows(self.grad_out, heads, step).to(problem.acc)
        lse = problem.rows(self.lse, heads, step)
        delta = (grad_out * problem.rows(self.out, heads, step)).sum(-1, keepdim=True)
        if self.grad_lse is not None:
            delta -= problem.rows(self.grad_lse, heads, step)
        dead = lse == -math.inf
        if dead.any():
            lse = lse.masked_fill(dead, math.inf)
            grad_out, delta = grad_out.masked_fill(dead, 0.0), delta.masked_fill(dead, 0.0)
        return grad_out, lse, delta

    def _row_totals(self, query: Tensor, lse: Tensor, heads: Heads, step: RowStep) -> Tensor | None:
        """Σ exp(s' − lse) of each row, 1 but for the rounding of lse; None where that is small.

        A row of masking constants only, -1e9 or finfo.min, has an lse that cannot hold ln(number of keys) beside them.
        """
        problem = self.problem
        if float(lse.masked_fill(lse == math.inf, 0.0).abs().amax()) * torch.finfo(problem.acc).eps <= _LSE_ERROR:
            return None
        total = torch.zeros_like(lse)
        for chunk in step.chunks:
            key = problem.columns(problem.key, heads, chunk)
            total += self._weights(query, key, lse, heads, step, chunk)[0].sum(-1, keepdim=True)
        return total.masked_fill_(total == 0, 1.0)

    def _weights(
        self, query: Tensor, key: Tensor, lse: Tensor, heads: Heads, step: RowStep, chunk: Chunk
    ) -> tuple[Tensor, Sequence[Tensor]]:
        """p = exp(s' − lse), 0 where masked, and the values of the mods' program."""
        problem = self.problem
        scratch = problem.scratch.get("score", *query.shape[:2], chunk.columns)
        score = torch.bmm(query, key.mT, out=scratch)
        values: Sequence[Tensor] = ()
        if self.mods.program is not None:
            inputs, origins = problem.coordinates.of(heads, step, chunk)
            tile = problem.as_mod_tile(score, heads, step)
            values = self.mods.program({"score": tile, **inputs}, problem.captures, problem.acc, origins)
            fresh = self.mods.program.is_fresh(0)
            if not fresh:  # the score itself may be a Jacobian too
                tile = problem.as_mod_tile(problem.scratch.get("weight", *score.shape), heads, step)
            score = own_tile(values[0], fresh, tile).view(score.shape)
        weight = exp_minus(score, lse)
        keeps = problem.masks.keeps(heads, step, chunk)
        if keeps:
            keep_only(problem.as_mod_tile(weight, heads, step), keeps)
        return weight, values

    def _modified_grad(self, weight: Tensor, grad_out: Tensor, delta: Tensor, heads: Heads, chunk: Chunk) -> Tensor:
        """ds' = p ∘ (dO·Vᵀ − delta)."""
        scratch = self.problem.scratch.get("grad", *weight.shape)
        value = self.problem.columns(self.problem.value, heads, chunk)
        return torch.bmm(grad_out, value.mT, out=scratch).sub_(delta).mul_(weight)

    def _capture_grads(
        self, grad: Tensor, weight: Tensor, values: Sequence[Tensor], heads: Heads, step: RowStep, chunk: Chunk
    ) -> None:
        """Every captured tensor's share of ds'."""
        problem = self.problem
        tile, weights = (problem.as_mod_tile(t, heads, step) for t in (grad, weight))
        inputs, origins = problem.coordinates.of(heads, step, chunk)
        for site, factor in self.mods.sites:
            if isinstance(factor, Factor):
                part = factor.times(tile, values, weights, None)
            else:
                part = tile if factor == 1.0 else tile * factor
            into = self.dcaptures[site.slot]
            assert into is not None
            site.add(into, part, inputs, origins, problem.captures)

    def _through_mod(self, grad: Tensor, weight: Tensor, values: Sequence[Tensor], heads: Heads, step: RowStep) -> None:
        """ds = ds' · ∂s'/∂s, in place."""
        factor = self.mods.score_factor
        if isinstance(factor, Factor):
            tile, weights = (self.problem.as_mod_tile(t, heads, step) for t in (grad, weight))
            factor.times(tile, values, weights, tile)
        elif factor != 1.0:
            grad.mul_(factor)

    def _add(self, into: Tensor, part: Tensor, heads: Heads, chunk: Chunk) -> None:
        """Add `[matrices, columns, X]` to the chunk's keys of `[B, Hkv, Skv, X]`."""
        target = into[heads.b0 : heads.b1, heads.k0 : heads.k1]
        part = part.view(*target.shape[:2], chunk.columns, -1)
        if len(chunk.runs) > FEW_RUNS:
            target.index_add_(2, chunk.index, part)  # type: ignore[arg-type]
            return
        c0 = 0
        for k0, k1 in chunk.runs:
            target[:, :, k0:k1].add_(part[:, :, c0 : c0 + k1 - k0])
            c0 += k1 - k0
