"""Values inside a trace: tensors as functions from coordinates to nodes.

A tensor of shape `[n1, …, nk]` is held as `at: (c1, …, ck) -> Node`. A view then only renames coordinates, an
elementwise op composes, and `T[h, :, 0][k]` ends as one load `T[h, k, 0]`: nothing but scalars ever reaches the graph.
A value that no index reaches also has a `register` of the prologue, which can compute it with plain torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .ir import BOOL, I32, I64, Builder, DType, F, Node
from .prologue import Register

Coords = tuple[Node, ...]
Pull = Callable[[Coords], Node]

_IR: dict[torch.dtype, DType] = {
    torch.float16: F,
    torch.bfloat16: F,
    torch.float32: F,
    torch.float64: F,
    torch.int64: I64,
    torch.int32: I32,
    torch.int16: I32,
    torch.int8: I32,
    torch.uint8: I32,
    torch.bool: BOOL,
}
WIDE = torch.float64  # of a literal that torch makes fp32: in an fp64 problem the mod computes in fp64
NARROW_INTS = (torch.int16, torch.int8, torch.uint8)


def ir_dtype(dtype: torch.dtype) -> DType | None:
    """The graph's type of values of `dtype`, or None where it has none."""
    return _IR.get(dtype)


@dataclass(eq=False)
class Value:
    """One tensor of the trace.

    Attributes:
        shape, dtype: torch's.
        at: the element at given coordinates, of type `ir_dtype(dtype)`.
        register: where the prologue holds it; None when it depends on an index.
        literal: its contents, when no captured tensor reaches it either; WIDE where `dtype` is fp32.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    at: Pull
    register: Register | None = None
    literal: Tensor | None = None

    @property
    def is_indexed(self) -> bool:
        """Does the value depend on an index or on the score?"""
        return self.register is None

    @property
    def is_float(self) -> bool:
        return self.dtype.is_floating_point

    def scalar(self) -> Node:
        assert not self.shape
        return self.at(())


def scalar_value(node: Node, dtype: torch.dtype) -> Value:
    """A 0-dim value that is `node` itself."""
    return Value((), dtype, lambda _: node)


def aligned(coords: Coords, shape: Sequence[int], zero: Node) -> Coords:
    """Coordinates into a tensor of `shape` that is broadcast against `coords` from the right."""
    tail = coords[len(coords) - len(shape) :]
    return tuple(zero if n == 1 else c for c, n in zip(tail, shape, strict=True))


def wrapped(builder: Builder, index: Node, size: int) -> Node:
    """Python's meaning of a negative index into a dimension of `size`."""
    if index.op == "in":  # b, h, q_idx, kv_idx are never negative
        return index
    if index.is_const:
        return builder.const(int(index.value) + (size if index.value < 0 else 0), index.dtype)
    below = builder.compare("lt", index, builder.const(0))
    return builder.where(below, builder.arith("add", index, builder.const(size)), index)
