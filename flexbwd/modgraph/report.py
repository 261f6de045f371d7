"""check_mod: is a mod's backward right, and what will be made of the mod."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flexbwd.errors import ModError, OptionError

from .analyze import guard
from .compare import (
    Derivatives,
    Difference,
    Grid,
    Sizes,
    autograd_derivatives,
    call,
    compare,
    planned_derivatives,
    values,
)
from .frontend import ModKind, TracedMod, trace
from .intervals import bounds
from .ir import DType, F, Node, to_text, topological
from .linear import linear_factor
from .modplan import Guard, JClass, Keep, LoadClass, LoadSite, ModPlan
from .plan_mods import build_mod_plan

_J_MEANS = {
    JClass.ONE: "the backward needs no mod code",
    JClass.CONST: "one factor per head",
    JClass.LINEAR: "a factor computed from the coordinates",
    JClass.NONLINEAR: "a factor that needs the score",
}
_KEEP_MEANS = {
    Keep.P: "the probability P",
    Keep.P_J: "the product P·J",
    Keep.P_AND_J: "P and J",
    Keep.SCORE: "the score before the mod",
}
_SCATTER_MEANS = {
    LoadClass.UNIFORM: "one sum per head",
    LoadClass.ROW: "sums over rows",
    LoadClass.COL: "sums over columns",
    LoadClass.TOEPLITZ: "sums over diagonals",
    LoadClass.TILE: "one store per element",
    LoadClass.GATHER: "atomic adds, in no fixed order",
}


@dataclass(frozen=True)
class LoadReport:
    """One place where a captured tensor is read.

    Attributes:
        text: as an expression.  capture: the tensor's name.  kind: its class.
        guards: per index, at the lengths checked.  jacobian: ∂s'/∂(value), None where no gradient flows.
    """

    text: str
    capture: str
    kind: LoadClass
    guards: tuple[Guard, ...]
    jacobian: str | None

    def __str__(self) -> str:
        guards = ", ".join(g.value for g in self.guards) or "none"
        gradient = "none" if self.jacobian is None else f"{self.jacobian}, {_SCATTER_MEANS[self.kind]}"
        return f"{self.text}: {self.kind.value}; guards: {guards}; gradient: {gradient}"


@dataclass(frozen=True)
class ModReport:
    """What `check_mod` found. `print` it; `ok` is the verdict.

    Attributes:
        name, where: the mod and its place.  backward: the hand-written one's name, or "" for the derived one.
        forward, keep, jacobian: s', the condition split off as a mask (or None), and ∂s'/∂s, as text.
        shared: names in these texts, and what they stand for.
        j_class, keeps: the Jacobian's class and what the backward keeps per element.
        loads: where captured tensors are read.  differences: values that are not what they should be.
        problems: other reasons why flex_attention refuses the mod.  notes: what is worth knowing.
        elements: how many elements were compared.
    """

    name: str
    where: str
    backward: str
    forward: str
    keep: str | None
    jacobian: str
    shared: tuple[tuple[str, str], ...]
    j_class: JClass
    keeps: Keep
    loads: tuple[LoadReport, ...]
    differences: tuple[Difference, ...]
    problems: tuple[str, ...]
    notes: tuple[str, ...]
    elements: int

    @property
    def ok(self) -> bool:
        return not self.differences and not self.problems

    def __str__(self) -> str:
        rows = [
            ("score", self.forward),
            ("mask", self.keep or "none split off"),
            ("jacobian", self.jacobian),
            ("class", f"{self.j_class.value}: {_J_MEANS[self.j_class]}"),
            ("keeps", _KEEP_MEANS[self.keeps]),
            ("backward", self.backward or "derived"),
        ]
        rows += [("with", f"{name} = {text}") for name, text in self.shared]
        rows += [("load", str(load)) for load in self.loads]
        rows += [("note", note) for note in self.notes]
        rows += [("PROBLEM", problem) for problem in self.problems]
        rows += [("DIFFERS", str(found)) for found in self.differences]
        verdict = "ok" if self.ok else f"{len(self.differences) + len(self.problems)} found wrong"
        rows.append((verdict, f"{self.elements} elements compared with torch's autograd"))
        width = max(len(head) for head, _ in rows)
        place = f" ({self.where})" if self.where else ""
        return "\n".join([f"{self.name}{place}", *(f"  {head:<{width}}  {text}" for head, text in rows)])


def check_mod(
    score_mod: Callable[..., Any],
    score_mod_bwd: Callable[..., Any] | None = None,
    *,
    dtype: torch.dtype = torch.float64,
    lengths: tuple[int, int] = (24, 40),
    heads: int = 4,
    batch: int = 2,
    seed: int = 0,
) -> ModReport:
    """Compare a score_mod's backward, derived and hand-written, with torch's autograd; and say what it compiles to.

    Every element of a `[batch, heads, *lengths]` grid gets a random score. Compared are the graph's values, ∂s'/∂s,
    and a weighted sum of ∂s'/∂c for each captured tensor c that requires grad; and, where given, `score_mod_bwd`.

    Args:
        score_mod: `(score, b, h, q_idx, kv_idx) -> score`.
        score_mod_bwd: `(grad, score, b, h, q_idx, kv_idx) -> d score`, linear in grad.
        dtype: of the scores, float64 or float32.  lengths: (query, key): within what captured tensors are made for.
    Returns:
        A report; `report.ok` is False where anything differs or flex_attention would refuse the pair.
    Raises:
        OptionError: a bad dtype or size.  ModError: score_mod cannot be compiled.
    """
    sizes = _sizes(dtype, lengths, heads, batch)
    traced, tensors = trace(score_mod, ModKind.SCORE, device="cpu")
    plan = build_mod_plan(traced, None, None)
    grid = Grid.of(sizes, dtype, seed)
    found, notes = _check_derived(score_mod, traced, plan, grid, tensors)
    problems: list[str] = []
    backward = ""
    if score_mod_bwd is not None:
        backward = getattr(score_mod_bwd, "__name__", type(score_mod_bwd).__name__)
        try:
            found += _check_hand_written(score_mod_bwd, traced, plan, grid, tensors)
            bwd, _ = trace(score_mod_bwd, ModKind.SCORE_BWD, device="cpu")
            plan = build_mod_plan(traced, bwd, None)
        except ModError as error:
            problems.append(str(error))
    captures = traced.prologue.run(tensors)
    report = _described(traced, plan, sizes, captures)
    return replace(
        report,
        backward=backward,
        differences=tuple(found),
        problems=tuple(problems),
        notes=tuple(notes),
        elements=grid.scores.numel(),
    )


def _sizes(dtype: torch.dtype, lengths: tuple[int, int], heads: int, batch: int) -> Sizes:
    if dtype not in (torch.float64, torch.float32):
        raise OptionError(f"{dtype=} must be torch.float64 or torch.float32: mods compute in no other")
    if len(lengths) != 2 or min(*lengths, heads, batch) < 1:
        raise OptionError(f"{lengths=}, {heads=}, {batch=}: pass two lengths, all at least 1")
    return Sizes(batch, heads, *lengths)


# -- comparing ---------------------------------------------------------------------------------------------------------
def _tolerance(*dtypes: torch.dtype) -> float:
    """Rounding of some hundred terms in the coarsest of `dtypes`."""
    return max(512 * torch.finfo(d).eps for d in dtypes)


def _check_derived(
    score_mod: Callable[..., Any], traced: TracedMod, plan: ModPlan, grid: Grid, tensors: Sequence[Tensor]
) -> tuple[list[Difference], list[str]]:
    """The plan against the callable: values everywhere, derivatives where the score is finite."""
    captures = traced.prologue.run(tensors)
    with torch.no_grad():
        want = call(score_mod, grid, grid.scores)
    keep = plan.score_keep if plan.score_keep is not None else plan.builder.const(True)
    got, kept = values([plan.forward, keep], grid, captures)
    got = got.masked_fill(~kept, -torch.inf)
    dtype = grid.scores.dtype
    found = compare(("score", "the mod itself"), got, want, _tolerance(dtype), grid.where)
    inside = grid.only(want > -torch.inf)
    truth = autograd_derivatives(score_mod, inside, tensors)
    planned = planned_derivatives(plan, traced, inside, tensors)
    pair = ("derived derivative", "torch's autograd")
    found += compare(pair, planned.score, truth.score, _tolerance(dtype), inside.where)
    found += _check_captures(traced, planned, truth, tensors, dtype)
    return found, _notes(inside, grid, truth)


def _check_captures(
    traced: TracedMod, planned: Derivatives, truth: Derivatives, tensors: Sequence[Tensor], dtype: torch.dtype
) -> list[Difference]:
    found: list[Difference] = []
    for position, (tensor, got, want) in enumerate(zip(tensors, planned.captures, truth.captures, strict=True)):
        if got is None and want is None:
            continue
        zero = torch.zeros_like(tensor, requires_grad=False)
        got, want = (zero if g is None else g for g in (got, want))
        pair = (f"gradient of {_capture_name(traced, position)}", "torch's autograd")
        found += compare(pair, got.double(), want.double(), _tolerance(dtype, tensor.dtype), None)
    return found


def _capture_name(traced: TracedMod, position: int) -> str:
    """The user's tensor's name; where a prologue derives others from it, its position says which it is."""
    if traced.prologue.is_identity:
        return traced.captures[position].name
    return f"captured tensor {position} (of {', '.join(c.name for c in traced.captures)})"


def _notes(inside: Grid, grid: Grid, truth: Derivatives) -> list[str]:
    notes = []
    masked = grid.scores.numel() - inside.scores.numel()
    if masked:
        notes.append(f"{masked} of {grid.scores.numel()} elements are -inf: masked")
    nan = int(truth.score.isnan().sum()) + sum(int(c.isnan().sum()) for c in truth.captures if c is not None)
    if nan:
        notes.append(f"torch's autograd gives NaN {nan} times, from branches of where that are not taken: not compared")
    return notes


def _check_hand_written(
    score_mod_bwd: Callable[..., Any], traced: TracedMod, plan: ModPlan, grid: Grid, tensors: Sequence[Tensor]
) -> list[Difference]:
    """score_mod_bwd against the derived factor, and its graph against the callable."""
    bwd, bwd_tensors = trace(score_mod_bwd, ModKind.SCORE_BWD, device="cpu")
    factor = linear_factor(plan.builder, bwd.output, mod=bwd.name, where=bwd.where)
    captures, bwd_captures = traced.prologue.run(tensors), bwd.prologue.run(bwd_tensors)
    keep = plan.score_keep if plan.score_keep is not None else plan.builder.const(True)
    forward, kept, derived = values([plan.forward, keep, plan.j_score], grid, captures)
    inside = kept & (forward > -torch.inf)
    (written,) = values([factor], grid, bwd_captures)
    with torch.no_grad():
        called = call(score_mod_bwd, grid, grid.weights, grid.scores)
    where = [c[inside] for c in grid.where]
    tolerance = _tolerance(grid.scores.dtype)
    product = written * grid.weights
    graph = compare((f"graph of {bwd.name}", "the function itself"), product[inside], called[inside], tolerance, where)
    return graph + compare((bwd.name, "the derived derivative"), written[inside], derived[inside], tolerance, where)


# -- describing --------------------------------------------------------------------------------------------------------
def _described(traced: TracedMod, plan: ModPlan, sizes: Sizes, captures: Sequence[Tensor]) -> ModReport:
    names = [c.name for c in plan.captures]
    factors = [site.jacobian for site in plan.loads if site.jacobian is not None]
    aliases = _aliases([plan.forward, plan.j_score, *factors])

    def text(node: Node, inside: bool = False) -> str:
        """`inside`: a shared expression is itself written by name."""
        return aliases[node] if inside and node in aliases else to_text(node, names, aliases=aliases)

    loads = []
    for site in plan.loads:
        jacobian = None if site.jacobian is None else text(site.jacobian, inside=True)
        guards = _guards(site, sizes, captures)
        loads.append(LoadReport(to_text(site.node, names), names[site.slot], site.kind, guards, jacobian))
    return ModReport(
        name=traced.name,
        where=traced.where,
        backward="",
        forward=text(plan.forward, inside=True),
        keep=None if plan.score_keep is None else to_text(plan.score_keep, names),
        jacobian=text(plan.j_score, inside=True),
        shared=tuple((name, text(node)) for node, name in aliases.items()),
        j_class=plan.j_class,
        keeps=plan.keep,
        loads=tuple(loads),
        differences=(),
        problems=(),
        notes=(),
        elements=0,
    )


def _aliases(roots: Sequence[Node]) -> dict[Node, str]:
    """Names for float expressions of some length that occur more than once."""
    roots = list(dict.fromkeys(roots))
    uses = Counter(a for node in topological(roots) for a in node.args)
    uses.update(roots)
    shared = [n for n in topological(roots) if uses[n] > 1 and n.dtype is F and n.op != "load" and _is_long(n)]
    return {n: f"t{i + 1}" for i, n in enumerate(shared)}


def _is_long(node: Node) -> bool:
    return any(a.args and a.op != "load" for a in node.args)


def _guards(site: LoadSite, sizes: Sizes, captures: Sequence[Tensor]) -> tuple[Guard, ...]:
    """What the load's indices need at these sizes, by interval analysis."""
    if site.slot >= len(captures):  # of a hand-written backward
        return ()
    ranges = {name: (np.array(lo), np.array(hi)) for name, (lo, hi) in sizes.ranges.items()}
    intervals = []
    for index in site.node.args:
        assert index.dtype in (DType.I32, DType.I64)
        lo, hi = bounds(index, ranges, captures)
        intervals.append((int(np.min(lo)), int(np.max(hi))))
    return guard(site.node, captures[site.slot].shape, intervals)
