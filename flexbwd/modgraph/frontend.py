"""From a user's callable to its `TracedMod`, found again by fingerprint."""

from __future__ import annotations

import threading
import warnings
from collections import OrderedDict

import torch
from torch import Tensor

from flexbwd.errors import ModDtypeWarning

from .trace import Mod, ModKind, TracedMod, trace_once

__all__ = ["ModKind", "TracedMod", "trace", "warn_narrowing"]

_by_signature: OrderedDict[tuple, TracedMod] = OrderedDict()
_lock = threading.Lock()
_LIMIT = 1024


def trace(mod: Mod, kind: ModKind, *, device: torch.device | str) -> tuple[TracedMod, tuple[Tensor, ...]]:
    """The graph of `mod`, and its captured tensors in the order that `prologue.run` takes them."""
    traced, tensors = trace_once(mod, kind, torch.device(device), {})
    with _lock:
        traced = _by_signature.setdefault((traced.name, traced.where, traced.signature), traced)
        if len(_by_signature) > _LIMIT:
            _by_signature.popitem(last=False)
    return traced, tensors


def warn_narrowing(traced: TracedMod, float_dtype: torch.dtype) -> None:
    """Warn (`ModDtypeWarning`) about float64 values inside a mod whose arithmetic is fp32."""
    if traced.narrowed and float_dtype != torch.float64:
        text = f"{traced.name} ({traced.where}): {traced.narrowed[0]} is float64, but mods compute in fp32 here; "
        warnings.warn(text + "write .float(), or pass float64 queries", ModDtypeWarning, stacklevel=3)
