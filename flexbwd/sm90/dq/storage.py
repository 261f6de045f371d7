"""Shared memory of the dQ kernel.

bars   q full[wgs] | q empty[wgs] | dO full[wgs] | k full[k_stages], empty | v full[v_stages], empty
q      per warpgroup 64 x D: Q, and after the last S the same warpgroup's dQ
do     per warpgroup 64 x Dv
k, v   rings of tile_n x D and tile_n x Dv
n      per K buffer, which key tile it is
"""

import math
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import warpgroup

from flexbwd.sm90.dq.tile import DqTile
from flexbwd.sm90.tile import WG_ROWS

_ATOMS = {64: warpgroup.SmemLayoutAtomKind.K_SW128, 32: warpgroup.SmemLayoutAtomKind.K_SW64}


def _row_major(dtype: Any, rows: int, columns: int, buffers: int) -> Any:
    """Swizzled layout (rows, columns, buffer) of rows."""
    atom = warpgroup.make_smem_layout_atom(_ATOMS[math.gcd(columns, 64)], dtype)
    return cute.tile_to_shape(atom, (rows, columns, buffers), order=(0, 1, 2))


@dataclass(frozen=True)
class Layouts:
    """Swizzled 16-bit layouts, each with a last mode of buffers."""

    q: Any  # (64, D, wgs); dQ is the same
    do: Any  # (64, Dv, wgs)
    k: Any  # (tile_n, D, k_stages)
    v: Any  # (tile_n, Dv, v_stages)

    @classmethod
    def of(cls, tile: DqTile, dtype: Any) -> "Layouts":
        return cls(
            q=_row_major(dtype, WG_ROWS, tile.dim, tile.wgs),
            do=_row_major(dtype, WG_ROWS, tile.value_dim, tile.wgs),
            k=_row_major(dtype, tile.tile_n, tile.dim, tile.k_stages),
            v=_row_major(dtype, tile.tile_n, tile.value_dim, tile.v_stages),
        )


def storage_struct(tile: DqTile, dtype: Any) -> Any:
    """The struct to allocate; sizes are in elements."""
    bar_count = 3 * tile.wgs + 2 * (tile.k_stages + tile.v_stages)

    @cute.struct
    class Storage:
        bars: cute.struct.MemRange[cutlass.Int64, bar_count]
        n: cute.struct.MemRange[cutlass.Int32, tile.k_stages]
        q: cute.struct.Align[cute.struct.MemRange[dtype, tile.tile_m * tile.dim], 1024]
        do: cute.struct.Align[cute.struct.MemRange[dtype, tile.tile_m * tile.value_dim], 1024]
        k: cute.struct.Align[cute.struct.MemRange[dtype, tile.k_stages * tile.tile_n * tile.dim], 1024]
        v: cute.struct.Align[cute.struct.MemRange[dtype, tile.v_stages * tile.tile_n * tile.value_dim], 1024]

    return Storage


@dataclass(frozen=True)
class Smem:
    """The tensors over the storage, shaped as `Layouts`."""

    q: Any
    do: Any
    k: Any
    v: Any
    n: Any  # (k_stages,)

    @classmethod
    def of(cls, storage: Any, tile: DqTile, dtype: Any) -> "Smem":
        layouts = Layouts.of(tile, dtype)

        def swizzled(memory: Any, layout: Any) -> cute.Tensor:
            return memory.get_tensor(layout.outer, swizzle=layout.inner)

        return cls(
            q=swizzled(storage.q, layouts.q),
            do=swizzled(storage.do, layouts.do),
            k=swizzled(storage.k, layouts.k),
            v=swizzled(storage.v, layouts.v),
            n=storage.n.get_tensor(cute.make_layout((tile.k_stages,))),
        )


def transposed(tensor: cute.Tensor) -> cute.Tensor:
    """(columns, rows, buffer) view of a (rows, columns, buffer) ring."""
    rows, columns, buffers = (cute.size(tensor, mode=[i]) for i in range(3))
    return cute.composition(tensor, cute.make_layout((columns, rows, buffers), stride=(rows, 1, rows * columns)))
