"""One torch kernel per IR op: `kernel(*operands, out=None)`, where `out` may be an operand to overwrite."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .ir import BOOL, I32, I64, DType, F, Node

Kernel = Callable[..., Tensor]
INT_DTYPES = {I32: torch.int32, I64: torch.int64, BOOL: torch.bool}
_LANES = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_SMALL = 4096  # elements below which torch.where's one call beats four vectorised ones


def torch_dtype(dtype: DType, float_dtype: torch.dtype) -> torch.dtype:
    return float_dtype if dtype is F else INT_DTYPES[dtype]


def kernel_of(node: Node, float_dtype: torch.dtype) -> Kernel:
    """The kernel that computes `node` from its operands."""
    if node.op == "cast":
        return _cast(torch_dtype(node.dtype, float_dtype))
    if node.op in _DIVISIONS and node.dtype.is_int:
        divisor = node.args[1]
        kernel = _DIVISIONS[node.op]
        return kernel if divisor.is_const and divisor.value not in (0, -1) else _guarded(kernel)
    if node.dtype is BOOL and node.op in _LOGICAL:
        return _LOGICAL[node.op]
    return _KERNELS[node.op]


def lane_bits(keep: Tensor, dtype: torch.dtype) -> Tensor:
    """Bool to integers as wide as `dtype`: all ones where true, 0 elsewhere, to select by bitwise and."""
    return keep.view(torch.int8).neg().to(_LANES[dtype.itemsize])


def lanes(x: Tensor) -> Tensor:
    """The same memory as integers."""
    return x.view(_LANES[x.dtype.itemsize])


def addcmul(x: Tensor, y: Tensor, z: Tensor, out: Tensor | None = None) -> Tensor:
    return torch.addcmul(x, y, z, out=out)


def subcmul(x: Tensor, y: Tensor, z: Tensor, out: Tensor | None = None) -> Tensor:
    return torch.addcmul(x, y, z, value=-1, out=out)


def read(capture: Tensor, index: Sequence[Tensor], dtype: torch.dtype, max_numel_int32: int = 2**31 - 1) -> Tensor:
    """`capture[index]`: negative indices wrap as in Python, then all are clamped into the tensor.

    Lanes that a mask hides may index anywhere; they read something and reach nothing. No stride of `capture` makes
    a copy: elements are picked from its storage by their offset.
    """
    if not index:
        return capture.to(dtype)
    if capture.numel() == 0:
        return torch.zeros(torch.broadcast_shapes(*(i.shape for i in index)), dtype=dtype, device=capture.device)
    span = 1 + sum((n - 1) * s for n, s in zip(capture.shape, capture.stride(), strict=True))
    wide = span > max_numel_int32
    offset: Tensor | None = None
    for i, n, stride in sorted(zip(index, capture.shape, capture.stride(), strict=True), key=lambda t: t[0].numel()):
        part = inside(i, n)
        part = part.to(torch.int64) if wide else part.to(torch.int32)
        part = part if stride == 1 else part * stride
        offset = part if offset is None else offset + part
    assert offset is not None
    flat = capture.as_strided((span,), (1,))
    return flat.index_select(0, offset.reshape(-1)).view(offset.shape).to(dtype)


def inside(index: Tensor, size: int) -> Tensor:
    """`index` with negatives wrapped once and the rest clamped to [0, size)."""
    if index.numel() == 0:
        return index
    low, high = torch.aminmax(index)
    if low < 0:
        index = torch.where(index < 0, index + size, index)
    elif high < size:
        return index
    return index.clamp(0, size - 1)


# -- kernels with a twist ----------------------------------------------------------------------------------------------
def _cast(dtype: torch.dtype) -> Kernel:
    def cast(x: Tensor, out: Tensor | None = None) -> Tensor:
        return x.to(dtype)

    return cast


def _floor_div(x: Tensor, y: Tensor, out: Tensor | None = None) -> Tensor:
    return torch.div(x, y, rounding_mode="floor", out=out)


def _trunc_div(x: Tensor, y: Tensor, out: Tensor | None = None) -> Tensor:
    return torch.div(x, y, rounding_mode="trunc", out=out)


def _guarded(kernel: Kernel) -> Kernel:
    """An integer division where no operand, which may stand in a masked lane, ends the process.

    Zero divisors become 1; x over −1 becomes −x over 1, since the least integer over −1 overflows in hardware.
    """

    def guarded(x: Tensor, y: Tensor, out: Tensor | None = None) -> Tensor:
        minus_one = y == -1
        return kernel(torch.where(minus_one, x.neg(), x), y + (y == 0).to(y.dtype) + 2 * minus_one.to(y.dtype), out=out)

    return guarded


def _where(c: Tensor, x: Tensor, y: Tensor, out: Tensor | None = None) -> Tensor:
    """torch.where, bit-exact; large ones by bitwise select, which is vectorised where torch.where is not."""
    if x.dtype is torch.bool or max(c.numel(), x.numel(), y.numel()) < _SMALL:
        return torch.where(c, x, y, out=out)
    bits = lane_bits(c, x.dtype)
    taken = torch.bitwise_and(lanes(x), bits, out=None if out is not x else lanes(x))
    other = torch.bitwise_and(lanes(y), bits.bitwise_not(), out=None if out is not y else lanes(y))
    return torch.bitwise_or(taken, other, out=None if out is None else lanes(out)).view(x.dtype)


_DIVISIONS: dict[str, Kernel] = {
    "fdiv": _floor_div,
    "tdiv": _trunc_div,
    "mod": torch.remainder,
    "fmod": torch.fmod,
}
_LOGICAL: dict[str, Kernel] = {
    "and": torch.logical_and,
    "or": torch.logical_or,
    "xor": torch.logical_xor,
    "not": torch.logical_not,
    "max": torch.logical_or,
    "min": torch.logical_and,
}
_KERNELS: dict[str, Kernel] = {
    **_DIVISIONS,
    "add": torch.add, "sub": torch.sub, "mul": torch.mul, "div": torch.div, "max": torch.maximum,
    "min": torch.minimum, "pow": torch.pow, "and": torch.bitwise_and, "or": torch.bitwise_or,
    "xor": torch.bitwise_xor, "shl": torch.bitwise_left_shift, "shr": torch.bitwise_right_shift,
    "eq": torch.eq, "ne": torch.ne, "lt": torch.lt, "le": torch.le, "gt": torch.gt, "ge": torch.ge,
    "where": _where, "neg": torch.neg, "abs": torch.abs, "sign": torch.sign, "not": torch.bitwise_not,
    "exp": torch.exp, "exp2": torch.exp2, "log": torch.log, "log2": torch.log2, "log1p": torch.log1p,
    "expm1": torch.expm1, "sqrt": torch.sqrt, "rsqrt": torch.rsqrt, "rcp": torch.reciprocal, "tanh": torch.tanh,
    "sigmoid": torch.sigmoid, "sin": torch.sin, "cos": torch.cos, "tan": torch.tan, "erf": torch.erf,
    "floor": torch.floor, "ceil": torch.ceil, "trunc": torch.trunc, "round": torch.round,
}  # fmt: skip
