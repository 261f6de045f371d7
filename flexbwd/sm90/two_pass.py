"""Backward in two passes: dK and dV by a kernel that owns keys, dQ by one that owns queries.

    delta    (sm90/delta.py)     delta, lse in the log2 domain
    dK, dV   D > 128: sm90/dkv   else: the one-pass kernel told to leave dQ out
    dQ       sm90/dq

Seven matrix products instead of five, but nothing is added up across CTAs: no fp32 accumulator in global memory, no
atomics, no convert launch, and the same bits in every run.

Measured on one H200, bf16, B2 S8192, in one run, ms, two passes / one pass / cuDNN / FA4: D256 H8 dense 5.47 / 9.69 /
7.48 / 7.26, causal 2.74 / 5.02 / 3.24 / 3.74; D192 H10 causal 2.45 / 3.13 / 3.68 / 2.42; D128 H16 dense 5.40 / 4.69 /
4.62 / 4.05, causal 2.72 / 2.44 / 2.55 / 2.20; D64 H16 causal 1.68 / 1.29 / 1.67 / 1.28.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from flexbwd.jit.compile import Kernel, kernel_of
from flexbwd.jit.launch import tma_ready
from flexbwd.jit.warm import Job
from flexbwd.modgraph.modplan import JClass
from flexbwd.plan import Gradients, Needs
from flexbwd.problem import empty_like_order
from flexbwd.sm90.backward.call import dense, walk_arguments
from flexbwd.sm90.backward.config import BwdConfig
from flexbwd.sm90.backward.tile import BwdTile, backward_tile
from flexbwd.sm90.dkv.call import Wanted, dkv_kernel, launch_dkv
from flexbwd.sm90.dkv.tile import DkvTile, dkv_tile
from flexbwd.sm90.dq.call import RowTerms, dq_kernel, launch_dq
from flexbwd.sm90.dq.tile import DqTile, dq_tile
from flexbwd.sm90.mods import ModConfig
from flexbwd.sm90.operands import Operands
from flexbwd.sm90.parts import Parts, Use
from flexbwd.sm90.row_configs import DeltaConfig
from flexbwd.sm90.walks import WalkKind, kind_of

_PADDING = 128  # rows; a multiple of every tile that reads lse and delta


class ForwardResult(NamedTuple):
    """What the forward returned, and the gradients that came back for it."""

    out: Tensor  # [B, Hq, Sq, Dv]
    lse: Tensor  # [B, Hq, Sq], natural log
    grad_out: Tensor
    grad_lse: Tensor | None


def preferred(head_dim: int, value_dim: int) -> bool:
    """Are two passes faster than one? Above 128 one pass has to work on tiles of 64 x 64."""
    return max(head_dim, value_dim) > 128


def tiles(head_dim: int, value_dim: int, j_class: JClass = JClass.ONE) -> tuple[DqTile, BwdTile | DkvTile]:
    """Tiles of the two passes, dQ first; `j_class`: what ∂s'/∂s is."""
    dq = dq_tile(head_dim, value_dim)
    if preferred(head_dim, value_dim):
        return dq, dkv_tile(head_dim, value_dim)
    return dq, backward_tile(head_dim, value_dim, j_class is JClass.NONLINEAR)


@functools.cache
def uses(head_dim: int, value_dim: int, j_class: JClass) -> tuple[Use, Use]:
    """How the two passes cut the scores into tiles, dQ first."""
    dq, dkv = tiles(head_dim, value_dim, j_class)
    return Use((dq.tile_m, dq.tile_n), backward=True), Use((dkv.tile_m, dkv.tile_n), True, backward=True)


def backward_two_pass(op: Operands, result: ForwardResult, needs: Needs, for_dq: Parts, for_dkv: Parts) -> Gradients:
    """Gradients as of `flexbwd.sm90.backward.call.backward`, bitwise the same in every run.

    Args:
        for_dq, for_dkv: walks and mods by `uses(...)`.
    """
    wanted = ((op.query, needs.query), (op.key, needs.key), (op.value, needs.value))
    dq, dk, dv = (empty_like_order(t, t.shape) if need else None for t, need in wanted)
    grads = [g for g in (dq, dk, dv) if g is not None]
    if not (op.batch and op.q_heads and op.q_len and op.kv_len):
        for g in grads:
            g.zero_()
    elif grads:
        result = result._replace(grad_out=tma_ready(dense(result.grad_out)))
        rows = row_terms(op, result)
        if dk is not None or dv is not None:
            launch = launch_dkv if preferred(op.head_dim, op.value_dim) else _launch_narrow_dkv
            launch(op, result.grad_out, rows, (dk, dv), for_dkv)
        if dq is not None:
            launch_dq(op, result.grad_out, rows, dq, for_dq)
    return Gradients(dq, dk, dv)


def row_terms(op: Operands, result: ForwardResult) -> RowTerms:
    """lse_log2 and delta, rows padded to 128, by the delta kernel."""
    out, lse, grad_out, grad_lse = result
    rows = -(-op.q_len // _PADDING) * _PADDING
    both = torch.empty((2, op.batch * op.q_heads, rows), dtype=torch.float32, device=op.query.device)
    terms = RowTerms(*both.unbind())
    lse = lse.contiguous()
    row_grad = lse if grad_lse is None else grad_lse.to(torch.float32).contiguous()
    kernel = _delta_kernel(op.query.dtype, op.value_dim, grad_lse is not None)
    kernel.run(tma_ready(out), grad_out, lse, row_grad, terms.lse_log2, terms.delta, both.view(-1, 4))
    return terms


@functools.lru_cache(maxsize=256)
def _delta_kernel(dtype: torch.dtype, value_dim: int, has_grad_lse: bool) -> Kernel:
    return kernel_of(DeltaConfig(dtype, value_dim, _PADDING, 0, has_grad_lse), "flexbwd.sm90.delta:build_delta")


@functools.lru_cache(maxsize=1024)
def _narrow_kernel(
    head_dim: int,
    value_dim: int,
    dtype: torch.dtype,
    walk: WalkKind,
    grouped: bool,
    wanted: Wanted,
    mods: ModConfig,
) -> Kernel:
    """The one-pass kernel without dQ: P and dS stay in registers, no warpgroup waits for another."""
    tile = backward_tile(head_dim, value_dim, mods.j_class is JClass.NONLINEAR)
    config = BwdConfig(tile, dtype, walk, grouped, False, *wanted, mods)
    return kernel_of(config, "flexbwd.sm90.backward.call:build_backward")


def _launch_narrow_dkv(
    op: Operands, grad_out: Tensor, rows: RowTerms, grads: tuple[Tensor | None, Tensor | None], parts: Parts
) -> None:
    """As `launch_dkv`."""
    dk, dv = grads
    wanted = Wanted(dk is not None, dv is not None)
    static = (op.head_dim, op.value_dim, op.query.dtype, kind_of(parts.walk), op.group > 1, wanted, parts.mods[0])
    kernel = _narrow_kernel(*static)
    no_dq = rows.delta.as_strided((1, 4), (4, 1))
    targets = (op.key if dk is None else dk, op.value if dv is None else dv)
    inputs = (op.query, op.key, op.value, grad_out, rows.lse_log2, rows.delta, no_dq)
    kernel.run(*inputs, *targets, op.scale, walk_arguments(op, kernel.config.tile, parts.walk), parts.mods[1])


def jobs(op: Operands, needs: Needs, for_dq: Parts, for_dkv: Parts) -> list[Job]:
    """(configuration, build) of every kernel that `backward_two_pass` may launch, with and without grad_lse; costly
    ones first."""
    dims = (op.head_dim, op.value_dim, op.query.dtype)
    wanted = Wanted(needs.key, needs.value)
    kernels = []
    if any(wanted):
        make = dkv_kernel if preferred(op.head_dim, op.value_dim) else _narrow_kernel
        kernels.append(make(*dims, kind_of(for_dkv.walk), op.group > 1, wanted, for_dkv.mods[0]))
    if needs.query:
        kernels.append(dq_kernel(*dims, kind_of(for_dq.walk), for_dq.mods[0]))
    if kernels:
        kernels += [_delta_kernel(op.query.dtype, op.value_dim, has_grad_lse) for has_grad_lse in (False, True)]
    return [(kernel.config, kernel.build) for kernel in kernels]
