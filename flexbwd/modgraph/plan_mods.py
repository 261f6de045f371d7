"""Joins separately traced mods into one ModPlan: one Builder, one list of captures, all derivatives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from flexbwd.errors import ModBackwardError

from .analyze import classify_load, differentiable_loads, j_class, keep_class
from .derive import jacobians
from .ir import Builder, Node, canonical_hash, topological
from .linear import check_linear, linear_factor
from .modplan import CaptureSpec, LoadSite, ModPlan
from .split import split_neg_inf

if TYPE_CHECKING:
    from .frontend import TracedMod


def build_mod_plan(score: TracedMod | None, score_bwd: TracedMod | None, mask: TracedMod | None) -> ModPlan:
    """Everything backends need of these mods; see `ModPlan` for the meaning.

    Load slots, and so `captures`, are score_mod's, then score_mod_bwd's, then mask_mod's; captures that no longer
    occur in a graph keep their slots.

    Raises:
        ModBackwardError: `score_bwd` without `score`, not linear in grad, or beside a captured tensor that requires
            grad, whose gradient a hand-written backward does not give.
    """
    builder = Builder()
    captures: list[CaptureSpec] = []

    def join(mod: TracedMod) -> Node:
        shift = len(captures)
        captures.extend(mod.captures)
        return builder.substitute([mod.output], {}, slot_shift=shift)[0]

    forward, keep = split_neg_inf(builder, builder.input("score") if score is None else join(score))
    trained = [n for n in differentiable_loads(forward) if captures[int(n.attr)].requires_grad]  # type: ignore[call-overload]
    if score_bwd is None:
        j_score, *factors = jacobians(builder, forward, [builder.input("score"), *trained])
    else:
        j_score, factors = _hand_written(builder, score, score_bwd, join(score_bwd)), []
        trained = []
    jacobian = {n: j for n, j in zip(trained, factors, strict=True) if not j.is_value(0)}
    mask_root = None if mask is None else join(mask)
    loads = [n for n in topological([forward, j_score]) if n.op == "load"]
    sites = tuple(LoadSite(n, classify_load(n), jacobian.get(n)) for n in loads)
    return ModPlan(
        builder=builder,
        forward=forward,
        mask=mask_root,
        score_keep=keep,
        j_score=j_score,
        j_class=j_class(j_score),
        keep=keep_class(builder, j_score, [s.jacobian for s in sites]),
        loads=sites,
        captures=tuple(captures),
        hash=_plan_hash([forward, j_score, keep, mask_root], sites, captures),
        names=("" if score is None else score.name, "" if mask is None else mask.name),
    )


def _hand_written(builder: Builder, score: TracedMod | None, score_bwd: TracedMod, root: Node) -> Node:
    """The Jacobian factor that `score_bwd` gives, checked."""
    if score is None:
        raise ModBackwardError(
            "score_mod_bwd is given without a score_mod", mod=score_bwd.name, where=score_bwd.where,
            remedy="Pass the score_mod whose derivative it is",
        )  # fmt: skip
    for capture in score.captures:
        if capture.requires_grad:
            raise ModBackwardError(
                f"score_mod_bwd gives no gradient for {capture.name}, which score_mod captures and which requires grad",
                mod=score_bwd.name,
                where=score_bwd.where,
                remedy=f"Drop score_mod_bwd, which flexbwd derives, or capture {capture.name}.detach()",
            )
    check_linear(score_bwd.output, mod=score_bwd.name, where=score_bwd.where, lines=score_bwd.source_lines)
    return linear_factor(builder, root)


def _plan_hash(roots: Sequence[Node | None], sites: Sequence[LoadSite], captures: Sequence[CaptureSpec]) -> str:
    """Equal for plans of equal expressions and capture facts, whatever the order in which nodes were made."""
    facts = tuple((str(c.dtype), len(c.shape), c.requires_grad) for c in captures)
    present = tuple(r is not None for r in roots)
    factors = sorted(canonical_hash([s.node, s.jacobian]) for s in sites if s.jacobian is not None)
    return canonical_hash([r for r in roots if r is not None], extra=(present, facts, tuple(factors)))
