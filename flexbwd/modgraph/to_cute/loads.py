"""Reading captured tensors: guarded indices, offsets, and widening to the graph's types."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64
from cutlass._mlir.dialects import arith
from cutlass._mlir.extras import types as T

from flexbwd.modgraph.ir import BOOL, I32, I64, F, Node
from flexbwd.modgraph.modplan import Guard

from .ops import Emit

Value = Any


class Captures:
    """The captured tensors and numbers by load slot.

    Args:
        arguments: by slot, a cute tensor or a DSL number.
        empty: slots of tensors without elements: nothing can be read, loads give 0.
    """

    def __init__(self, emit: Emit, arguments: Mapping[int, Any], empty: frozenset[int] = frozenset()) -> None:
        self.emit, self.arguments, self.empty = emit, arguments, empty

    def load(self, node: Node, index: Sequence[Value], guards: Sequence[Guard]) -> Value:
        slot = int(node.attr)  # type: ignore[call-overload]
        if slot in self.empty:
            return self.emit.const(0, node.dtype)
        source = self.arguments[slot]
        if not isinstance(source, cute.Tensor):
            return self._number(source, node)
        offset = Int64(0)
        for at, stride in zip(self.indices(node, index, guards), source.stride, strict=False):
            offset = offset + Int64(at) * Int64(stride)
        return self._widen(cute.make_tensor(source.iterator + offset, cute.make_layout(1))[0], node)

    def indices(self, node: Node, index: Sequence[Value], guards: Sequence[Guard]) -> list[Value]:
        """The load's index as i32 values inside the tensor."""
        shape = self.arguments[int(node.attr)].shape  # type: ignore[call-overload]
        return [self._index(i, a, g, n) for i, a, g, n in zip(index, node.args, guards, shape, strict=False)]

    def _index(self, index: Value, node: Node, guard: Guard, size: Any) -> Value:
        """`index` as an i32 within [0, size)."""
        emit = self.emit
        last = arith.subi(Int32(size).ir_value(), emit.const(1, I32))
        if node.dtype is I64:
            low, high = emit.const(-(2**31), I64), emit.const(2**31 - 1, I64)
            index = arith.trunci(T.i32(), emit.clamp(index, low, high))
        if guard is Guard.NONE:
            return index
        zero = emit.const(0, I32)
        wrapped = arith.addi(index, Int32(size).ir_value())
        index = arith.select(emit.compare("lt", index, zero, I32), wrapped, index)
        return emit.clamp(index, zero, last) if guard is Guard.CLAMP else index

    def _number(self, value: Any, node: Node) -> Value:
        if node.dtype is BOOL:
            return self.emit.compare("ne", Int32(value).ir_value(), self.emit.const(0, I32), I32)
        kind = {F: cutlass.Float32, I32: Int32, I64: Int64}[node.dtype]
        return kind(value).ir_value()

    def _widen(self, value: Any, node: Node) -> Value:
        """A stored element as the node's type; bools are stored as bytes."""
        if node.dtype is BOOL:
            return self.emit.compare("ne", Int32(value).ir_value(), self.emit.const(0, I32), I32)
        kind = {F: cutlass.Float32, I32: Int32, I64: Int64}[node.dtype]
        return kind(value).ir_value()
