"""Mod graphs made ready for a kernel, without the DSL.

The score becomes scale * raw, the result s' * log2(e), so that a plain exp2 follows; both factors go to where they
cost least. Every load gets its guard, from the lengths the kernel runs with.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from flexbwd.modgraph.affine import affine_forms
from flexbwd.modgraph.analyze import exactness
from flexbwd.modgraph.ir import Node, topological
from flexbwd.modgraph.modplan import Guard, LoadClass, ModPlan

from .kinds import RAW, SCALE, Kind, LoweringBuilder, kinds

LOG2_E = math.log2(math.e)


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
        score: s' * log2(e) of RAW, SCALE, SCALE_LOG2.   factor: ds'/ds, where it is not 1.
        keep, mask: predicates; score_keep on every tile, mask_mod on partial tiles.
        slopes: for nodes of one coordinate (or one difference) that are straight lines in it, the slope: an int, or
            for floats a uniform node.
    """

    score: Node | None
    factor: Node | None
    keep: Node | None
    mask: Node | None
    sites: tuple[Site, ...]
    kinds: Mapping[Node, Kind]
    exact: frozenset[Node]
    guards: Mapping[Node, tuple[Guard, ...]]
    nonnegative: frozenset[Node]
    shifts: Mapping[Node, tuple[int, int]]  # integer nodes affine in (q_idx, kv_idx): their coefficients

    @property
    def roots(self) -> list[Node]:
        found = [r for r in (self.score, self.factor, self.keep, self.mask) if r is not None]
        for site in self.sites:
            found += [site.jacobian, *site.load.args]
        return found


def prepare(mods: ModPlan, backward: bool, partial: bool) -> ModGraph:
    """The graphs of one kernel; guards are `Guard.CLAMP` until `with_bounds`."""
    builder = LoweringBuilder()
    scaled = builder.emit("mul", builder.input(RAW), builder.input(SCALE))
    old_score = next((n for n in mods.builder._table.values() if n.op == "in" and n.attr == "score"), None)
    replace = {} if old_score is None else {old_score: scaled}

    def copy(node: Node | None) -> Node | None:
        return None if node is None else builder.substitute([node], replace)[0]

    score = factor = None
    sites: tuple[Site, ...] = ()
    if not mods.is_identity:
        score = builder.emit("mul", copy(mods.forward), builder.const(LOG2_E))
        if backward:
            factor = None if mods.j_score.is_value(1) else copy(mods.j_score)
            sites = tuple(
                Site(copy(s.node), copy(s.jacobian), s.kind, s.slot) for s in mods.loads if s.jacobian is not None
            )
    keep, mask = copy(mods.score_keep), copy(mods.mask) if partial else None
    roots = [r for r in (score, factor, keep, mask) if r is not None]
    for site in sites:
        roots += [site.jacobian, *site.load.args]
    nodes = list(topological(roots))
    guards = {n: (Guard.CLAMP,) * len(n.args) for n in nodes if n.op == "load"}
    shifts = {n: (f.q, f.kv) for n, f in affine_forms(roots).items() if f.q or f.kv}
    return ModGraph(
        score, factor, keep, mask, sites, kinds(roots), frozenset(exactness(roots)), guards, frozenset(), shifts
    )
