"""A ModPlan's graphs as torch programs, compiled once and shared by all calls with the plan."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from flexbwd.modgraph.ir import Node, topological
from flexbwd.modgraph.modplan import ModPlan
from flexbwd.modgraph.to_torch import TorchProgram
from flexbwd.modgraph.torch_ops import lane_bits, lanes

from .captures import CaptureSite
from .finite import always_finite


class KeepProgram:
    """A predicate: mask_mod, or the part of score_mod that says -inf."""

    def __init__(self, root: Node) -> None:
        self.program = TorchProgram([root])
        self.per_head = bool(self.program.inputs & {"b", "h"})
        self.slots = tuple(sorted({int(n.attr) for n in topological([root]) if n.op == "load"}))  # type: ignore


class ModPrograms:
    _known: ClassVar[weakref.WeakKeyDictionary[ModPlan, ModPrograms]] = weakref.WeakKeyDictionary()

    def __init__(self, mods: ModPlan) -> None:
        self.score = None if mods.is_identity else TorchProgram([mods.forward], consume=("score",))
        self.mask = None if mods.mask is None else KeepProgram(mods.mask)
        self.score_keep = None if mods.score_keep is None else KeepProgram(mods.score_keep)
        self._backward: dict[tuple[bool, ...], BackwardPrograms] = {}
        # the dictionary of known plans must not keep its keys alive
        self._mods = weakref.ref(mods)

    @classmethod
    def of(cls, mods: ModPlan) -> ModPrograms:
        found = cls._known.get(mods)
        if found is None:
            found = cls._known[mods] = cls(mods)
        return found

    def backward(self, wanted: tuple[bool, ...], through_score: bool) -> BackwardPrograms:
        """Programs of the derivative where `wanted` captures, and the score if asked, need a gradient."""
        key = (*wanted, through_score)
        found = self._backward.get(key)
        if found is None:
            mods = self._mods()
            assert mods is not None
            found = self._backward[key] = BackwardPrograms(mods, wanted, through_score)
        return found


class BackwardPrograms:
    """s' again, and every Jacobian that is no constant, in one program.

    Attributes:
        program: roots are s' and the varying Jacobians; None when there is no mod.
        score_factor: ∂s'/∂s; 0.0 when nobody asked for it.
        sites: loads through which a wanted gradient flows, each with its ∂s'/∂(loaded value).
    """

    def __init__(self, mods: ModPlan, wanted: tuple[bool, ...], through_score: bool) -> None:
        sites = [s for s in mods.loads if s.jacobian is not None and s.slot < len(wanted) and wanted[s.slot]]
        self._roots: list[Node] = [mods.forward]
        self.score_factor = self._factor(mods.j_score) if through_score else 0.0
        self.sites = [(CaptureSite(s), self._factor(s.jacobian)) for s in sites]
        self.program = None if mods.is_identity and not sites else TorchProgram(self._roots, consume=("score",))

    def _factor(self, node: Node | None) -> float | Factor:
        """A Jacobian as a number where it is constant, else as a root of the program."""
        assert node is not None
        if node.is_const:
            return float(node.value)
        self._roots.append(node)
        return Factor(len(self._roots) - 1, always_finite(node))


class Factor:
    """A Jacobian that varies: its place among the program's results."""

    def __init__(self, root: int, finite: bool) -> None:
        self.root, self.finite = root, finite

    def times(self, tile: Tensor, values: Sequence[Tensor], weight: Tensor, out: Tensor | None) -> Tensor:
        """tile · factor; 0 where the weight is 0, although the factor may be inf or NaN there."""
        product = torch.mul(tile, values[self.root], out=out)
        if not self.finite:
            lanes(product).bitwise_and_(lane_bits(weight != 0, product.dtype))
        return product
