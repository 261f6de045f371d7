"""The convert kernel, after the backward kernel: dQ = dq_acc · scale, rounded to 16 bits, out of fragment order.

A tile of the accumulator is [warpgroup][column group of 8][row pair of 32][4 lanes][4]: 64 contiguous bytes are 8
columns of a row r and of the row r + 8. One thread turns these 16 floats into two 16-byte stores; neighbouring
threads take neighbouring column groups.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from flexbwd.jit.launch import fake_stream, fake_tensor
from flexbwd.sm90.delta import fake_accumulator
from flexbwd.sm90.row_configs import ConvertConfig

THREADS = 256
_PAIRS = 32  # row pairs (r, r + 8) of 64 rows


class ConvertKernel:
    """Host launcher and kernel of one configuration."""

    def __init__(self, config: ConvertConfig) -> None:
        self.config = config

    @cute.jit
    def __call__(self, dq_acc: cute.Tensor, grad_query: cute.Tensor, scale: Float32, stream: Any):
        m_blocks = (grad_query.shape[2] + (self.config.tile_m - 1)) // self.config.tile_m
        items = m_blocks * grad_query.shape[1] * grad_query.shape[0]
        self.kernel(dq_acc, grad_query, scale, m_blocks).launch(
            grid=(items, 1, 1), block=(THREADS, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(self, dq_acc: cute.Tensor, grad_query: cute.Tensor, scale: Float32, m_blocks: Int32):
        config = self.config
        thread, item = cute.arch.thread_idx()[0], cute.arch.block_idx()[0]
        head = item // m_blocks
        first = (item - head * m_blocks) * config.tile_m
        batch = head // grad_query.shape[1]
        target = grad_query[batch, head - batch * grad_query.shape[1], None, None]
        q_len, dim = target.shape[0], target.shape[1]
        groups, wg_groups = config.dim // 8, config.wg_dim // 8
        total = config.floats // 16
        for i in cutlass.range_constexpr(-(-total // THREADS)):
            piece = i * THREADS + thread
            if piece < total:
                pair, group = piece // groups, piece % groups
                by_columns, by_rows = group // wg_groups, pair // _PAIRS
                wg = by_columns + by_rows  # one of them is 0
                pair -= by_rows * _PAIRS
                source = cute.local_tile(
                    dq_acc[item, None], (16,), ((wg * wg_groups + group % wg_groups) * _PAIRS + pair,)
                )
                held = cute.make_rmem_tensor((16,), Float32)
                cute.autovec_copy(source, held)
                row = first + by_rows * 64 + (pair // 8) * 16 + pair % 8
                if group * 8 < dim:
                    for r in cutlass.range_constexpr(2):
                        if row + 8 * r < q_len:
                            half = cute.make_tensor(held.iterator + 2 * r, cute.make_layout((2, 4), stride=(1, 4)))
                            rounded = cute.make_rmem_tensor((2, 4), target.element_type)
                            rounded.store((half.load() * scale).to(target.element_type))
                            flat = cute.make_tensor(rounded.iterator, cute.make_layout((8,)))
                            cute.autovec_copy(flat, cute.local_tile(target[row + 8 * r, None], (8,), (group,)))


def build_convert(config: ConvertConfig) -> tuple[Any, tuple[Any, ...]]:
    """The jit function of `config` and its fake arguments."""
    arguments = (fake_accumulator(config.floats), fake_tensor(config.dtype, 4), Float32(1.0), fake_stream())
    return ConvertKernel(config), arguments
