"""Mod graphs made ready for a kernel, without the DSL.

The score becomes scale * raw, the result s' * log2(e), so that a plain exp2 follows; both factors go to where they
cost least (`fold.py`). Integers lose what the lengths make needless (`lanes.py`), predicates become words where they
can (`words.py`), and every load gets its guard.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor

from flexbwd.cpu.finite import always_finite
from flexbwd.modgraph.analyze import exactness
from flexbwd.modgraph.extents import Extents
from flexbwd.modgraph.ir import Builder, Node, topological
from flexbwd.modgraph.modplan import LoadClass, ModPlan

from .fold import decompose, fold
from .kinds import RAW, SCALE, Kind, KindTable, LoweringBuilder
from .lanes import Integers, guard_of, is_bounded, lane_bounds, padded
from .lines import slopes
from .words import Run, Runs

LOG2_E = math.log2(math.e)


@dataclass(frozen=True)
class Lowering:
    """What a graph is prepared for.

    Attributes:
        extents: local lengths.   tile: (query rows, key rows) that lanes come in.
        backward: the factor and the captured gradients too.   partial: mask_mod too.
        fast: approximate forms.   based: an IndexBase moves the coordinates.
    """

    extents: Extents
    tile: tuple[int, int]
    backward: bool = False
    partial: bool = True
    fast: bool = True
    based: bool = False


@dataclass(frozen=True, eq=False)
class Site:
    """A load through which a gradient flows: d(capture)[index] += dS' * jacobian, over kept elements."""

    load: Node
    jacobian: Node
    kind: LoadClass
    slot: int


@dataclass(frozen=True, eq=False)
class ModGraph:
    """What a kernel evaluates. Roots are None where there is nothing to do.

    Attributes:
        score: s' * log2(e) of RAW and SCALE.   factor: ds'/ds, where it is not 1; `factor_finite`: for any lane.
        keep, mask: predicates; score_keep on every tile, mask_mod on partial tiles.
        exact: float nodes that take no approximate form.
        guards: bits by load and dimension.   nonnegative: integer nodes that are >= 0 in every lane.
        slopes: float nodes that are straight lines: see `lines.py`.
        runs: by column coordinate, comparisons that keep runs of columns.
        any_length: no index of a load depends on the lengths, nor any integer's bounds.
    """

    score: Node | None
    factor: Node | None
    keep: Node | None
    mask: Node | None
    sites: tuple[Site, ...] = ()
    factor_finite: bool = True
    kinds: KindTable = field(default_factory=KindTable)
    exact: frozenset[Node] = frozenset()
    guards: Mapping[Node, tuple[int, ...]] = field(default_factory=dict)
    nonnegative: frozenset[Node] = frozenset()
    slopes: Mapping[Node, Node] = field(default_factory=dict)
    runs: Mapping[str, Mapping[Node, Run]] = field(default_factory=dict)
    any_length: bool = False  # the same for all shorter sequences

    @property
    def roots(self) -> list[Node]:
        """What a kernel asks for."""
        found = [r for r in (self.score, self.factor, self.keep, self.mask) if r is not None]
        for site in self.sites:
            found += [site.jacobian, site.load]
        return found

    @property
    def evaluated(self) -> list[Node]:
        """The roots, and what their short cuts are computed from."""
        extra = [n for runs in self.runs.values() for run in runs.values() for n in run.nodes]
        return [*self.roots, *self.slopes.values(), *extra]


def prepare(mods: ModPlan, captures: Sequence[Tensor], use: Lowering) -> ModGraph:
    """The graphs of one kernel.

    Args:
        captures: by load slot; only their shapes are read.
    """
    builder = LoweringBuilder()
    roots, sites = _copies(mods, use, builder)
    present = [r for r in roots if r is not None]
    flat = [*present, *(n for s in sites for n in (s.jacobian, s.load))]
    flat = Integers(builder, lane_bounds(flat, use.extents, use.based)).rebuild(flat)
    kinds = KindTable()
    if use.fast:
        flat = decompose(builder, flat, exactness(flat), kinds)
    flat = fold(builder, flat, exactness(flat), kinds)
    rest = iter(flat)
    score, factor, keep, mask = (None if r is None else next(rest) for r in roots)
    sites = tuple(Site(jacobian=next(rest), load=next(rest), kind=s.kind, slot=s.slot) for s in sites)
    graph = ModGraph(score, factor, keep, mask, sites, factor is None or _finite(factor, kinds), kinds)
    return _analysed(graph, builder, captures, use)


def _copies(mods: ModPlan, use: Lowering, builder: Builder) -> tuple[list[Node | None], tuple[Site, ...]]:
    """[score, factor, keep, mask] in terms of RAW, and the sites."""
    scaled = builder.emit("mul", builder.input(RAW), builder.input(SCALE))
    replace = {mods.builder.input("score"): scaled}

    def copy(node: Node) -> Node:
        return builder.substitute([node], replace)[0]

    roots: list[Node | None] = [None, None, None, None]
    sites: tuple[Site, ...] = ()
    if not mods.is_identity:
        roots[0] = builder.emit("mul", copy(mods.forward), builder.const(LOG2_E))
        if use.backward:
            roots[1] = None if mods.j_score.is_value(1) else copy(mods.j_score)
            found = [(s, s.jacobian) for s in mods.loads if s.jacobian is not None]
            sites = tuple(Site(copy(s.node), copy(j), s.kind, s.slot) for s, j in found)
    roots[2] = None if mods.score_keep is None else copy(mods.score_keep)
    roots[3] = None if mods.mask is None or not use.partial else copy(mods.mask)
    return roots, sites


def _finite(factor: Node, kinds: KindTable) -> bool:
    """Can 0 * factor only be 0? One of a whole head that is not finite has spoilt that head's gradient anyway."""
    return kinds[factor] is Kind.UNIFORM or always_finite(factor)


def _analysed(graph: ModGraph, builder: Builder, captures: Sequence[Tensor], use: Lowering) -> ModGraph:
    roots = graph.roots
    bounds = lane_bounds(roots, padded(use.extents, use.tile), use.based)
    exact = frozenset(exactness(roots))
    runs = {column: Runs(builder, roots, column, bounds).found for column in ("q_idx", "kv_idx")}
    graph = replace(graph, runs=runs, exact=exact)
    graph = replace(graph, slopes=slopes(builder, roots, graph.kinds, exact, bounds))
    nodes = list(topological(graph.evaluated))
    guards = {}
    for load in (n for n in nodes if n.op == "load"):
        sizes = captures[int(load.attr)].shape  # type: ignore[call-overload]
        guards[load] = tuple(guard_of(i, n, bounds) for i, n in zip(load.args, sizes, strict=True))
    nonnegative = frozenset(n for n in nodes if n in bounds and bounds[n][0] >= 0)
    any_length = all(graph.kinds[i] is Kind.UNIFORM for load in guards for i in load.args)
    any_length &= all(is_bounded(n, bounds) or graph.kinds[n] is Kind.UNIFORM for n in bounds)
    return replace(graph, guards=guards, nonnegative=nonnegative, any_length=any_length)
