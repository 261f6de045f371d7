"""Reading captured tensors: guarded indices, offsets, and widening to the graph's types.

Offsets are added up from the index that changes least to the one that changes most, each partial sum once. Along a
dimension of stride 1 the static part of an index becomes an immediate of the load instruction.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64
from cutlass._mlir.dialects import arith, llvm
from cutlass._mlir.extras import types as T

from flexbwd.modgraph.ir import BOOL, I32, I64, F, Node

from .lanes import GUARD_LOW
from .ops import Emit

Value = Any
Memo = Callable[[Any, Callable[[], Value]], Value]

_DYNAMIC = -(2**31)  # how a GEP marks an index given as a value


@dataclass(frozen=True)
class Source:
    """One captured tensor, or a number.

    Attributes:
        unit: dimension of stride 1, or -1.   wide: offsets need 64 bits.
    """

    tensor: Any
    unit: int = -1
    wide: bool = False

    @property
    def is_tensor(self) -> bool:
        return isinstance(self.tensor, cute.Tensor)


@dataclass(frozen=True)
class Place:
    """One index: a run-time i32 or i64 value, and a static amount to add (0 unless that is free)."""

    value: Value
    node: Node
    guard: int
    step: int = 0


class Captures:
    """The captured tensors and numbers by load slot; a slot without a source has no elements, and loads give 0."""

    def __init__(self, emit: Emit, sources: Mapping[int, Source]) -> None:
        self.emit, self.sources = emit, sources

    def may_step(self, slot: int, dim: int, guard: int) -> bool:
        """Is a static part of this index free?"""
        source = self.sources.get(slot)
        return not guard and source is not None and source.unit == dim

    def load(self, node: Node, places: Sequence[Place], memo: Memo) -> Value:
        """The loaded element; `memo(key, make)` keeps partial offsets."""
        source = self.sources.get(int(node.attr))  # type: ignore[call-overload]
        if source is None:
            return self.emit.const(0, node.dtype)
        if not source.is_tensor:
            return self._number(source.tensor, node)
        tensor, slot = source.tensor, int(node.attr)  # type: ignore[call-overload]
        base: Value = None
        key: tuple = ("offset", slot)
        for d, place in enumerate(places):
            key = (*key, d, id(place.value), place.guard)
            base = memo(key, lambda base=base, d=d, place=place: self._plus(base, source, d, place))
        pointer = memo(("pointer", *key), lambda: self._pointer(tensor, base, source.wide))
        step = sum(p.step for p in places)
        if step:
            pointer = llvm.getelementptr(pointer.type, pointer, [], [step], self._storage(tensor), 0)
        return self._widen(llvm.load(self._storage(tensor), pointer, invariant=not self.emit.host), tensor, node)

    def index(self, node: Node, places: Sequence[Place]) -> list[Value]:
        """The load's index as i32 values inside the tensor."""
        source = self.sources.get(int(node.attr))  # type: ignore[call-overload]
        if source is None or not source.is_tensor:
            return [self.emit.const(0, I32) for _ in places]
        found = [self._inside(p, source.tensor.shape[d]) for d, p in enumerate(places)]
        return [arith.addi(v, self.emit.const(p.step, I32)) for v, p in zip(found, places, strict=True)]

    # -- addresses -----------------------------------------------------------------------------------------------------
    def _plus(self, base: Value, source: Source, dim: int, place: Place) -> Value:
        """`base` (None: nothing yet) plus one index times its stride."""
        at = self._inside(place, source.tensor.shape[dim])
        kind = Int64 if source.wide else Int32
        at = arith.extsi(T.i64(), at) if source.wide else at
        if source.unit != dim:
            at = arith.muli(at, kind(source.tensor.stride[dim]).ir_value())
        return at if base is None else arith.addi(base, at)

    def _inside(self, place: Place, size: Any) -> Value:
        """The index as an i32 within [0, size)."""
        emit, at = self.emit, place.value
        if place.node.dtype is I64:
            if place.guard:
                at = emit.clamp(at, emit.const(-1, I64), emit.const(2**31 - 1, I64))
            at = arith.trunci(T.i32(), at)
        if place.guard == GUARD_LOW:
            return arith.maxsi(at, emit.const(0, I32))
        if place.guard:  # unsigned: what is below 0 is far beyond the end
            return arith.minui(at, arith.subi(Int32(size).ir_value(), emit.const(1, I32)))
        return at

    def _pointer(self, tensor: Any, offset: Value, wide: bool) -> Value:
        start = tensor.iterator.llvm_ptr
        if offset is None:
            return start
        offset = offset if wide else arith.extsi(T.i64(), offset)
        return llvm.getelementptr(start.type, start, [offset], [_DYNAMIC], self._storage(tensor), 0)

    # -- types ---------------------------------------------------------------------------------------------------------
    def _storage(self, tensor: Any) -> Any:
        return T.i8() if tensor.element_type.width == 8 else tensor.element_type.mlir_type

    def _number(self, value: Any, node: Node) -> Value:
        if node.dtype is BOOL:
            return self.emit.compare("ne", Int32(value).ir_value(), self.emit.const(0, I32), I32)
        kind = {F: cutlass.Float32, I32: Int32, I64: Int64}[node.dtype]
        return kind(value).ir_value()

    def _widen(self, value: Value, tensor: Any, node: Node) -> Value:
        """A stored element as the node's type; bools are stored as bytes."""
        stored = tensor.element_type
        if node.dtype is BOOL:
            return arith.cmpi(arith.CmpIPredicate.ne, value, arith.constant(T.i8(), 0))
        if node.dtype is F:
            if stored.width == 32:
                return value
            return arith.truncf(T.f32(), value) if stored.width == 64 else arith.extf(T.f32(), value)
        target = T.i64() if node.dtype is I64 else T.i32()
        width = 64 if node.dtype is I64 else 32
        if stored.width == width:
            return value
        if stored.width > width:
            return arith.trunci(target, value)
        return (arith.extsi if stored.signed else arith.extui)(target, value)
