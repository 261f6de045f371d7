"""The host side of the dK/dV kernel: pick the tile, launch."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flexbwd.jit.compile import Kernel, kernel_of, load_dsl
from flexbwd.jit.launch import fake_stream, fake_tensor
from flexbwd.sm90.backward.call import fake_walk, walk_arguments
from flexbwd.sm90.dkv.config import DkvConfig
from flexbwd.sm90.dkv.tile import DkvTile, dkv_tile
from flexbwd.sm90.dq.call import RowTerms
from flexbwd.sm90.mods import ModConfig
from flexbwd.sm90.operands import Operands
from flexbwd.sm90.parts import Parts
from flexbwd.sm90.walks import WalkKind, kind_of


def build_dkv(config: DkvConfig) -> tuple[Any, tuple[Any, ...]]:
    """The jit function of `config` and its fake arguments."""
    load_dsl()
    from cutlass import Float32

    from flexbwd.sm90.delta import fake_rows
    from flexbwd.sm90.dkv.kernel import DkvKernel

    matrices = [fake_tensor(config.dtype, 4) for _ in range(6)]
    rows = (fake_rows(), fake_rows())
    rest = (Float32(1.0), fake_walk(config.walk), config.mods.fake_arguments(), fake_stream())
    return DkvKernel(config), (*matrices[:4], *rows, *matrices[4:], *rest)


class Wanted(NamedTuple):
    """Which of the two gradients."""

    dk: bool
    dv: bool


@functools.lru_cache(maxsize=1024)
def dkv_kernel(
    head_dim: int,
    value_dim: int,
    dtype: torch.dtype,
    walk: WalkKind,
    grouped: bool,
    wanted: Wanted,
    mods: ModConfig,
    tile: DkvTile | None = None,
) -> Kernel:
    """The kernel; `tile` None takes the table's."""
    tile = dkv_tile(head_dim, value_dim) if tile is None else tile
    return kernel_of(DkvConfig(tile, dtype, walk, grouped, *wanted, mods), "flexbwd.sm90.dkv.call:build_dkv")


def launch_dkv(
    op: Operands,
    grad_out: Tensor,
    rows: RowTerms,
    grads: tuple[Tensor | None, Tensor | None],
    parts: Parts,
    tile: DkvTile | None = None,
) -> None:
    """Write dK [B, Hkv, Skv, D] and dV [B, Hkv, Skv, Dv], where `grads` has them. Lists are by key tiles of
    `dkv_tile(...)`, per query head."""
    dk, dv = grads
    wanted = Wanted(dk is not None, dv is not None)
    static = (op.head_dim, op.value_dim, op.query.dtype, kind_of(parts.walk), op.group > 1, wanted, parts.mods[0])
    kernel = dkv_kernel(*static, tile)
    inputs = (op.query, op.key, op.value, grad_out, rows.lse_log2, rows.delta)
    targets = (op.key if dk is None else dk, op.value if dv is None else dv)
    detail = walk_arguments(op, kernel.config.tile, parts.walk)
    kernel.run(*inputs, *targets, op.scale, detail, parts.mods[1])
