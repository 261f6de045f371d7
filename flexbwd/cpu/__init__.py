"""The CPU backend: tiled attention over block lists, in plain torch (design.md §5)."""

from flexbwd.plan import BlockLists, Gradients, Needs, Operands

from .backward import backward
from .forward import forward

__all__ = ["BlockLists", "Gradients", "Needs", "Operands", "backward", "forward"]
