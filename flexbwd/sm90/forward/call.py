"""The host side of the forward: pick the kernel, launch.

A launch costs microseconds of Python: a kernel is found by a short tuple, without touching its configuration.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor

from flexbwd.jit.compile import Kernel
from flexbwd.jit.compile import kernel_of as kernel_handle
from flexbwd.jit.launch import dsl_dtype, fake_compact, fake_stream, fake_tensor
from flexbwd.sm90.counters import work_counter
from flexbwd.sm90.forward.config import FwdConfig
from flexbwd.sm90.mods import NO_MODS, ModConfig
from flexbwd.sm90.operands import Operands
from flexbwd.sm90.tile import forward_tile, heads_in_l2
from flexbwd.sm90.walks import Band, Lists, Walk, kind_of

_LOG2_E = math.log2(math.e)
_NO_ARGUMENTS = (0,)


def build(config: FwdConfig) -> tuple[Any, tuple[Any, ...]]:
    """The jit function of a configuration and fake arguments for it."""
    from cutlass import Float32, Int32

    from flexbwd.sm90.forward.kernel import ForwardKernel

    inputs = tuple(fake_tensor(config.dtype, 4) for _ in range(3))
    rows = [fake_tensor(torch.float32, 3, 4) for _ in range(2 if config.want_max else 1)]
    outputs = (fake_tensor(config.dtype, 4), rows[0], rows[1] if config.want_max else None)
    lists = None
    if config.walk.lists:
        lists = (fake_tensor(torch.int32, 4), fake_tensor(torch.int32, 4, 4), fake_compact(torch.int32, 1))
    numbers = (Float32(1.0), Int32(0), Int32(0), Int32(1), Int32(1))
    arguments = (inputs, outputs, lists, config.mods.fake_arguments(), fake_compact(torch.int32, 1), numbers)
    return ForwardKernel(config, dsl_dtype(config.dtype)), (*arguments, fake_stream())


def kernel_of(config: FwdConfig) -> Kernel:
    return kernel_handle(config, "flexbwd.sm90.forward.call:build")


def config_of(op: Operands, walk: Walk, mods: ModConfig = NO_MODS, want_max: bool = False) -> FwdConfig:
    """The configuration that `launch` uses."""
    kind = kind_of(walk)
    tile = forward_tile(op.head_dim, op.value_dim, kind, mods.base is not None)
    prescale = op.scale <= 0 and not mods.has_score
    return FwdConfig(tile, op.query.dtype, kind, mods, prescale, want_max)


def launch(
    op: Operands,
    walk: Walk,
    out: Tensor,
    lse: Tensor,
    top: Tensor | None = None,
    mods: tuple[ModConfig, tuple[Any, ...]] = (NO_MODS, _NO_ARGUMENTS),
) -> None:
    """Write out [B, Hq, Sq, Dv], natural-log lse [B, Hq, Sq] fp32 and, if given, top: the row maxima of the modified
    scores, like lse. A row that keeps nothing gets 0, -inf and -inf.

    Args:
        mods: as `ModConfig.of` returns them.
    """
    query, key, value = op.query, op.key, op.value
    kv_len = key.shape[2]
    if not kv_len or not lse.numel():
        _nothing(out, lse, top)
        return
    config, arguments = mods
    kind, lo, hi, section, lists = 0, 0, 0, 1, None
    if type(walk) is Band:
        kind = 2 + (walk.lo is not None) + 2 * (walk.hi is not None)
        lo, hi = walk.limits
        section = min(heads_in_l2(kv_len, query.shape[3], value.shape[3]) * op.group, op.batch * op.q_heads)
    elif type(walk) is Lists:
        kind, lists = 1, tuple(walk.lists)
    facts = (query.dtype, query.shape[3], value.shape[3], kind, op.scale <= 0, top is None, id(config))
    found = _kernels.get(facts)
    if found is None:
        found = _remember(facts, op, walk, config, top is not None)
    device = query.device
    numbers = (op.scale * _LOG2_E, lo, hi, section, _sms(device))
    found[0].run((query, key, value), (out, lse, top), lists, arguments, work_counter(device), numbers)


_kernels: dict[tuple[Any, ...], tuple[Kernel, ModConfig]] = {}  # the key holds the id of the ModConfig


def _remember(
    facts: tuple[Any, ...], op: Operands, walk: Walk, mods: ModConfig, want_max: bool
) -> tuple[Kernel, ModConfig]:
    if len(_kernels) > 1024:  # mods come and go
        _kernels.clear()
    found = _kernels[facts] = kernel_of(config_of(op, walk, mods, want_max)), mods
    return found


def _nothing(out: Tensor, lse: Tensor, top: Tensor | None) -> None:
    """No rows, or no keys for them."""
    out.zero_()
    lse.fill_(-math.inf)
    if top is not None:
        top.fill_(-math.inf)


@functools.cache
def _sms(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
