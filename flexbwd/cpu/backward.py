"""Tiled backward: one walk by query rows; dQ is local to a step, dK and dV are added up in full-size buffers."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from flexbwd.modgraph.ir import Node
from flexbwd.modgraph.modplan import ModPlan
from flexbwd.modgraph.to_torch import TorchProgram
from flexbwd.plan import Gradients, Needs, Operands

from .captures import CaptureSite
from .finite import always_finite
from .tiles import ModPrograms, Problem, keep_only, like_strides, own_tile
from .walk import Chunk, Heads, RowStep


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


class _ModBackward:
    """Programs of the mods' derivative, for one choice of captures that need a gradient."""

    def __init__(self, mods: ModPlan, wanted: tuple[bool, ...], score: bool) -> None:
        sites = [s for s in mods.loads if s.jacobian is not None and s.slot < len(wanted) and wanted[s.slot]]
        self.sites = [CaptureSite(s) for s in sites]
        self._roots: list[Node] = [mods.forward]
        self.score_factor = self._factor(mods.j_score) if score else 0.0
        self.site_factors = [self._factor(s.jacobian) for s in sites]
        self.program = None if mods.is_identity and not self.sites else TorchProgram(self._roots, consume=("score",))

    def _factor(self, node: Node | None) -> float | _Factor:
        """A Jacobian as a number where it is constant, else as a root of the program."""
        assert node is not None
        if node.is_const:
            return float(node.value)
        self._roots.append(node)
        return _Factor(len(self._roots) - 1, always_finite(node))


class _Factor:
    """A Jacobian that varies: its place among the program's results."""

    def __init__(self, root: int, finite: bool) -> None:
        self.root, self.finite = root, finite

    def times(self, tile: Tensor, values: Sequence[Tensor], weight: Tensor, out: Tensor | None) -> Tensor:
        """tile · factor; 0 where the weight is 0, although the factor may be inf or NaN there."""
        product = torch.mul(tile, values[self.root], out=out)
        return product if self.finite else product.masked_fill_(weight == 0, 0.0)


class _Backward:
    def __init__(
        self, op: Operands, out: Tensor, lse: Tensor, grad_out: Tensor, grad_lse: Tensor | None, needs: Needs
    ) -> None:
        self.problem = problem = Problem(op)
        self.op, self.needs = op, needs
        self.out, self.lse, self.grad_out = map(problem.by_group, (out, lse.unsqueeze(-1), grad_out))
        self.grad_lse = None if grad_lse is None else problem.by_group(grad_lse.unsqueeze(-1))
        self.through_score = needs.query or needs.key
        wanted = tuple(needs.captures)
        key = (*wanted, self.through_score)
        programs = ModPrograms.of(problem.mods).backward
        if key not in programs:
            programs[key] = _ModBackward(problem.mods, wanted, self.through_score)
        self.mods: _ModBackward = programs[key]  # type: ignore[assignment]
        if self.mods.score_factor == 0.0:
            self.through_score = False  # the mod ignores the score: dQ = dK = 0
        self.dq = self._like(op.query) if needs.query else None
        self.dk = self._like(op.key, problem.acc) if needs.key else None
        self.dv = self._like(op.value, problem.acc) if needs.value else None
        self.dcaptures = [
            torch.zeros(c.shape, dtype=problem.acc) if n else None
            for c, n in zip(op.captures, [*wanted, *[False] * (len(op.captures) - len(wanted))], strict=True)
        ]

    def _like(self, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        return like_strides(x, x.shape[-1], dtype or x.dtype, zero=True)

    def results(self) -> Gradients:
        op = self.op
        dk = None if self.dk is None else self.dk.to(op.key.dtype)
        dv = None if self.dv is None else self.dv.to(op.value.dtype)
        captures = [None if g is None else g.to(c.dtype) for g, c in zip(self.dcaptures, op.captures, strict=True)]
        return Gradients(self.dq, dk, dv, captures)

    def rows(self, heads: Heads, step: RowStep) -> None:
        """One row step: its dQ, and its share of everything else."""
        if not step.chunks:
            return
        problem = self.problem
        query = problem.rows(problem.query, heads, step).to(problem.acc) * problem.scale
        grad_out, lse, delta = self._row_terms(heads, step)
        dq: Tensor | None = None
        for chunk in step.chunks:
            key = problem.columns(problem.key, heads, chunk)
            scratch = problem.scratch.get("score", *query.shape[:2], chunk.columns)
            score = torch.bmm(query, key.mT, out=scratch)
            weight, values = self._weights(score, lse, heads, step, chunk)
            if self.dv is not None:
                self._add(self.dv, torch.bmm(weight.mT, grad_out), heads, chunk)
            if not (self.through_score or self.mods.sites):
                continue
            grad = self._score_grad(weight, grad_out, delta, values, heads, step, chunk)
            if grad is None:
                continue
            if self.needs.query:
                dq = torch.bmm(grad, key) if dq is None else dq.baddbmm_(grad, key)
            if self.dk is not None:
                self._add(self.dk, torch.bmm(grad.mT, query), heads, chunk)
        if self.dq is not None and dq is not None:
            part = problem.by_group(self.dq)[
                heads.b0 : heads.b1, heads.k0 : heads.k1, heads.g0 : heads.g1, step.q0 : step.q1
            ]
            torch.mul(dq.view(part.shape), problem.scale, out=part) if dq.dtype is part.dtype else part.copy_(
                dq.mul_(problem.scale).view(part.shape)
            )

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

    def _weights(
        self, score: Tensor, lse: Tensor, heads: Heads, step: RowStep, chunk: Chunk
    ) -> tuple[Tensor, Sequence[Tensor]]:
        """p = exp(s' − lse), 0 where masked, and the values of the mods' program."""
        problem = self.problem
        values: Sequence[Tensor] = ()
        if self.mods.program is not None:
            inputs, origins = problem.coordinates.of(heads, step, chunk)
            tile = problem.as_mod_tile(score, heads, step)
            values = self.mods.program({"score": tile, **inputs}, problem.captures, problem.acc, origins)
            fresh = self.mods.program.is_fresh(0)
            if not fresh:  # the score itself may be a Jacobian too
                tile = problem.as_mod_tile(problem.scratch.get("weight", *score.shape), heads, step)
            score = own_tile(values[0], fresh, tile).view(score.shape)
        weight = score.sub_(lse).exp_()
        keep_only(problem.as_mod_tile(weight, heads, step), problem.keeps(heads, step, chunk))
        return weight, values

    def _score_grad(
        self,
        weight: Tensor,
        grad_out: Tensor,
        delta: Tensor,
        values: Sequence[Tensor],
        heads: Heads,
        step: RowStep,
        chunk: Chunk,
    ) -> Tensor | None:
        """ds, after the captured gradients have had their share of ds'."""
        problem, mods = self.problem, self.mods
        scratch = problem.scratch.get("grad", *weight.shape)
        grad = torch.bmm(grad_out, problem.columns(problem.value, heads, chunk).mT, out=scratch)
        grad.sub_(delta).mul_(weight)
        tile, weights = (problem.as_mod_tile(t, heads, step) for t in (grad, weight))
        if mods.sites:
            inputs, origins = problem.coordinates.of(heads, step, chunk)
            for site, factor in zip(mods.sites, mods.site_factors, strict=True):
                part = factor.times(tile, values, weights, None) if isinstance(factor, _Factor) else tile
                into = self.dcaptures[site.slot]
                assert into is not None
                if isinstance(factor, float) and factor != 1.0:
                    part = part * factor
                site.add(into, part, inputs, origins, problem.captures)
        if not self.through_score:
            return None
        if isinstance(mods.score_factor, _Factor):
            mods.score_factor.times(tile, values, weights, tile)
        elif mods.score_factor != 1.0:
            grad.mul_(mods.score_factor)
        return grad

    def _add(self, into: Tensor, part: Tensor, heads: Heads, chunk: Chunk) -> None:
        """Add `[matrices, columns, X]` to the chunk's keys of `[B, Hkv, Skv, X]`."""
        target = into[heads.b0 : heads.b1, heads.k0 : heads.k1]
        part = part.view(*target.shape[:2], chunk.columns, -1)
        if chunk.index is not None and len(chunk.runs) > 8:
            target.index_add_(2, chunk.index, part)
            return
        c0 = 0
        for k0, k1 in chunk.runs:
            target[:, :, k0:k1].add_(part[:, :, c0 : c0 + k1 - k0])
            c0 += k1 - k0
