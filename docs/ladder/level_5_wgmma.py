"""Level 5: one step of level 4 on the tensor cores: dV += Pᵀ·dO, by one warpgroup.

The idea: the copy engine and the tensor cores work alone. One thread asks for a tile (TMA), a barrier in shared memory
counts the bytes that have landed, 128 threads together start a product (wgmma), and each waits for what it needs.

    global                shared                        registers of 128 threads
    K        ──TMA──▶  sK  (64 keys × D)  ──┐
    Q tile   ──TMA──▶  sQ  (64 rows × D)  ──┴─wgmma─▶  acc_S = K·Qᵀ  ─▶  P = exp2(c·S − lse)  ─▶  16 bits
    dO tile  ──TMA──▶  sdO (64 rows × D)  ───────────────wgmma──▶  acc_dV += P · dO      (P from registers: level 4)

Barriers:  LANDED_K, LANDED_Q   bytes of a copy have arrived, before wgmma reads them; one phase for each use
           sync_threads         wgmma has read sQ and sdO, before the next copy overwrites them

It copies, then computes, then copies: the copy engine idles while the tensor cores work. Level 6 gives the two jobs to
different warps. Without a GPU this compiles for sm_90a and says so.
"""

from __future__ import annotations

import math
import os
from typing import Any

import torch

os.environ.setdefault("CUTE_DSL_ARCH", "sm_90a")  # read when the DSL is imported

import cutlass
import cutlass.cute as cute
from common import head, oracle
from cutlass import BFloat16, Float32
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream
from cutlass.utils import hopper_helpers

ROWS, DIM, THREADS = 64, 64, 128  # of a tile, both ways; of the head; one warpgroup
TILE_BYTES = 2 * ROWS * DIM
LANDED_K, LANDED_Q = 0, 1
COLUMNS = ROWS // 4  # score columns of each of a thread's two rows


def tile_layout() -> Any:
    """64 × 64 of 16 bits, rows contiguous, in the 128-byte swizzle that TMA writes and wgmma reads conflict-free."""
    atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, BFloat16)
    return cute.tile_to_shape(atom, (ROWS, DIM), order=(0, 1))


def transposed(tile: cute.Tensor) -> cute.Tensor:
    """The same memory as (columns, rows): the tensor cores read either way."""
    return cute.composition(tile, cute.make_layout((DIM, ROWS), stride=(ROWS, 1)))


def as_rows(acc: cute.Tensor) -> cute.Tensor:
    """A thread's accumulator as [2 rows, columns]; the pattern of level 4."""
    return cute.make_tensor(acc.iterator, cute.make_layout((2, (2, COLUMNS // 2)), stride=(2, (1, 4))))


def as_operand(p: cute.Tensor) -> cute.Tensor:
    """The same registers as a left operand: level 4's equality, as a layout."""
    return cute.make_tensor(p.iterator, cute.make_layout(((2, 2, 2), 1, ROWS // 16), stride=((1, 2, 4), 0, 8)))


@cute.jit
def multiply(mma: cute.TiledMma, acc: cute.Tensor, a: cute.Tensor, b: cute.Tensor, add: cutlass.Constexpr[bool]):
    """Start acc (+)= a·b, 16 columns of the operands at a time; returns before it is done."""
    atom = cute.make_mma_atom(mma.op)
    atom.set(warpgroup.Field.ACCUMULATE, add)
    for k in cutlass.range_constexpr(cute.size(a, mode=[2])):
        cute.gemm(atom, acc, a[None, None, k], b[None, None, k], acc)
        atom.set(warpgroup.Field.ACCUMULATE, True)
    warpgroup.commit_group()


@cute.jit
def launch(q: cute.Tensor, k: cute.Tensor, do: cute.Tensor, lse_log2: cute.Tensor, dv: cute.Tensor, c: Float32, stream):
    """q, k, do bf16 [S, D], lse_log2 fp32 [Sq], dv fp32 [Skv, D]; c = scale·log2(e). A CTA for each 64 keys."""
    load, layout = cpasync.CopyBulkTensorTileG2SOp(), tile_layout()
    q_tma, k_tma, do_tma = (cpasync.make_tiled_tma_atom(load, t, layout, (ROWS, DIM)) for t in (q, k, do))
    major, one = OperandMajorMode, (1, 1, 1)
    s_mma = hopper_helpers.make_trivial_tiled_mma(BFloat16, BFloat16, major.K, major.K, Float32, one, (ROWS, ROWS))
    dv_mma = hopper_helpers.make_trivial_tiled_mma(
        BFloat16, BFloat16, major.K, major.MN, Float32, one, (ROWS, DIM), warpgroup.OperandSource.RMEM
    )
    step(q_tma, k_tma, do_tma, lse_log2, dv, c, s_mma, dv_mma).launch(
        grid=(k.shape[0] // ROWS, 1, 1), block=(THREADS, 1, 1), stream=stream
    )


@cute.kernel
def step(
    q_tma: Any,
    k_tma: Any,
    do_tma: Any,
    lse_log2: cute.Tensor,
    dv: cute.Tensor,
    c: Float32,
    s_mma: cute.TiledMma,
    dv_mma: cute.TiledMma,
):
    thread, block = cute.arch.thread_idx()[0], cute.arch.block_idx()[0]
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    layout = tile_layout()

    @cute.struct
    class Storage:
        bars: cute.struct.MemRange[cutlass.Int64, 2]
        k: cute.struct.Align[cute.struct.MemRange[BFloat16, ROWS * DIM], 1024]
        q: cute.struct.Align[cute.struct.MemRange[BFloat16, ROWS * DIM], 1024]
        do: cute.struct.Align[cute.struct.MemRange[BFloat16, ROWS * DIM], 1024]

    memory = cutlass.memory.SmemAllocator().allocate(Storage)
    bars = memory.bars.data_ptr()
    sK, sQ, sdO = (m.get_tensor(layout.outer, swizzle=layout.inner) for m in (memory.k, memory.q, memory.do))
    if warp == 0:
        with cute.arch.elect_one():
            cute.arch.mbarrier_init(bars + LANDED_K, 1)
            cute.arch.mbarrier_init(bars + LANDED_Q, 1)
        cute.arch.mbarrier_init_fence()
    cute.arch.sync_threads()

    def source_and_target(tma: Any, smem: cute.Tensor) -> tuple:
        tiles = cute.local_tile(tma[1], (ROWS, DIM), (None, 0))
        one = cute.make_layout(1)
        s, g = cpasync.tma_partition(tma[0], 0, one, cute.group_modes(smem, 0, 2), cute.group_modes(tiles, 0, 2))
        return g, s

    gK, tK = source_and_target(k_tma, sK)
    gQ, tQ = source_and_target(q_tma, sQ)
    gdO, tdO = source_and_target(do_tma, sdO)
    if warp == 0:
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(bars + LANDED_K, TILE_BYTES)
        cute.copy(k_tma[0], gK[None, block], tK, tma_bar_ptr=bars + LANDED_K)

    s_thread, dv_thread = s_mma.get_slice(0), dv_mma.get_slice(0)
    a, b = s_thread.make_fragment_A(s_thread.partition_A(sK)), s_thread.make_fragment_B(s_thread.partition_B(sQ))
    b_dO = dv_thread.make_fragment_B(dv_thread.partition_B(transposed(sdO)))
    acc_S = cute.make_rmem_tensor(s_thread.partition_shape_C((ROWS, ROWS)), Float32)
    acc_dV = cute.make_rmem_tensor(dv_thread.partition_shape_C((ROWS, DIM)), Float32)
    P = cute.make_rmem_tensor(acc_S.layout, BFloat16)
    acc_dV.fill(0.0)
    cute.arch.mbarrier_wait(bars + LANDED_K, 0)
    for m in cutlass.range(cute.size(lse_log2) // ROWS, unroll=1):
        if warp == 0:
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(bars + LANDED_Q, 2 * TILE_BYTES)
            cute.copy(q_tma[0], gQ[None, m], tQ, tma_bar_ptr=bars + LANDED_Q)
            cute.copy(do_tma[0], gdO[None, m], tdO, tma_bar_ptr=bars + LANDED_Q)
        cute.arch.mbarrier_wait(bars + LANDED_Q, m & 1)
        warpgroup.fence()  # registers written by ordinary instructions, before wgmma touches them
        multiply(s_mma, acc_S, a, b, False)
        warpgroup.wait_group(0)
        score = as_rows(acc_S)
        for j in cutlass.range_constexpr(COLUMNS):
            query = m * ROWS + 8 * (j // 2) + 2 * (thread % 4) + j % 2
            for r in cutlass.range_constexpr(2):
                score[r, j] = cute.math.exp2(score[r, j] * c - lse_log2[query], fastmath=True)
        P.store(acc_S.load().to(BFloat16))
        warpgroup.fence()
        multiply(dv_mma, acc_dV, as_operand(P), b_dO, True)
        warpgroup.wait_group(0)
        cute.arch.sync_threads()

    result = as_rows(acc_dV)
    key = block * ROWS + 16 * (thread // 32) + thread % 32 // 4
    for r in cutlass.range_constexpr(2):
        for j in cutlass.range_constexpr(DIM // 4):
            dv[key + 8 * r, 8 * (j // 2) + 2 * (thread % 4) + j % 2] = result[r, j]


def compiled() -> Any:
    """The kernel for any number of queries and keys that are multiples of 64, launched through TVM-FFI."""

    def matrix(dtype: Any) -> Any:
        return make_fake_compact_tensor(
            dtype, (cute.sym_int32(divisibility=ROWS), DIM), stride_order=(1, 0), assumed_align=128
        )

    rows = make_fake_compact_tensor(Float32, (cute.sym_int32(divisibility=ROWS),), stride_order=(0,), assumed_align=128)
    tensors = *(matrix(BFloat16) for _ in range(3)), rows, matrix(Float32)
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    return cute.compile(launch, *tensors, Float32(1.0), stream, options="--enable-tvm-ffi")


def main() -> None:
    kernel = compiled()
    print("compiled for sm_90a")
    if not (torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)):
        print("no Hopper GPU here: not run")
        return
    x = head(1024, 512, DIM, torch.bfloat16)
    q, k, do = (t.cuda() for t in (x.query, x.key, x.grad_out))
    lse = (x.scale * q.double() @ k.double().mT).logsumexp(-1)
    dv = torch.full((512, DIM), torch.nan, device="cuda")
    kernel(q, k, do, (lse * math.log2(math.e)).float(), dv, x.scale * math.log2(math.e))
    want = oracle(x, torch.ones(1024, 512, dtype=torch.bool))["dv"]
    error = float((dv.cpu().double() - want).norm() / want.norm())
    print(f"relative error of dV against fp64: {error:.1e}")
    assert error < 4e-3, error


if __name__ == "__main__":
    main()
