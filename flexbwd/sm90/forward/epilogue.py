"""Epilogue: normalise O; write it, the LSE and the row maxima from registers: shared memory is left to the next Q."""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32

from flexbwd.sm90.forward.roles import Outputs
from flexbwd.sm90.forward.softmax import OnlineSoftmax
from flexbwd.sm90.numerics import quad_transpose, round_into, rows_and_columns, scale_rows
from flexbwd.sm90.tile import FwdTile


@dataclass(frozen=True)
class Epilogue:
    tile: FwdTile
    outputs: Outputs
    dtype: Any

    @cute.jit
    def run(self, acc_O: cute.Tensor, softmax: OnlineSoftmax, row: Int32, head: Int32, batch: Int32):
        """`row` is the thread's first row of the query."""
        lse = cute.make_rmem_tensor((2,), Float32)
        inverse = cute.make_rmem_tensor((2,), Float32)
        top = cute.make_rmem_tensor((2,), Float32)
        softmax.finish(lse, inverse, top)
        scale_rows(rows_and_columns(acc_O, self.tile.value_dim), inverse, self.tile.value_dim // 4)
        out = cute.make_rmem_tensor(acc_O.layout, self.dtype)
        round_into(out, acc_O)
        words = cute.recast_tensor(out, Uint32)  # [r, group of 8 columns] in the order r + 2 * group
        self.write([words[i] for i in range(self.tile.value_dim // 4)], (lse, top), row, head, batch)

    @cute.jit
    def nothing(self, row: Int32, head: Int32, batch: Int32):
        """The rows of an item without tiles."""
        dead = cute.make_rmem_tensor((2,), Float32)
        dead.fill(-Float32.inf)
        self.write([Uint32(0)] * (self.tile.value_dim // 4), (dead, dead), row, head, batch)

    @cute.jit
    def write(self, words: list, statistics: tuple, row: Int32, head: Int32, batch: Int32):
        """Words of 2 columns; a quad turns 4 x 4 of them so that each thread holds 8 columns, 16 bytes, of a row."""
        lane = cute.arch.lane_idx() % 4
        mO, mLse, mTop = self.outputs.out, self.outputs.lse, self.outputs.top
        lse, top = statistics
        q_len, value_dim = mO.shape[2], mO.shape[3]
        for r in cutlass.range_constexpr(2):
            here = row + 8 * r
            if (here < q_len) & (lane == 0):
                mLse[batch, head, here] = lse[r]
                if cutlass.const_expr(mTop is not None):
                    mTop[batch, head, here] = top[r]
            for block in cutlass.range_constexpr(self.tile.value_dim // 32):
                quad = quad_transpose([words[r + 2 * (4 * block + g)] for g in range(4)], lane)
                column = 32 * block + 8 * lane
                if (here < q_len) & (column < value_dim):
                    store_16_bytes(mO, (batch, head, here, column), quad)


def store_16_bytes(tensor: cute.Tensor, at: tuple, words: list) -> None:
    """Four words to an element whose address is a multiple of 16 bytes."""
    offset = cute.crd2idx(at, tensor.layout)
    start = cute.make_ptr(Uint32, (tensor.iterator + offset).toint(), cute.AddressSpace.gmem, assumed_align=16)
    held = cute.make_rmem_tensor((4,), Uint32)
    for i in range(4):
        held[i] = words[i]
    cute.autovec_copy(held, cute.make_tensor(start, cute.make_layout((4,))))
