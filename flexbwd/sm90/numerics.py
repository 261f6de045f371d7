"""Arithmetic on accumulator fragments.

A warpgroup's fp32 accumulator of 64 x N: thread t holds rows 16*(t/32) + (t%32)/4 + 8*r for r = 0, 1 and columns
8*g + 2*(t%4) + c for
c = 0, 1; four neighbouring threads (a quad) share a row.
"""

import math

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass._mlir.dialects import math as math_ops

LN2 = math.log(2.0)


def rows_and_columns(acc: cute.Tensor, width: int | None = None) -> cute.Tensor:
    """The accumulator as [2 rows, N/4 columns of this thread]; N = `width`, read off `acc` if not given."""
    columns = cute.size(acc) // 2 if width is None else width // 4
    return cute.make_tensor(acc.iterator, cute.make_layout((2, (2, columns // 2)), stride=(2, (1, 4))))


def first_row(thread: Int32) -> Int32:
    """Row, within the warpgroup's 64, of the thread's r = 0."""
    return (thread // 32) * 16 + (thread % 32) // 4


def first_column(thread: Int32) -> Int32:
    """Column of the thread's g = 0, c = 0."""
    return 2 * (thread % 4)


def column_of(j: int) -> int:
    """Column of the j-th held column, relative to `first_column`."""
    return 8 * (j // 2) + j % 2


def exp2(x: Float32) -> Float32:
    """One ex2.approx.ftz; 2 ulp, and exp2(-inf) = 0."""
    return cute.math.exp2(x, fastmath=True)


def fma(a: Float32, b: Float32, c: Float32) -> Float32:
    """a * b + c in one rounding, wherever it is compiled. Of a plain product and sum ptxas may make either, and not the
    same in two copies of the code."""
    return Float32(math_ops.fma(Float32(a).ir_value(), Float32(b).ir_value(), Float32(c).ir_value()))


def quad_max(x: Float32) -> Float32:
    """Maximum over the four threads of a row."""
    x = cute.arch.fmax(x, cute.arch.shuffle_sync_bfly(x, offset=1))
    return cute.arch.fmax(x, cute.arch.shuffle_sync_bfly(x, offset=2))


def quad_sum(x: Float32) -> Float32:
    """Sum over the four threads of a row."""
    x = x + cute.arch.shuffle_sync_bfly(x, offset=1)
    return x + cute.arch.shuffle_sync_bfly(x, offset=2)


def round_into(out16: cute.Tensor, acc: cute.Tensor) -> None:
    """out16 = acc in 16 bits; both compact and in the same order. In pieces of 8: ptxas takes vectors of other lengths
    (80 / 2 columns) apart into single halves."""
    piece = cute.make_layout(8)
    for start in range(0, cute.size(acc), 8):
        values = cute.make_tensor(acc.iterator + start, piece).load()
        cute.make_tensor(out16.iterator + start, piece).store(values.to(out16.element_type))


def quad_transpose(words: list, lane: Int32) -> list:
    """Of four words of each thread of a quad, thread `lane` gets the lane-th of every thread, in thread order."""
    for bit in (1, 2):
        upper = (lane & bit) != 0
        for i in (j for j in range(4) if not j & bit):
            low, high = words[i], words[i + bit]
            other = cute.arch.shuffle_sync_bfly(cutlass.select_(upper, low, high), offset=bit)
            words[i] = cutlass.select_(upper, other, low)
            words[i + bit] = cutlass.select_(upper, high, other)
    return words


def scale_rows(rows: cute.Tensor, factors: cute.Tensor, columns: int) -> None:
    """rows[r, :] *= factors[r]; plain Python, as the DSL warns of its own unrolled loops from 64 steps on."""
    for r in range(2):
        for j in range(columns):
            rows[r, j] = rows[r, j] * factors[r]


def as_operand(acc16: cute.Tensor) -> cute.Tensor:
    """A 16-bit fragment in accumulator order, seen as the register operand A of the next wgmma (K = 16 a step): the
    order is the same."""
    steps = cute.size(acc16) // 8
    return cute.make_tensor(acc16.iterator, cute.make_layout(((2, 2, 2), 1, steps), stride=((1, 2, 4), 0, 8)))


@cute.jit
def gemm(
    tiled_mma: cute.TiledMma, acc: cute.Tensor, a: cute.Tensor, b: cute.Tensor, accumulate: cutlass.Constexpr[bool]
):
    """Issue acc (+)= a b over all K steps; asynchronous, the caller fences, commits and waits."""
    atom = cute.make_mma_atom(tiled_mma.op)  # fresh: its ACCUMULATE field must not outlive this region
    atom.set(cute.nvgpu.warpgroup.Field.ACCUMULATE, accumulate)
    for k in cutlass.range_constexpr(cute.size(a, mode=[2])):
        cute.gemm(atom, acc, a[None, None, k], b[None, None, k], acc)
        atom.set(cute.nvgpu.warpgroup.Field.ACCUMULATE, True)
