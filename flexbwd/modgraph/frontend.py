"""From a user's callable to its `TracedMod`, found again by fingerprint.

Equal fingerprints give the same `TracedMod` object, so later caches may use its identity. A callable whose fingerprint
is opaque is traced at every call and still gets the same object as long as its graph is the same.
"""

from __future__ import annotations

import threading
import warnings
import weakref
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flexbwd.errors import ModDtypeWarning, ModRandomError

from .fingerprint import Fingerprint
from .paths import capture_name
from .trace import Mod, ModKind, TracedMod, trace_once
from .witness import Witness

__all__ = ["ModKind", "TracedMod", "clear_cache", "trace", "warn_narrowing"]


@dataclass(frozen=True, eq=False)
class _Entry:
    traced: TracedMod
    used: tuple[int, ...]  # which of the fingerprint's tensors, in the prologue's order
    held: tuple[Any, ...]  # keeps the identities in the key theirs


_by_key: OrderedDict[tuple[Any, ...], _Entry] = OrderedDict()
_by_signature: OrderedDict[tuple[str, str, str], TracedMod] = OrderedDict()
_LIMIT = 1024
_lock = threading.Lock()
_devices: dict[Any, torch.device] = {}


def trace(mod: Mod, kind: ModKind, *, device: torch.device | str) -> tuple[TracedMod, tuple[Tensor, ...]]:
    """The graph of `mod`, and its captured tensors in the order that `prologue.run` takes them.

    Args:
        device: where the query lies; captured tensors must lie there too (0-dim ones may stay on the CPU).
    Raises:
        ModError: the mod cannot be compiled; see `flexbwd.errors` for the classes.
    """
    device = _devices.get(device) or _with_index(device)
    where = (kind, device, torch.get_default_dtype(), _default_device())
    vouched = _vouched.get(id(mod))
    if vouched is not None and vouched.where == where and vouched.mod() is mod and vouched.witness.holds():
        return vouched.traced, tuple([t() for t in vouched.tensors])  # type: ignore[misc]
    found = Fingerprint(mod)
    key = (*where, *found.parts)
    if not found.opaque:
        with _lock:
            entry = _by_key.get(key)
            if entry is not None:
                _by_key.move_to_end(key)
        if entry is not None:
            tensors = tuple([found.tensors[i] for i in entry.used])
            _vouch(mod, where, entry.traced, tensors)
            return entry.traced, tensors
    traced, tensors = _traced(mod, kind, device, found)
    if _remember(mod, key, found, traced, tensors):
        _vouch(mod, where, traced, tensors)
    return traced, tensors


class _Vouched(NamedTuple):
    """A trace found before, for one function object; holds that function and its tensors weakly."""

    mod: weakref.ref[Mod]
    where: tuple[Any, ...]
    witness: Witness
    traced: TracedMod
    tensors: tuple[weakref.ref[Tensor], ...]


_vouched: dict[int, _Vouched] = {}


def _vouch(mod: Mod, where: tuple[Any, ...], traced: TracedMod, tensors: tuple[Tensor, ...]) -> None:
    """Remember how to recognise `mod` without a fingerprint, if that can be."""
    witness = Witness.of(mod)
    if witness is not None:
        number = id(mod)
        gone = weakref.ref(mod, lambda _: _vouched.pop(number, None))
        _vouched[number] = _Vouched(gone, where, witness, traced, tuple(map(weakref.ref, tensors)))


def _traced(mod: Mod, kind: ModKind, device: torch.device, found: Fingerprint) -> tuple[TracedMod, tuple[Tensor, ...]]:
    """Trace; a graph never seen before is traced twice, so that hidden randomness shows."""
    names = {id(t): capture_name(p) for t, p in zip(found.tensors, found.paths, strict=True)}
    traced, tensors = trace_once(mod, kind, device, names)
    signature = (traced.name, traced.where, traced.signature)
    with _lock:
        known = _by_signature.get(signature)
    if known is None:
        again, _ = trace_once(mod, kind, device, names)
        if again.signature != traced.signature:
            raise ModRandomError(
                "two traces gave two graphs: the mod draws random numbers or changes a Python object",
                mod=traced.name,
                where=traced.where,
                remedy="draw outside the mod and capture the tensor or number",
            )
    with _lock:
        traced = _by_signature.setdefault(signature, traced)
        _by_signature.move_to_end(signature)
        if len(_by_signature) > _LIMIT:
            _by_signature.popitem(last=False)
    return traced, tensors


def _remember(
    mod: Mod, key: tuple[Any, ...], found: Fingerprint, traced: TracedMod, tensors: tuple[Tensor, ...]
) -> bool:
    """Cache the trace if the fingerprint accounts for all it used and tracing left it as it was."""
    position = {id(t): i for i, t in enumerate(found.tensors)}
    if found.opaque or any(id(t) not in position for t in tensors) or Fingerprint(mod).parts != found.parts:
        return False
    entry = _Entry(traced, tuple(position[id(t)] for t in tensors), tuple(found.held))
    with _lock:
        _by_key[key] = entry
        if len(_by_key) > _LIMIT:
            _by_key.popitem(last=False)
    return True


def _with_index(device: torch.device | str) -> torch.device:
    """`cuda` as `cuda:0` or whichever is current, which tensors report."""
    named = torch.device(device)
    if named.type == "cuda" and named.index is None:
        return torch.device("cuda", torch.cuda.current_device() if torch.cuda.is_available() else 0)
    _devices[device] = named
    return named


def _default_device() -> torch.device | None:
    """Where factory functions of a mod put their tensors; a mode only where somebody set one."""
    return torch.get_default_device() if torch._C._len_torch_function_stack() else None


def clear_cache() -> None:
    """Forget every trace (tests, memory)."""
    with _lock:
        _by_key.clear()
        _by_signature.clear()
    _vouched.clear()


def warn_narrowing(traced: TracedMod, float_dtype: torch.dtype) -> None:
    """Warn (`ModDtypeWarning`) about float64 values inside a mod whose arithmetic is fp32."""
    if traced.narrowed and float_dtype != torch.float64:
        text = f"{traced.name} ({traced.where}): {traced.narrowed[0]} is float64, but mods compute in fp32 here; "
        warnings.warn(text + "write .float(), or pass float64 queries", ModDtypeWarning, stacklevel=3)
