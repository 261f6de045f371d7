"""Plan: what is compiled together, and the plain groups of tensors that cross the backend boundary."""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from dataclasses import dataclass, field, fields
from typing import NamedTuple
from weakref import WeakValueDictionary

from torch import Tensor

from flexbwd.errors import ConfigError
from flexbwd.modgraph.modplan import Band, ModPlan
from flexbwd.sparsity.tensors import BlockLists, IndexBase

__all__ = ["Band", "BlockLists", "Gradients", "Needs", "Operands", "Plan", "lookup", "plan_id", "register"]


@dataclass(frozen=True, eq=False)
class Plan:
    """Everything static that a backend compiles: mods, mask block size, numerics. Shapes and values stay outside."""

    mods: ModPlan
    block_size: tuple[int, int] = (128, 128)  # (q, kv) granule of the block lists
    precision: str = "fast"
    tile_elements: int | None = None  # score elements the CPU backend holds at a time; None: its own choice
    backend: str = "cpu"  # which code runs inside the operators
    deterministic: bool = False  # bitwise equal runs
    band: Band | None = None  # the mask as limits of q_idx - kv_idx: no block lists, and mods.mask is not evaluated


class Operands(NamedTuple):
    """One attention problem as a backend sees it."""

    query: Tensor  # [B, Hq, Sq, D], any strides
    key: Tensor  # [B, Hkv, Skv, D]
    value: Tensor  # [B, Hkv, Skv, Dv]
    captures: tuple[Tensor, ...]  # by load slot of plan.mods
    blocks: BlockLists | None  # None: every block is kept whole
    base: IndexBase | None
    scale: float
    plan: Plan


@dataclass(frozen=True)
class Needs:
    """Which gradients somebody asked for."""

    query: bool = True
    key: bool = True
    value: bool = True
    captures: tuple[bool, ...] = ()


@dataclass
class Gradients:
    """Gradients by operand; None where not needed."""

    query: Tensor | None = None
    key: Tensor | None = None
    value: Tensor | None = None
    captures: list[Tensor | None] = field(default_factory=list)


# -- registry: operators name a plan by a number ----------------------------------------------------------------------
_alive: WeakValueDictionary[int, Plan] = WeakValueDictionary()
_recent: OrderedDict[int, Plan] = OrderedDict()
_pinned: dict[int, Plan] = {}
_RECENT = 1024
_lock = threading.Lock()


def plan_id(plan: Plan) -> int:
    """A number made of the plan's content, so that a graph cached on disk can never mean another plan."""
    parts = [(f.name, p.hash if isinstance(p := getattr(plan, f.name), ModPlan) else p) for f in fields(plan)]
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:8], "big") >> 1


def register(plan: Plan, *, pin: bool = False) -> int:
    """Make `plan` findable by its id while in use; `pin` keeps it for the life of the process (compiled graphs)."""
    number = plan_id(plan)
    with _lock:
        plan = _alive.setdefault(number, plan)
        _recent[number] = plan
        _recent.move_to_end(number)
        if len(_recent) > _RECENT:
            _recent.popitem(last=False)
        if pin:
            _pinned[number] = plan
    return number


def lookup(number: int) -> Plan:
    """The plan registered under `number`."""
    plan = _alive.get(number)
    if plan is None:
        raise ConfigError(
            f"plan={number} is not registered in this process; call flexbwd.flex_attention rather than the operator, "
            "or recompile the graph that holds it"
        )
    return plan
