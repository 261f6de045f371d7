"""Is a hand-written score_mod_bwd linear in grad?  Then its value at grad = 1 is the Jacobian factor."""

from __future__ import annotations

from collections.abc import Mapping

from flexbwd.errors import ModBackwardError

from .analyze import depends
from .ir import Builder, Node, to_text, topological

_REMEDY = "Write it as grad * f(score, b, h, q_idx, kv_idx), or drop score_mod_bwd: flexbwd derives it"


def linear_factor(builder: Builder, root: Node, *, mod: str = "", where: str = "") -> Node:
    """f with root = f · grad, as a node of `builder` that is free of `grad`; raises what `check_linear` does."""
    check_linear(root, mod=mod, where=where)
    ones = {n: builder.const(1.0) for n in topological([root]) if n.op == "in" and n.attr == "grad"}
    return builder.substitute([root], ones)[0]


def check_linear(root: Node, *, mod: str = "", where: str = "", lines: Mapping[Node, str] | None = None) -> None:
    """Whether the structure of `root` shows that it is linear in `grad`.

    Sums, products and quotients by grad-free values, where branches and zero keep linearity; everything else loses it.

    Args:
        mod, where, lines: the function's name, its place, and places by node, for the error.
    Raises:
        ModBackwardError: at the first node where linearity is lost.
    """
    fault = _fault(root)
    if fault is not None:
        node, problem = fault
        place = (lines or {}).get(node, where)
        raise ModBackwardError(problem, mod=mod, where=place, op=node.op, remedy=_REMEDY)


def _fault(root: Node) -> tuple[Node, str] | None:
    """The first node at which linearity is lost, and how; None when `root` is linear."""
    reads = depends([root])
    linear: set[Node] = set()
    for node in topological([root]):
        if "grad" not in reads[node]:
            continue
        problem = _problem(node, linear)
        if problem:
            return node, f"{problem}, so the result is not linear in grad: {to_text(node)}"
        linear.add(node)
    if root not in linear and not root.is_value(0):
        return root, f"the result does not contain grad: {to_text(root)}"
    return None


def _problem(node: Node, linear: set[Node]) -> str:
    """Why `node`, which reads grad, is not linear in it; "" when it is. `linear`: operands that are."""
    if node.op == "in":
        return ""
    inside = [a in linear for a in node.args]
    if node.op in ("neg", "detach"):
        return ""
    if node.op in ("add", "sub"):
        return "" if all(inside) else "a value without grad is added to one with grad"
    if node.op == "mul":
        return "two values with grad are multiplied" if all(inside) else ""
    if node.op == "div":
        return "grad stands in a divisor" if inside[1] else ""
    if node.op == "where":
        if inside[0]:
            return "the condition depends on grad"
        rest = [a for a, ok in zip(node.args[1:], inside[1:], strict=True) if not ok]
        return "" if all(a.is_value(0) for a in rest) else "one branch of where contains grad, the other does not"
    return f"{node.op} is applied to grad"
