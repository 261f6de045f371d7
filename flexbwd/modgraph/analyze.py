"""What backends ask of a graph: dependences, precision class, Jacobian class, what to keep, and load classes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from .affine import affine_forms
from .ir import COMPARE, Builder, F, Node, topological
from .modplan import Guard, JClass, Keep, LoadClass

POSITIONS = frozenset({"q_idx", "kv_idx"})
_NONE: frozenset[str] = frozenset()


def depends(nodes: Sequence[Node]) -> dict[Node, frozenset[str]]:
    """For every node reachable from `nodes`, the inputs it reads, through load indices too.

    A subset of {"score", "grad", "b", "h", "q_idx", "kv_idx"}.
    """
    found: dict[Node, frozenset[str]] = {}
    for node in topological(nodes):
        own = frozenset({str(node.attr)}) if node.op == "in" else _NONE
        found[node] = own.union(*(found[a] for a in node.args))
    return found


def differentiable_loads(root: Node) -> list[Node]:
    """The F loads that reach `root`, operands first; whether through differentiable ops only is for `jacobians`."""
    return [n for n in topological([root]) if n.op == "load" and n.dtype is F]


# -- the score's Jacobian ---------------------------------------------------------------------------------------------
def j_class(j: Node) -> JClass:
    """ONE, CONST (numbers, b, h, captures read at those), LINEAR (any coordinate) or NONLINEAR (reads the score)."""
    if j.is_value(1):
        return JClass.ONE
    reads = depends([j])[j]
    if "score" in reads:
        return JClass.NONLINEAR
    return JClass.LINEAR if reads & POSITIONS else JClass.CONST


def keep_class(builder: Builder, j_score: Node, load_jacobians: Sequence[Node | None] = ()) -> Keep:
    """What the backward keeps per element, with ds' = P ∘ (dP − delta), ds = ds' · J, d(load) = ds' · J_load.

    P where every factor can be recomputed from coordinates; P·J where J reads the score and every J_load is J times
    something that does not (see `quotient_by`); P and J where some J_load is free of the score; else the score.
    """
    found = [j for j in load_jacobians if j is not None]
    reads = depends([j_score, *found])
    nonlinear = "score" in reads[j_score]
    own = [j for j in found if not (nonlinear and quotient_by(builder, j, j_score) is not None)]
    if any("score" in reads[j] for j in own):
        return Keep.SCORE
    if not nonlinear:
        return Keep.P
    return Keep.P_AND_J if own else Keep.P_J


def quotient_by(builder: Builder, jacobian: Node, j_score: Node) -> Node | None:
    """f, free of the score, with jacobian = f · j_score, where that shows: then d(load) = ds · f needs no P."""
    if jacobian is j_score:
        return builder.const(1.0)
    if jacobian.op == "neg":
        inner = quotient_by(builder, jacobian.args[0], j_score)
        return None if inner is None else builder.emit("neg", inner)
    if jacobian.op == "mul":
        for x, rest in (jacobian.args, jacobian.args[::-1]):
            inner = quotient_by(builder, x, j_score)
            if inner is not None and "score" not in depends([rest])[rest]:
                return builder.emit("mul", inner, rest)
    return None


# -- precision --------------------------------------------------------------------------------------------------------
_ROUNDINGS = frozenset({"floor", "ceil", "trunc", "round", "sign", *COMPARE})
_QUOTIENTS = frozenset({"fdiv", "tdiv", "mod", "fmod"})  # round inside: exact themselves


def exactness(roots: Iterable[Node]) -> set[Node]:
    """F nodes whose smallest error can change a result by a whole step: they get no approximate instruction.

    These are all F values that reach a cast to an integer, a rounding, a comparison or a float `//` or `%`.
    """
    exact: set[Node] = set()
    for node in reversed(list(topological(roots))):
        if node.op in _QUOTIENTS and node.dtype is F:
            exact.add(node)
        steps = node.op in _ROUNDINGS or (node.op == "cast" and node.dtype is not F)
        if steps or node in exact:
            exact.update(a for a in node.args if a.dtype is F)
    return exact


# -- loads ------------------------------------------------------------------------------------------------------------
def classify_load(load: Node) -> LoadClass:
    """Which coordinates the index of a `load` depends on, and how."""
    if load.op != "load":
        raise ValueError(f"classify_load takes a load, got {load.op}")
    reads = depends(load.args)
    used = _NONE.union(*(reads[a] for a in load.args))
    if "score" in used or "grad" in used:
        return LoadClass.GATHER
    if not used & POSITIONS:
        return LoadClass.UNIFORM
    if not used >= POSITIONS:
        return LoadClass.ROW if "q_idx" in used else LoadClass.COL
    if _reads_difference_only(load):
        return LoadClass.TOEPLITZ
    return LoadClass.TILE if _is_tile(load) else LoadClass.GATHER


def _reads_difference_only(load: Node) -> bool:
    """Is the index a function of q_idx − kv_idx, b and h?"""
    forms = affine_forms(load.args)
    good: set[Node] = set()  # nodes that are such a function
    for node in topological(load.args):
        form = forms.get(node)
        difference = form is not None and form.q == -form.kv
        through = node.op not in ("in",) and all(a in good for a in node.args)
        if difference or through or (node.op == "in" and node.attr in ("b", "h")):
            good.add(node)
    return all(a in good for a in load.args)


def _is_tile(load: Node) -> bool:
    """One index moves with q_idx alone, one with kv_idx alone, the others with neither."""
    forms = affine_forms(load.args)
    moves = []
    for a in load.args:
        form = forms.get(a)
        if form is None or (form.q and form.kv):
            return False
        moves.append("q" if form.q else "kv" if form.kv else "")
    return moves.count("q") == 1 and moves.count("kv") == 1


def guard(load: Node, shape: Sequence[int], intervals: Sequence[tuple[int, int]]) -> tuple[Guard, ...]:
    """What each index of `load` needs so that no lane leaves the tensor.

    Args:
        shape: of the captured tensor.
        intervals: inclusive `(lo, hi)` of each index over every lane that runs, masked and padded ones included.
    """
    if not len(load.args) == len(shape) == len(intervals):
        raise ValueError(f"guard got {len(load.args)} indices, {len(shape)} dimensions and {len(intervals)} intervals")
    return tuple(_guard(size, lo, hi) for size, (lo, hi) in zip(shape, intervals, strict=True))


def _guard(size: int, lo: int, hi: int) -> Guard:
    if lo >= 0 and hi < size:
        return Guard.NONE
    return Guard.WRAP if lo >= -size and hi < size else Guard.CLAMP


def outside_dims(shape: Sequence[int], intervals: Sequence[tuple[int, int]]) -> tuple[int, ...]:
    """Dimensions whose index lies outside the tensor whatever the element: a user's mistake."""
    return tuple(d for d, (size, (lo, hi)) in enumerate(zip(shape, intervals, strict=True)) if lo >= size or hi < -size)
