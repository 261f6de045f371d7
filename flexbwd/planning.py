"""From a user's callables to a registered Plan, its captured tensors and its block lists, with the caches between.

A trace is found by the callable's fingerprint, a plan by the traces it joins, and built block lists by the *contents*
of the tensors the mask reads; on a GPU first by the tensors themselves and their version counters (`built_lists`).
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.attention.flex_attention import BlockMask as TorchBlockMask

from flexbwd import sparsity
from flexbwd.built_lists import built, same_contents
from flexbwd.errors import MaskError, ModDataDependentError, ModShapeError, ModUnsupportedOpError
from flexbwd.mask_ops import traced_lists
from flexbwd.modgraph.band import band_of
from flexbwd.modgraph.extents import Extents, check_extents
from flexbwd.modgraph.frontend import ModKind, TracedMod, trace, warn_narrowing
from flexbwd.modgraph.ir import Node
from flexbwd.modgraph.plan_mods import build_mod_plan
from flexbwd.plan import BlockLists, Plan, lookup, register
from flexbwd.problem import Problem, stat_dtype
from flexbwd.sparsity.tensors import IndexBase

UNTRACEABLE = (ModDataDependentError, ModShapeError, ModUnsupportedOpError)  # a mask that raises these is tabulated


class Mods(NamedTuple):
    """The user's callables of one call, checked."""

    score_mod: Callable[..., Tensor] | None = None
    score_mod_bwd: Callable[..., Tensor] | None = None
    mask_mod: Callable[..., Tensor] | None = None
    block_mask: sparsity.BlockMask | None = None


class Numerics(NamedTuple):
    """Options that become part of the plan."""

    precision: str = "fast"
    tile_elements: int | None = None
    backend: str = "cpu"
    deterministic: bool = False


@dataclass(frozen=True, eq=False)
class Linked:
    """A plan joined from traced mods, in both uses."""

    plan: Plan
    id: int
    # for lists built from the mods: score_keep joined to mask; None when there is no mask
    building: Plan | None
    building_id: int
    fitting: set[Extents] = field(default_factory=set)  # lengths that the captured tensors were checked against
    banded: Plan | None = None  # the plan without lists, where the mask is a band and the backend walks bands
    banded_id: int = -1


class Prepared(NamedTuple):
    """What the operators need beside q, k, v and scale."""

    plan_id: int
    captures: tuple[Tensor, ...]
    blocks: BlockLists | None


def choose_mask(mask_mod: Any, block_mask: Any, problem: Problem) -> tuple[Any, sparsity.BlockMask | None]:
    """The mask_mod to trace and the BlockMask to walk, from the two arguments a user may give."""
    if isinstance(mask_mod, Tensor):
        if block_mask is not None:
            raise MaskError(
                "mask_mod is a tensor and block_mask is given too; pass create_block_mask(tensor, ...) alone"
            )
        block_mask, mask_mod = tabulated(mask_mod, problem, None), None
    if block_mask is None:
        return mask_mod, None
    if isinstance(block_mask, TorchBlockMask):
        block_mask = sparsity.from_torch_cached(block_mask)
    if not isinstance(block_mask, sparsity.BlockMask):
        raise MaskError(
            f"block_mask is a {type(block_mask).__name__}; pass a flexbwd or torch BlockMask, or give a function or a "
            "bool tensor as mask_mod"
        )
    sparsity.validate_for(block_mask, problem.batch, problem.q_heads, problem.q_len, problem.kv_len, problem.device)
    own = block_mask.mask_mod
    if mask_mod is not None and (block_mask.bits is not None or (own is not None and own is not mask_mod)):
        raise MaskError(
            "mask_mod is given and block_mask has a mask of its own; join them with flexbwd.and_masks before "
            "create_block_mask, or pass only one"
        )
    return (own if mask_mod is None else mask_mod), block_mask


def tabulated(mask: Any, problem: Problem, base: IndexBase | None) -> sparsity.BlockMask:
    """The block mask of a dense bool tensor or of a callable that cannot be traced."""
    p, size = problem, block_size_of(None, base)
    return sparsity.create_block_mask(
        mask, p.batch, p.q_heads, p.q_len, p.kv_len, p.device, BLOCK_SIZE=size, index_base=base
    )


def agreed_base(block_mask: sparsity.BlockMask | None, base: IndexBase | None) -> IndexBase | None:
    """The one index base of a call: the mask's own serves the whole call, and another beside it is an error."""
    if not isinstance(block_mask, sparsity.BlockMask):
        return base
    own = block_mask.index_base
    if own is None:
        if base is not None and block_mask.built:
            raise MaskError(
                "index_base is given, but block_mask was created without one, so its lists belong to other "
                "coordinates; create it with create_block_mask(..., index_base=index_base)"
            )
        return base
    if base is None or base is own or same_base(own, base):
        return own
    raise MaskError("index_base differs from the one block_mask was created with; pass it to create_block_mask only")


def same_base(x: IndexBase, y: IndexBase) -> bool:
    """Do both give every position the same coordinates?"""
    if torch.compiler.is_compiling() or (x.b_off, x.h_off) != (y.b_off, y.h_off):
        return False
    pairs = ((x.q_base, y.q_base), (x.kv_base, y.kv_base))
    return all(p is q or (p is not None and q is not None and same_contents(p, q)) for p, q in pairs)


def prepare(mods: Mods, problem: Problem, numerics: Numerics, base: IndexBase | None) -> Prepared:
    """Trace (or find) every mod, join them, run their prologues and find or build the block lists."""
    try:
        traced, captures = trace_all(mods, problem)
    except UNTRACEABLE:
        if mods.mask_mod is None or mods.block_mask is not None:
            raise
        trace_all(mods._replace(mask_mod=None), problem)  # raises if it is a score mod that cannot be traced
        mods = mods._replace(mask_mod=None, block_mask=tabulated(mods.mask_mod, problem, base))
        traced, captures = trace_all(mods, problem)
    linked = link(traced, block_size_of(mods.block_mask, base), numerics)
    if base is None:
        check_lengths(linked, traced, problem)
    mask = mods.block_mask
    exact = mask is not None and mask.built and mods.mask_mod is mask.mask_mod  # its lists say what its mask_mod says
    given = None
    if mask is not None and not (exact and base is None and linked.banded is not None):
        given = BlockLists(mask.q_to_kv, mask.kv_to_q, mask.bits)
    plan, blocks = lists_for(linked, given, captures, problem, base)
    return Prepared(plan, captures, blocks)


def lists_for(
    linked: Linked,
    given: BlockLists | None,
    captures: Sequence[Tensor],
    problem: Problem,
    base: IndexBase | None,
    *,
    pin: bool = False,
) -> tuple[int, BlockLists | None]:
    """The plan id to run, and its lists: those given, or built from the mods, or None when everything is kept.

    `pin` keeps the plan for the life of the process: a compiled graph names it by its id.
    """
    if given is None and base is None and linked.banded is not None:
        if pin:
            register(linked.banded, pin=True)
        return linked.banded_id, None
    plan = linked.plan if given is not None or linked.building is None else linked.building
    number = linked.id if plan is linked.plan else linked.building_id
    if pin:
        register(plan, pin=True)
    if plan is linked.plan:
        return number, given
    values = captures if base is None else (*captures, base.q_base, base.kv_base)
    if problem.abstract or any(isinstance(v, FakeTensor) for v in values):
        return number, traced_lists(number, captures, problem, base)
    return number, built.find_or_build(plan, number, captures, problem, base)


def trace_all(mods: Mods, problem: Problem) -> tuple[tuple[TracedMod | None, ...], tuple[Tensor, ...]]:
    """The traces of score_mod, score_mod_bwd, mask_mod, and all their captured tensors by load slot."""
    tabulated_mask = mods.block_mask is not None and mods.block_mask.bits is not None
    kinds = (ModKind.SCORE, ModKind.SCORE_BWD, ModKind.MASK)
    given = (mods.score_mod, mods.score_mod_bwd, None if tabulated_mask else mods.mask_mod)
    traced: list[TracedMod | None] = []
    captures: list[Tensor] = []
    for mod, kind in zip(given, kinds, strict=True):
        if mod is None:
            traced.append(None)
            continue
        found, tensors = trace(mod, kind, device=problem.device)
        warn_narrowing(found, stat_dtype(problem.dtype))
        traced.append(found)
        captures += found.prologue.run(tensors)
    return tuple(traced), tuple(captures)


def check_lengths(linked: Linked, traced: Sequence[TracedMod | None], problem: Problem) -> None:
    """Refuse captured tensors too short for these lengths, where those are known; once per plan and lengths."""
    extents = Extents(problem.batch, problem.q_heads, problem.q_len, problem.kv_len)
    if not all(type(n) is int for n in extents) or extents in linked.fitting:
        return
    score, _, mask = traced
    if score is not None:
        check_extents(score, extents, masked=mask is not None)
    if mask is not None:
        check_extents(mask, extents, masked=False)
    if len(linked.fitting) > 64:
        linked.fitting.clear()
    linked.fitting.add(extents)


def block_size_of(block_mask: sparsity.BlockMask | None, base: IndexBase | None) -> tuple[int, int]:
    """The granule of the lists and of `base`: the block mask's, else the base's, else 128."""
    if block_mask is not None:
        return block_mask.block_size
    return (128, 128) if base is None else base.block_size


# -- joining traces into plans -----------------------------------------------------------------------------------------
_links: OrderedDict[tuple, tuple[tuple, Linked]] = OrderedDict()
_LINKS = 256
_lock = threading.Lock()


def link(traced: tuple[TracedMod | None, ...], block_size: tuple[int, int], numerics: Numerics) -> Linked:
    """The plan of (score, score_bwd, mask) traces; found again by the identity of the traces."""
    key = (*map(id, traced), block_size, numerics)
    with _lock:
        hit = _links.get(key)
        if hit is not None:
            _links.move_to_end(key)
            return hit[1]
    linked = _link(traced, block_size, numerics)
    with _lock:
        _links[key] = (traced, linked)  # holding the traces keeps their ids theirs
        if len(_links) > _LINKS:
            _links.popitem(last=False)
    return linked


def _link(traced: Sequence[TracedMod | None], block_size: tuple[int, int], numerics: Numerics) -> Linked:
    mods = build_mod_plan(*traced)
    plan = Plan(mods, block_size, **numerics._asdict())
    number = register(plan)
    conditions = [c for c in (mods.mask, mods.score_keep) if c is not None]
    if not conditions:
        return Linked(lookup(number), number, None, -1)
    joined = conditions[0] if len(conditions) == 1 else mods.builder.arith("and", *conditions)
    from_mods = replace(plan, mods=replace(mods, mask=joined, score_keep=None, hash=mods.hash + "/built"))
    built_number = register(from_mods)
    banded = _banded(plan, joined) if numerics.backend == "sm90" else None
    return Linked(
        lookup(number), number, lookup(built_number), built_number,
        banded=banded, banded_id=-1 if banded is None else register(banded),
    )  # fmt: skip


def _banded(plan: Plan, mask: Node) -> Plan | None:
    """The plan that walks a band instead of lists, where `mask` is one."""
    band = band_of(mask)
    if band is None:
        return None
    mods = replace(plan.mods, mask=None, score_keep=None, hash=plan.mods.hash + "/unmasked")
    return replace(plan, mods=mods, band=band)


def forget() -> None:
    """Drop joined plans and built block lists."""
    with _lock:
        _links.clear()
    built.__init__()  # type: ignore[misc]
