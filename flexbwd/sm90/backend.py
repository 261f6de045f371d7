"""The Hopper backend: one problem of the operators, as calls of the kernels."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from flexbwd.jit.warm import Job
from flexbwd.jit.warm import warm as warm_kernels
from flexbwd.modgraph.modplan import JClass
from flexbwd.plan import Gradients, Needs, Operands, Plan
from flexbwd.problem import Problem, empty_like_order
from flexbwd.sm90 import two_pass
from flexbwd.sm90.backward.call import backward as one_pass
from flexbwd.sm90.backward.call import jobs as one_pass_jobs
from flexbwd.sm90.backward.tile import backward_tile
from flexbwd.sm90.forward.call import config_of, launch
from flexbwd.sm90.operands import MAX_HEAD_DIM
from flexbwd.sm90.operands import Operands as KernelOperands
from flexbwd.sm90.parts import Parts, Use, parts_of, walk_kind
from flexbwd.sm90.tile import forward_tile
from flexbwd.sm90.two_pass import ForwardResult
from flexbwd.sm90.walks import WalkKind
from flexbwd.sparsity.tensors import IndexBase

_DTYPES = (torch.float16, torch.bfloat16)
_STEP = 8  # elements of 16 bytes: what TMA moves


def refusal(problem: Problem, plan: Plan, captures: Sequence[Tensor], base: IndexBase | None) -> str | None:
    """Why the kernels cannot do a call, or None where they can."""
    if problem.dtype not in _DTYPES:
        return f"query has dtype {problem.dtype}, and the Hopper kernels take float16 and bfloat16"
    for name, dim in (("D", problem.head_dim), ("Dv", problem.value_dim)):
        if not 0 < dim <= MAX_HEAD_DIM:
            return f"{name}={dim}, and the Hopper kernels take head dims from 1 to {MAX_HEAD_DIM}"
    trained = [plan.mods.captures[site.slot].name for site in plan.mods.loads if site.jacobian is not None]
    if trained:
        return f"{trained[0]} is captured and requires grad, and the Hopper kernels give no gradient of it yet"
    return None


def forward(op: Operands, want_max: bool = False) -> tuple[Tensor, Tensor, Tensor | None]:
    """out `[B, Hq, Sq, Dv]` like query; natural-log lse `[B, Hq, Sq]` fp32; row maxima, or None."""
    value_dim = op.value.shape[3]
    kernel = _operands(op)
    shape = op.query.shape[:3]
    out = empty_like_order(op.query, (*shape, kernel.value_dim))
    lse = torch.empty(shape, dtype=torch.float32, device=op.query.device)
    top = torch.empty_like(lse) if want_max else None
    parts = parts_of(op, _forward_use(kernel.head_dim, kernel.value_dim, walk_kind(op), op.base is not None))
    launch(kernel, parts.walk, out, lse, top, parts.mods)
    return (out if value_dim == kernel.value_dim else out[..., :value_dim].clone()), lse, top


def backward(
    op: Operands, out: Tensor, lse: Tensor, grad_out: Tensor, grad_lse: Tensor | None, needs: Needs
) -> Gradients:
    """Gradients of `forward`; see `flexbwd.cpu.backward` for the meaning."""
    kernel = _operands(op)
    result = ForwardResult(_padded(out), lse, _padded(grad_out), grad_lse)
    if _in_two_passes(op, kernel):
        found = two_pass.backward_two_pass(kernel, result, needs, *_two_parts(op, kernel))
    else:
        parts = parts_of(op, _backward_use(kernel.head_dim, kernel.value_dim, op.plan.mods.j_class))
        found = one_pass(kernel, *result, needs, parts.walk, parts.mods)
    found.query, found.key, found.value = (
        g if g is None or g.shape[3] == t.shape[3] else g[..., : t.shape[3]].clone()
        for g, t in zip((found.query, found.key, found.value), (op.query, op.key, op.value), strict=True)
    )
    found.captures = [None] * len(op.captures)
    return found


def warm(op: Operands, needs: Sequence[bool], want_max: bool = False) -> None:
    """Compile, or load from disk, every kernel that a call and its backward will launch.

    Args:
        needs: whether query, key, value and each capture require grad.
        want_max: the call wants row maxima.
    """
    kernel = _operands(op)
    parts = parts_of(op, _forward_use(kernel.head_dim, kernel.value_dim, walk_kind(op), op.base is not None))
    config = config_of(kernel, parts.walk, parts.mods[0], want_max)
    found: list[Job] = [(config, "flexbwd.sm90.forward.call:build")]
    if any(needs):
        wanted = Needs(*needs[:3], tuple(needs[3:]))
        if _in_two_passes(op, kernel):
            found += two_pass.jobs(kernel, wanted, *_two_parts(op, kernel))
        else:
            parts = parts_of(op, _backward_use(kernel.head_dim, kernel.value_dim, op.plan.mods.j_class))
            found += one_pass_jobs(kernel, wanted, parts.walk, parts.mods[0])
    warm_kernels(found)


def _in_two_passes(op: Operands, kernel: KernelOperands) -> bool:
    return op.plan.deterministic or two_pass.preferred(kernel.head_dim, kernel.value_dim)


def _two_parts(op: Operands, kernel: KernelOperands) -> tuple[Parts, Parts]:
    """For dQ, and for dK and dV."""
    dq, dkv = two_pass.uses(kernel.head_dim, kernel.value_dim, op.plan.mods.j_class)
    return parts_of(op, dq), parts_of(op, dkv)


@functools.cache
def _forward_use(head_dim: int, value_dim: int, kind: WalkKind, based: bool) -> Use:
    tile = forward_tile(head_dim, value_dim, kind, based)
    return Use((tile.tile_m, tile.tile_n))


@functools.cache
def _backward_use(head_dim: int, value_dim: int, j_class: JClass) -> Use:
    tile = backward_tile(head_dim, value_dim, j_class is JClass.NONLINEAR)
    return Use((tile.tile_m, tile.tile_n), keys_are_rows=True, backward=True)


def _operands(op: Operands) -> KernelOperands:
    return KernelOperands.of(_padded(op.query), _padded(op.key), _padded(op.value), op.scale)


def _padded(t: Tensor) -> Tensor:
    """Zero columns up to the next multiple of 8."""
    missing = -t.shape[3] % _STEP
    return torch.nn.functional.pad(t, (0, missing)) if missing else t
