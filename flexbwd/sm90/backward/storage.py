"""Shared memory of the backward kernel.

bars     kv full | q full[stages], empty[stages] | dO full, empty
record       what the query tile of a stage is, riding on the q ring: (query tile, its matrix batch * Hq + head, partial
             tiles and other tiles of that head's walk); query tile -1 ends the walk
lse, delta   tile_m fp32 per stage, riding on the q and dO rings
k, v     stationary; at the end dK and dV on their way out
q, do    rings
p, ds    tile_m x tile_n, keys contiguous; p only where warpgroups share a tile by dims
dq       fp32, per warpgroup, in fragment order: see dq_writer.py
dq_target    per warpgroup, the tile of the accumulator that dq is for
"""

import math
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import warpgroup

from flexbwd.sm90.backward.tile import WGS, BwdTile

_ATOMS = {
    64: warpgroup.SmemLayoutAtomKind.K_SW128,
    32: warpgroup.SmemLayoutAtomKind.K_SW64,
    16: warpgroup.SmemLayoutAtomKind.K_SW32,
}


def _row_major(dtype: Any, shape: tuple[int, ...], granule: int) -> Any:
    """Swizzled layout of rows; a wgmma reads columns in pieces that are multiples of `granule`."""
    atom = warpgroup.make_smem_layout_atom(_ATOMS[math.gcd(granule, 64)], dtype)
    return cute.tile_to_shape(atom, shape, order=tuple(range(len(shape))))


@dataclass(frozen=True)
class Layouts:
    """Swizzled 16-bit layouts (rows, columns[, stage])."""

    k: Any  # (tile_n, D)
    v: Any  # (tile_n, Dv)
    q: Any  # (tile_m, D, stages)
    do: Any  # (tile_m, Dv, stages)
    ds: Any  # (tile_m, tile_n, stages); p is the same


def smem_layouts(tile: BwdTile, dtype: Any) -> Layouts:
    share = 1 if tile.by_keys else WGS  # pieces into which dK and dV split the head dim
    return Layouts(
        k=_row_major(dtype, (tile.tile_n, tile.dim), math.gcd(tile.dq_wg_dim, tile.dim // share)),
        v=_row_major(dtype, (tile.tile_n, tile.value_dim), tile.value_dim // share),
        q=_row_major(dtype, (tile.tile_m, tile.dim, tile.q_stages), tile.dim // share),
        do=_row_major(dtype, (tile.tile_m, tile.value_dim, tile.do_stages), tile.value_dim // share),
        ds=_row_major(dtype, (tile.tile_m, tile.tile_n, tile.ds_stages), tile.tile_n),
    )


def storage_struct(tile: BwdTile, dtype: Any) -> Any:
    """The struct to allocate; sizes are in elements."""
    barriers = 1 + 2 * (tile.q_stages + tile.do_stages)
    weights = tile.tile_m * tile.tile_n * tile.ds_stages

    @cute.struct
    class Storage:
        bars: cute.struct.MemRange[cutlass.Int64, barriers]
        dq_target: cute.struct.MemRange[cutlass.Int32, WGS]
        record: cute.struct.Align[cute.struct.MemRange[cutlass.Int32, 4 * tile.q_stages], 16]
        lse: cute.struct.Align[cute.struct.MemRange[cutlass.Float32, tile.tile_m * tile.q_stages], 128]
        delta: cute.struct.Align[cute.struct.MemRange[cutlass.Float32, tile.tile_m * tile.do_stages], 128]
        k: cute.struct.Align[cute.struct.MemRange[dtype, tile.tile_n * tile.dim], 1024]
        v: cute.struct.Align[cute.struct.MemRange[dtype, tile.tile_n * tile.value_dim], 1024]
        q: cute.struct.Align[cute.struct.MemRange[dtype, tile.tile_m * tile.dim * tile.q_stages], 1024]
        do: cute.struct.Align[cute.struct.MemRange[dtype, tile.tile_m * tile.value_dim * tile.do_stages], 1024]
        p: cute.struct.Align[cute.struct.MemRange[dtype, 0 if tile.by_keys else weights], 1024]
        ds: cute.struct.Align[cute.struct.MemRange[dtype, weights], 1024]
        dq: cute.struct.Align[cute.struct.MemRange[cutlass.Float32, tile.tile_m * tile.dim], 128]

    return Storage


@dataclass(frozen=True)
class Smem:
    """The tensors over the storage."""

    k: Any
    v: Any
    q: Any
    do: Any
    p: Any
    ds: Any
    record: Any  # (4, stages) int32
    lse: Any  # (tile_m, stages)
    delta: Any  # (tile_m, stages)
    dq: Any  # (floats of a warpgroup, warpgroups)
    dq_target: Any  # (warpgroups) int32

    @classmethod
    def of(cls, storage: Any, tile: BwdTile, dtype: Any) -> "Smem":
        layouts = smem_layouts(tile, dtype)

        def swizzled(memory: Any, layout: Any) -> cute.Tensor:
            return memory.get_tensor(layout.outer, swizzle=layout.inner)

        return cls(
            k=swizzled(storage.k, layouts.k),
            v=swizzled(storage.v, layouts.v),
            q=swizzled(storage.q, layouts.q),
            do=swizzled(storage.do, layouts.do),
            p=swizzled(storage.ds if tile.by_keys else storage.p, layouts.ds),
            ds=swizzled(storage.ds, layouts.ds),
            record=storage.record.get_tensor(cute.make_layout((4, tile.q_stages))),
            lse=storage.lse.get_tensor(cute.make_layout((tile.tile_m, tile.q_stages))),
            delta=storage.delta.get_tensor(cute.make_layout((tile.tile_m, tile.do_stages))),
            dq=storage.dq.get_tensor(cute.make_layout((tile.dq_wg_floats, WGS))),
            dq_target=storage.dq_target.get_tensor(cute.make_layout((WGS,))),
        )


def transposed(tensor: cute.Tensor) -> cute.Tensor:
    """(columns, rows[, stage]) view of a (rows, columns[, stage]) tile."""
    rows, columns = cute.size(tensor, mode=[0]), cute.size(tensor, mode=[1])
    shape, stride = (columns, rows), (rows, 1)
    if cute.rank(tensor) == 3:
        shape, stride = (*shape, cute.size(tensor, mode=[2])), (*stride, rows * columns)
    return cute.composition(tensor, cute.make_layout(shape, stride=stride))
