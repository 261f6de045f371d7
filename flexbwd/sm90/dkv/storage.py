"""Shared memory of the dK/dV kernel.

bars     kv full | q full[stages], empty[stages] | dO full, empty
record       what the query tile of a stage is, riding on the q ring: (query tile, its matrix batch * Hq + head, partial
             tiles and other tiles of that head's walk); query tile -1 ends the walk
lse, delta   tile_m fp32 per stage, riding on the q and dO rings
k, v     stationary; at the end dK and dV on their way out
q, do    rings
p        P on its way from the value to the key warpgroup, in fragment order: see exchange.py
"""

import math
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import warpgroup

from flexbwd.sm90.dkv.exchange import exchanged
from flexbwd.sm90.dkv.tile import DkvTile
from flexbwd.sm90.mods import ModConfig
from flexbwd.sm90.tile import WG_ROWS

_ATOMS = {64: warpgroup.SmemLayoutAtomKind.K_SW128, 32: warpgroup.SmemLayoutAtomKind.K_SW64}


def _row_major(dtype: Any, shape: tuple[int, ...]) -> Any:
    """Swizzled layout of rows (rows, columns[, stage])."""
    atom = warpgroup.make_smem_layout_atom(_ATOMS[math.gcd(shape[1], 64)], dtype)
    return cute.tile_to_shape(atom, shape, order=tuple(range(len(shape))))


@dataclass(frozen=True)
class Layouts:
    """Swizzled 16-bit layouts (rows, columns[, stage])."""

    k: Any  # (64, D)
    v: Any  # (64, Dv)
    q: Any  # (tile_m, D, stages)
    do: Any  # (tile_m, Dv, stages)

    @classmethod
    def of(cls, tile: DkvTile, dtype: Any) -> "Layouts":
        return cls(
            k=_row_major(dtype, (WG_ROWS, tile.dim)),
            v=_row_major(dtype, (WG_ROWS, tile.value_dim)),
            q=_row_major(dtype, (tile.tile_m, tile.dim, tile.q_stages)),
            do=_row_major(dtype, (tile.tile_m, tile.value_dim, tile.do_stages)),
        )


def storage_struct(tile: DkvTile, dtype: Any, mods: ModConfig) -> Any:
    """The struct to allocate; sizes are in elements."""
    barriers = 1 + 2 * (tile.q_stages + tile.do_stages)

    @cute.struct
    class Storage:
        bars: cute.struct.MemRange[cutlass.Int64, barriers]
        record: cute.struct.Align[cute.struct.MemRange[cutlass.Int32, 4 * tile.q_stages], 16]
        lse: cute.struct.Align[cute.struct.MemRange[cutlass.Float32, tile.tile_m * tile.q_stages], 128]
        delta: cute.struct.Align[cute.struct.MemRange[cutlass.Float32, tile.tile_m * tile.do_stages], 128]
        k: cute.struct.Align[cute.struct.MemRange[dtype, WG_ROWS * tile.dim], 1024]
        v: cute.struct.Align[cute.struct.MemRange[dtype, WG_ROWS * tile.value_dim], 1024]
        q: cute.struct.Align[cute.struct.MemRange[dtype, tile.tile_m * tile.dim * tile.q_stages], 1024]
        do: cute.struct.Align[cute.struct.MemRange[dtype, tile.tile_m * tile.value_dim * tile.do_stages], 1024]
        p: cute.struct.Align[cute.struct.MemRange[exchanged(mods), tile.tile_m * WG_ROWS * tile.p_stages], 128]

    return Storage


@dataclass(frozen=True)
class Smem:
    """The tensors over the storage."""

    k: Any
    v: Any
    q: Any
    do: Any
    record: Any  # (4, stages) int32
    lse: Any  # (tile_m, stages)
    delta: Any  # (tile_m, stages)
    p: Any  # (8, threads of a warpgroup, groups of 8 of a thread, stages)

    @classmethod
    def of(cls, storage: Any, tile: DkvTile, dtype: Any) -> "Smem":
        layouts = Layouts.of(tile, dtype)

        def swizzled(memory: Any, layout: Any) -> cute.Tensor:
            return memory.get_tensor(layout.outer, swizzle=layout.inner)

        return cls(
            k=swizzled(storage.k, layouts.k),
            v=swizzled(storage.v, layouts.v),
            q=swizzled(storage.q, layouts.q),
            do=swizzled(storage.do, layouts.do),
            record=storage.record.get_tensor(cute.make_layout((4, tile.q_stages))),
            lse=storage.lse.get_tensor(cute.make_layout((tile.tile_m, tile.q_stages))),
            delta=storage.delta.get_tensor(cute.make_layout((tile.tile_m, tile.do_stages))),
            p=storage.p.get_tensor(cute.make_layout((8, 128, tile.tile_m * WG_ROWS // 1024, tile.p_stages))),
        )
