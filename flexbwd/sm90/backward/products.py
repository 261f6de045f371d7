"""Products: the five matrix products of a step, with their operands as shared-memory descriptors.

Warpgroups share a tile by keys or by dims (see tile.py); the layout of warpgroups in a tiled wgmma says who has which
part of each result.
"""

from dataclasses import dataclass
from typing import Any

import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import warp, warpgroup

from flexbwd.sm90.backward.storage import Smem, transposed
from flexbwd.sm90.backward.tile import WG_THREADS, WGS, BwdTile
from flexbwd.sm90.numerics import gemm

K_MAJOR, MN_MAJOR = cute.nvgpu.OperandMajorMode.K, cute.nvgpu.OperandMajorMode.MN


@dataclass(frozen=True)
class Mmas:
    """Tiled wgmmas."""

    s: Any  # (tile_n, tile_m): S and dP
    dv: Any  # (tile_n, Dv)
    dk: Any  # (tile_n, D)
    dq: Any  # (tile_m, D)

    @classmethod
    def of(cls, tile: BwdTile, dtype: Any) -> "Mmas":
        def make(columns: int, by_rows: bool, a_major: Any, b_major: Any, a_source: Any) -> Any:
            n = columns if by_rows else columns // WGS
            op = warpgroup.MmaF16BF16Op(dtype, Float32, (64, n, 16), a_source, a_major, b_major)
            return cute.make_tiled_mma(cute.make_mma_atom(op), (WGS, 1, 1) if by_rows else (1, WGS, 1))

        smem, rmem = warpgroup.OperandSource.SMEM, warpgroup.OperandSource.RMEM
        keys = tile.by_keys
        weights = (K_MAJOR, MN_MAJOR, rmem) if keys else (MN_MAJOR, MN_MAJOR, smem)
        return cls(
            s=make(tile.tile_m, keys, K_MAJOR, K_MAJOR, smem),
            dv=make(tile.value_dim, keys, *weights),
            dk=make(tile.dim, keys, *weights),
            dq=make(tile.dim, tile.tile_m == 128, K_MAJOR, MN_MAJOR, smem),
        )


@dataclass(frozen=True)
class Product:
    """One product: tiled mma and descriptors (.., K step[, stage]); a is None: from registers."""

    mma: Any
    a: Any
    b: Any

    @classmethod
    def of(cls, mma: Any, thread: Int32, a: Any, b: cute.Tensor) -> "Product":
        thr = mma.get_slice(thread)
        frag_a = None if a is None else thr.make_fragment_A(thr.partition_A(a))
        return cls(mma, frag_a, thr.make_fragment_B(thr.partition_B(b)))

    def accumulator(self, rows: int, columns: int) -> cute.Tensor:
        return cute.make_rmem_tensor(self.mma.partition_shape_C((rows, columns)), Float32)

    def issue(self, acc: cute.Tensor, accumulate: bool, a: Any = None, a_stage: Any = None, b_stage: Any = None):
        """Start acc (+)= a·b and close a group; `a` in registers, or from its stage in shared memory."""
        if a is None:
            a = self.a if a_stage is None else self.a[None, None, None, a_stage]
        gemm(self.mma, acc, a, self.b if b_stage is None else self.b[None, None, None, b_stage], accumulate)
        warpgroup.commit_group()


@dataclass(frozen=True)
class Products:
    s: Product  # K·Qᵀ      a stationary, b by q stage
    dp: Product  # V·dOᵀ    a stationary, b by dO stage
    dv: Product  # Pᵀ·dO    b by dO stage
    dk: Product  # dSᵀ·Q    b by q stage
    dq: Product  # dS·K     a by dS stage, b stationary

    @classmethod
    def of(cls, tile: BwdTile, smem: Smem, wg: Int32) -> "Products":
        mmas = Mmas.of(tile, smem.k.element_type)
        first = wg * WG_THREADS  # descriptors are per warpgroup: keep them uniform
        p, ds = (None, None) if tile.by_keys else (transposed(smem.p), transposed(smem.ds))
        return cls(
            s=Product.of(mmas.s, first, smem.k, smem.q),
            dp=Product.of(mmas.s, first, smem.v, smem.do),
            dv=Product.of(mmas.dv, first, p, transposed(smem.do)),
            dk=Product.of(mmas.dk, first, ds, transposed(smem.q)),
            dq=Product.of(mmas.dq, first, smem.ds, transposed(smem.k)),
        )


@dataclass(frozen=True)
class Share:
    """How a thread puts its part of P and dS (keys x queries) into shared memory."""

    copy: Any
    p: Any  # destinations (.., stage)
    ds: Any

    @classmethod
    def of(cls, products: Products, smem: Smem, thread: Int32) -> "Share":
        atom = cute.make_copy_atom(warp.StMatrix8x8x16bOp(True, 4), smem.k.element_type)
        copy = cute.make_tiled_copy_C(atom, products.s.mma).get_slice(thread)
        return cls(copy, copy.partition_D(transposed(smem.p)), copy.partition_D(transposed(smem.ds)))

    def store(self, fragment: cute.Tensor, target: Any, stage: Int32):
        cute.copy(self.copy, self.copy.retile(fragment), target[None, None, None, stage])


@dataclass(frozen=True)
class Accumulators:
    """What lives through a whole walk; S through a step."""

    S: cute.Tensor
    dK: cute.Tensor
    dV: cute.Tensor

    @classmethod
    def of(cls, products: Products, tile: BwdTile) -> "Accumulators":
        held = cls(
            S=products.s.accumulator(tile.tile_n, tile.tile_m),
            dK=products.dk.accumulator(tile.tile_n, tile.dim),
            dV=products.dv.accumulator(tile.tile_n, tile.value_dim),
        )
        held.dK.fill(0.0)
        held.dV.fill(0.0)
        return held
