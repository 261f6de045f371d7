"""The delta kernel, before the backward kernel:

    delta    = Σ_d dO∘O − dLSE      fp32 [B*Hq, padded Sq]
    lse_log2 = lse · log2(e)        +inf on dead rows (lse −inf) and padding rows: P = exp2(s − lse_log2) = 0
    dq_acc   = 0

A row is summed by `row_threads` neighbouring threads, 8 elements at a time; rows are padded to the backward's tile_m.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Float32, Int32

from flexbwd.jit.launch import fake_compact, fake_stream, fake_tensor
from flexbwd.sm90.row_configs import ROW_WIDTH as _WIDTH
from flexbwd.sm90.row_configs import DeltaConfig

THREADS = 256
LOG2_E = 1.4426950408889634


class DeltaKernel:
    """Host launcher and kernel of one configuration."""

    def __init__(self, config: DeltaConfig) -> None:
        self.config = config

    @cute.jit
    def __call__(
        self,
        out: cute.Tensor,
        grad_out: cute.Tensor,
        lse: cute.Tensor,
        grad_lse: cute.Tensor,
        lse_log2: cute.Tensor,
        delta: cute.Tensor,
        dq_acc: cute.Tensor,
        stream: Any,
    ):
        m_blocks = (out.shape[2] + (self.config.tile_m - 1)) // self.config.tile_m
        items = m_blocks * out.shape[1] * out.shape[0]
        self.kernel(out, grad_out, lse, grad_lse, lse_log2, delta, dq_acc, m_blocks).launch(
            grid=(items, 1, 1), block=(THREADS, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(
        self,
        out: cute.Tensor,
        grad_out: cute.Tensor,
        lse: cute.Tensor,
        grad_lse: cute.Tensor,
        lse_log2: cute.Tensor,
        delta: cute.Tensor,
        dq_acc: cute.Tensor,
        m_blocks: Int32,
    ):
        config = self.config
        thread, item = cute.arch.thread_idx()[0], cute.arch.block_idx()[0]
        head = item // m_blocks
        first = (item - head * m_blocks) * config.tile_m
        batch = head // out.shape[1]
        h = head - batch * out.shape[1]
        rows_at_once = THREADS // config.row_threads
        lane = thread % config.row_threads
        for step in cutlass.range_constexpr(-(-config.tile_m // rows_at_once)):
            local = step * rows_at_once + thread // config.row_threads
            row = first + local
            inside = row < out.shape[2]
            total = Float32(0.0)
            if inside:
                total = self.dot(out[batch, h, row, None], grad_out[batch, h, row, None], lane)
            for shift in cutlass.range_constexpr(config.row_threads.bit_length() - 1):
                total += cute.arch.shuffle_sync_bfly(total, offset=1 << shift)
            if lane == 0 and local < config.tile_m:
                log2_sum = Float32.inf
                value = Float32(0.0)
                if inside:
                    natural = lse[batch, h, row]
                    if natural > -Float32.inf:
                        log2_sum = natural * LOG2_E
                        value = total
                        if cutlass.const_expr(config.has_grad_lse):
                            value -= grad_lse[batch, h, row]
                lse_log2[head, row] = log2_sum
                delta[head, row] = value
        if cutlass.const_expr(config.dq_floats > 0):
            self.clear(dq_acc[item, None], thread)

    @cute.jit
    def dot(self, a: cute.Tensor, b: cute.Tensor, lane: Int32) -> Float32:
        """This thread's share of Σ a∘b over a row."""
        config = self.config
        total = Float32(0.0)
        for piece in cutlass.range_constexpr(-(-config.value_dim // (_WIDTH * config.row_threads))):
            column = piece * config.row_threads + lane
            if column * _WIDTH < config.value_dim:
                parts = []
                for t in (a, b):
                    held = cute.make_rmem_tensor((_WIDTH,), t.element_type)
                    cute.autovec_copy(cute.local_tile(t, (_WIDTH,), (column,)), held)
                    parts.append(held.load().to(Float32))
                total += (parts[0] * parts[1]).reduce(cute.ReductionOp.ADD, Float32(0.0), 0)
        return total

    @cute.jit
    def clear(self, tile: cute.Tensor, thread: Int32):
        """Zero one tile of the accumulator, 16 bytes a store."""
        zeros = cute.make_rmem_tensor((4,), Float32)
        zeros.fill(0.0)
        for i in cutlass.range_constexpr(self.config.dq_floats // (4 * THREADS)):
            cute.autovec_copy(zeros, cute.local_tile(tile, (4,), (i * THREADS + thread,)))


def build_delta(config: DeltaConfig) -> tuple[Any, tuple[Any, ...]]:
    """The jit function of `config` and its fake arguments."""
    matrix = lambda: fake_tensor(config.dtype, 4)  # noqa: E731
    f32 = torch.float32
    row = lambda: fake_compact(f32, 3)  # noqa: E731
    arguments = (
        matrix(),
        matrix(),
        row(),
        row(),
        fake_rows(),
        fake_rows(),
        fake_accumulator(config.dq_floats),
        fake_stream(),
    )
    return DeltaKernel(config), arguments


def fake_rows() -> Any:
    """[B*Hq, padded Sq] fp32; rows start at multiples of 64 elements."""
    from cutlass.cute.runtime import make_fake_tensor

    shape = (cute.sym_int32(), cute.sym_int32(divisibility=64))
    return make_fake_tensor(Float32, shape, (cute.sym_int64(divisibility=64), 1), assumed_align=128)


def fake_accumulator(floats: int) -> Any:
    """[tiles, floats of a tile] fp32, contiguous; the tile stride is 64 bits wide."""
    from cutlass.cute.runtime import make_fake_tensor

    floats = max(floats, 4)
    return make_fake_tensor(
        Float32, (cute.sym_int32(), floats), (cute.sym_int64(divisibility=floats), 1), assumed_align=128
    )
