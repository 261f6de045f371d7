"""The host side of the dQ kernel: pick the tile, launch."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flexbwd.jit.compile import Kernel, kernel_of, load_dsl
from flexbwd.jit.launch import fake_stream, fake_tensor
from flexbwd.sm90.dq.config import DqConfig
from flexbwd.sm90.dq.tile import DqTile, dq_tile
from flexbwd.sm90.mods import ModConfig
from flexbwd.sm90.operands import Operands
from flexbwd.sm90.parts import Parts
from flexbwd.sm90.walks import Dense, Lists, Walk, WalkKind, kind_of

_L2_BYTES = 32 << 20  # of 50 MiB on H200: what K and V of one section may take
_MANY = 1 << 30


def build_dq(config: DqConfig) -> tuple[Any, tuple[Any, ...]]:
    """The jit function of `config` and its fake arguments."""
    load_dsl()
    from cutlass import Float32, Int32

    from flexbwd.sm90.delta import fake_rows
    from flexbwd.sm90.dq.kernel import DqKernel

    matrices = [fake_tensor(config.dtype, 4) for _ in range(5)]
    rows = (fake_rows(), fake_rows())
    rest = (Float32(1.0), fake_walk(config.walk), Int32(1), config.mods.fake_arguments(), fake_stream())
    return DqKernel(config), (*matrices[:4], *rows, matrices[4], *rest)


def fake_walk(kind: WalkKind) -> tuple[Any, ...]:
    """What `_walk_arguments` will hand over."""
    from cutlass import Int32

    if kind.lists:
        return tuple(fake_tensor(torch.int32, rank, align) for rank, align in ((1, 4), (4, 16), (4, 4)))
    return tuple(Int32(1) for _ in range(3 if kind.band else 1))


@dataclass(frozen=True)
class RowTerms:
    """What the delta kernel leaves: lse in the log2 domain and delta, [B*Hq, >= Sq] fp32."""

    lse_log2: Tensor
    delta: Tensor


@functools.lru_cache(maxsize=1024)
def dq_kernel(
    head_dim: int, value_dim: int, dtype: torch.dtype, walk: WalkKind, mods: ModConfig, tile: DqTile | None = None
) -> Kernel:
    """The kernel; `tile` None takes the table's."""
    tile = dq_tile(head_dim, value_dim) if tile is None else tile
    return kernel_of(DqConfig(tile, dtype, walk, mods), "flexbwd.sm90.dq.call:build_dq")


def launch_dq(
    op: Operands,
    grad_out: Tensor,
    rows: RowTerms,
    grad_query: Tensor,
    parts: Parts,
    tile: DqTile | None = None,
) -> None:
    """Write `grad_query` [B, Hq, Sq, D]. Lists are by query tiles of `dq_tile(...)`."""
    kernel = dq_kernel(op.head_dim, op.value_dim, op.query.dtype, kind_of(parts.walk), parts.mods[0], tile)
    detail, ctas = _walk_arguments(op, parts.walk)
    inputs = (op.query, op.key, op.value, grad_out, rows.lse_log2, rows.delta)
    kernel.run(*inputs, grad_query, op.scale, detail, ctas, parts.mods[1])


def _walk_arguments(op: Operands, walk: Walk) -> tuple[tuple[Any, ...], int]:
    """The kernel's `walk`, and the CTAs: equal items run persistently, head by head; others are handed out by the
    hardware, one a CTA, as many heads side by side as keep K and V in L2."""
    if isinstance(walk, Lists):
        return (walk.lists.order, walk.lists.counts, walk.lists.tiles), _MANY
    if isinstance(walk, Dense):
        return (1,), _sms(op.query.device)
    kv_bytes = op.kv_len * (op.head_dim + op.value_dim) * op.key.element_size()
    return (max(1, _L2_BYTES // kv_bytes) * op.group, *walk.limits), _MANY


@functools.cache
def _sms(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
