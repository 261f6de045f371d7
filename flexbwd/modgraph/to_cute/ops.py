"""One IR op as MLIR: `Emit(form).op(node, operands)`. Values are bare MLIR values of type f32, i32, i64 or i1.

Meaning is torch's (see `ir.py`). Each float op has up to three forms: `fast`, PTX's approximate instructions, for
values that feed nothing but the softmax; `exact`, libdevice's; and in `host` mode only what LLVM can run on the CPU.
Integer division never traps or wraps undefined, whatever a masked lane divides by.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from cutlass._mlir.dialects import arith, llvm
from cutlass._mlir.dialects import math as mlir_math
from cutlass._mlir.extras import types as T

from flexbwd.modgraph.ir import BOOL, COMPARE, I32, I64, DType, F, Node, wrap

from .special import Special

Value = Any  # an MLIR value

_CMP_F = {
    "eq": arith.CmpFPredicate.OEQ, "ne": arith.CmpFPredicate.UNE, "lt": arith.CmpFPredicate.OLT,
    "le": arith.CmpFPredicate.OLE, "gt": arith.CmpFPredicate.OGT, "ge": arith.CmpFPredicate.OGE,
}  # fmt: skip
_CMP_I = {
    "eq": arith.CmpIPredicate.eq, "ne": arith.CmpIPredicate.ne, "lt": arith.CmpIPredicate.slt,
    "le": arith.CmpIPredicate.sle, "gt": arith.CmpIPredicate.sgt, "ge": arith.CmpIPredicate.sge,
}  # fmt: skip
_CMP_B = {  # false < true
    "lt": arith.CmpIPredicate.ult, "le": arith.CmpIPredicate.ule, "gt": arith.CmpIPredicate.ugt,
    "ge": arith.CmpIPredicate.uge, "eq": arith.CmpIPredicate.eq, "ne": arith.CmpIPredicate.ne,
}  # fmt: skip
_BITS = {I32: 32, I64: 64}


def mlir_type(dtype: DType) -> Any:
    return {F: T.f32, I32: T.i32, I64: T.i64, BOOL: T.bool}[dtype]()


class Emit:
    """Emits ops at the current insertion point.

    Attributes:
        fast: approximate instructions may be used at all.
        host: for the DSL's CPU JIT: no NVVM op, no libdevice.
    """

    def __init__(self, fast: bool = True, host: bool = False) -> None:
        self.host = host
        self.fast = fast and not host
        self.special = Special(self)

    # -- leaves and small helpers --------------------------------------------------------------------------------------
    def const(self, value: float | int | bool, dtype: DType) -> Value:
        if dtype is F:
            return arith.constant(T.f32(), float(value))
        return arith.constant(mlir_type(dtype), int(value))

    def number(self, value: float) -> Value:
        return arith.constant(T.f32(), float(value))

    def compare(self, op: str, x: Value, y: Value, dtype: DType) -> Value:
        if dtype is F:
            return arith.cmpf(_CMP_F[op], x, y)
        return arith.cmpi((_CMP_B if dtype is BOOL else _CMP_I)[op], x, y)

    def fma(self, x: Value, y: Value, z: Value) -> Value:
        return mlir_math.fma(x, y, z)

    def clamp(self, x: Value, low: Value, high: Value) -> Value:
        """Signed integers."""
        return arith.minsi(arith.maxsi(x, low), high)

    def cast(self, x: Value, source: DType, target: DType) -> Value:
        if source is target:
            return x
        if target is F:
            return arith.uitofp(T.f32(), x) if source is BOOL else arith.sitofp(T.f32(), x)
        if target is BOOL:
            return self.compare("ne", x, self.const(0, source), source)
        kind = mlir_type(target)
        if source is F:
            return arith.fptosi(kind, x)
        if source is BOOL:
            return arith.extui(kind, x)
        return arith.extsi(kind, x) if target is I64 else arith.trunci(kind, x)

    # -- the table -----------------------------------------------------------------------------------------------------
    def op(self, node: Node, args: Sequence[Value], exact: bool, nonnegative: bool = False) -> Value:
        """The value of `node`, no leaf, of its operands' values.

        Args:
            exact: no approximate form.
            nonnegative: the first operand of an integer division is known to be >= 0.
        """
        op, dtype = node.op, node.dtype
        if op == "detach":
            return args[0]
        if op == "cast":
            return self.cast(args[0], node.args[0].dtype, dtype)
        if op == "where":
            return arith.select(*args)
        if op in COMPARE:
            return self.compare(op, args[0], args[1], node.args[0].dtype)
        if dtype is F:
            return self._float(op, args, node, exact or not self.fast)
        if dtype is BOOL:
            return self._bool(op, args)
        return self._integer(op, args, node, nonnegative)

    def _float(self, op: str, args: Sequence[Value], node: Node, exact: bool) -> Value:
        simple = _FLOAT.get(op)
        if simple is not None:
            return simple(*args)
        return getattr(self.special, op)(*args, exact=exact, node=node)

    def _bool(self, op: str, args: Sequence[Value]) -> Value:
        if op == "not":
            return arith.xori(args[0], self.const(True, BOOL))
        if op == "detach":
            return args[0]
        return {"and": arith.andi, "min": arith.andi, "or": arith.ori, "max": arith.ori, "xor": arith.xori}[op](*args)

    def _integer(self, op: str, args: Sequence[Value], node: Node, nonnegative: bool) -> Value:
        dtype = node.dtype
        simple = _INTEGER.get(op)
        if simple is not None:
            return simple(*args)
        if op == "neg":
            return arith.subi(self.const(0, dtype), args[0])
        if op == "abs":
            return arith.maxsi(args[0], arith.subi(self.const(0, dtype), args[0]))
        if op == "not":
            return arith.xori(args[0], self.const(-1, dtype))
        if op == "sign":
            return arith.minsi(arith.maxsi(args[0], self.const(-1, dtype)), self.const(1, dtype))
        if op in ("shl", "shr"):
            return self._shift(op, args, node)
        if op == "pow":
            return self._int_pow(*args, dtype)
        return self._divide(op, args, node, nonnegative)

    def _shift(self, op: str, args: Sequence[Value], node: Node) -> Value:
        """Counts outside 0 … bits-1 give 0 (shl) or the sign (shr)."""
        dtype, last = node.dtype, _BITS[node.dtype] - 1
        count = node.args[1]
        if count.is_const:
            n = int(count.value)
            if op == "shl":
                return arith.shli(*args) if 0 <= n <= last else self.const(0, dtype)
            return arith.shrsi(args[0], self.const(n if 0 <= n <= last else last, dtype))
        inside = arith.cmpi(arith.CmpIPredicate.ule, args[1], self.const(last, dtype))
        safe = arith.select(inside, args[1], self.const(last, dtype))
        if op == "shr":
            return arith.shrsi(args[0], safe)
        return arith.select(inside, arith.shli(args[0], safe), self.const(0, dtype))

    def _int_pow(self, x: Value, n: Value, dtype: DType) -> Value:
        """Wrapping; a negative exponent leaves 1 and -1 to something, 0 of the rest."""
        one, zero = self.const(1, dtype), self.const(0, dtype)
        result, square = one, x
        for bit in range(_BITS[dtype] - 1):
            wanted = self.compare("ne", arith.andi(n, self.const(1 << bit, dtype)), zero, dtype)
            result = arith.select(wanted, arith.muli(result, square), result)
            square = arith.muli(square, square)
        unit = self.compare("eq", arith.muli(x, x), one, dtype)
        odd = self.compare("ne", arith.andi(n, one), zero, dtype)
        below = arith.select(unit, arith.select(odd, x, one), zero)
        return arith.select(self.compare("lt", n, zero, dtype), below, result)

    def _divide(self, op: str, args: Sequence[Value], node: Node, nonnegative: bool) -> Value:
        """fdiv, mod (to minus infinity), tdiv, fmod (to zero)."""
        dtype, divisor = node.dtype, node.args[1]
        x, y = args
        if divisor.is_const and int(divisor.value) not in (0, -1):
            return self._by_constant(op, x, int(divisor.value), dtype, nonnegative)
        # what traps or wraps in hardware: x / 0 becomes x / 1, and x / -1 becomes -x / 1
        zero, one = self.const(0, dtype), self.const(1, dtype)
        minus_one = self.compare("eq", y, self.const(-1, dtype), dtype)
        safe = arith.select(self.compare("eq", y, zero, dtype), one, y)
        safe = arith.select(minus_one, one, safe)
        x = arith.select(minus_one, arith.subi(zero, x), x)
        return self._rounded(op, x, safe, dtype)

    def _rounded(self, op: str, x: Value, y: Value, dtype: DType) -> Value:
        if op == "tdiv":
            return arith.divsi(x, y)
        if op == "fmod":
            return arith.remsi(x, y)
        zero = self.const(0, dtype)
        quotient = arith.divsi(x, y)
        rest = arith.subi(x, arith.muli(quotient, y))
        differ = self.compare("lt", arith.xori(rest, y), zero, dtype)
        down = arith.andi(self.compare("ne", rest, zero, dtype), differ)
        if op == "mod":
            return arith.addi(rest, arith.select(down, y, zero))
        return arith.subi(quotient, self.cast(down, BOOL, dtype))

    def _by_constant(self, op: str, x: Value, n: int, dtype: DType, nonnegative: bool) -> Value:
        y = self.const(n, dtype)
        power = n > 0 and n & (n - 1) == 0
        if power and op == "fdiv":
            return arith.shrsi(x, self.const(n.bit_length() - 1, dtype))
        if power and op == "mod":
            return arith.andi(x, self.const(n - 1, dtype))
        if nonnegative and n > 0:
            return (arith.divui if op in ("fdiv", "tdiv") else arith.remui)(x, y)
        return self._rounded(op, x, y, dtype)

    # -- masks as words ------------------------------------------------------------------------------------------------
    def bit(self, word: Value, position: int, opaque: bool = False) -> Value:
        """Is bit `position` of an i32 set? `opaque`: one instruction that LLVM leaves alone, to go with others."""
        if opaque and not self.host:
            code = f"{{ .reg .b32 t; and.b32 t, $1, {1 << position}; setp.ne.b32 $0, t, 0; }}"
            return self._asm(T.bool(), [word], code, "=b,r")
        mask = self.const(wrap(1 << position, I32), I32)
        return self.compare("ne", arith.andi(word, mask), self.const(0, I32), I32)

    def join(self, op: str, x: Value, y: Value) -> Value:
        """`and` or `or` of predicates, out of LLVM's sight: it would make two selects of a select by the result."""
        if self.host:
            return (arith.andi if op == "and" else arith.ori)(x, y)
        return self._asm(T.bool(), [x, y], f"{op}.pred $0, $1, $2;", "=b,b,b")

    def low_bits(self, length: Value) -> Value:
        """An i32 whose `length` lowest bits are set; all of them from 32 on."""
        if not self.host:
            return self._asm(T.i32(), [length], "bmsk.clamp.b32 $0, 0, $1;", "=r,r")
        wide, one = arith.extui(T.i64(), arith.minsi(length, self.const(32, I32))), arith.constant(T.i64(), 1)
        return arith.trunci(T.i32(), arith.subi(arith.shli(one, wide), one))

    def _asm(self, kind: Any, args: list[Value], code: str, constraints: str) -> Value:
        return llvm.inline_asm(
            kind, args, code, constraints, has_side_effects=False, is_align_stack=False,
            asm_dialect=llvm.AsmDialect.AD_ATT,
        )  # fmt: skip

    def intrinsic(self, name: str, *args: Value) -> Value:
        """An NVVM intrinsic of f32."""
        return llvm.call_intrinsic(T.f32(), f"llvm.nvvm.{name}", list(args), [], [])


_FLOAT: dict[str, Callable[..., Value]] = {
    "add": arith.addf, "sub": arith.subf, "mul": arith.mulf, "max": arith.maximumf, "min": arith.minimumf,
    "neg": arith.negf, "abs": mlir_math.absf, "floor": mlir_math.floor, "ceil": mlir_math.ceil,
    "trunc": mlir_math.trunc, "round": mlir_math.roundeven,
}  # fmt: skip
_INTEGER: dict[str, Callable[..., Value]] = {
    "add": arith.addi, "sub": arith.subi, "mul": arith.muli, "max": arith.maxsi, "min": arith.minsi,
    "and": arith.andi, "or": arith.ori, "xor": arith.xori,
}  # fmt: skip

LOG2_E, LN_2 = math.log2(math.e), math.log(2.0)
