"""Shared memory of the forward kernel.

bars   q full[wgs] | q empty[wgs] | k full[stages] | k empty | v full | v empty
tiles  number of the key tile in each K buffer
work   work item of each warpgroup
q      per warpgroup 64 x D
k, v   rings of tile_n x D and tile_n x Dv
"""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass.tensor_utils import LayoutEnum
from cutlass.utils import hopper_helpers

from flexbwd.sm90.forward.roles import WORK
from flexbwd.sm90.tile import WG_ROWS, FwdTile


@dataclass(frozen=True)
class Layouts:
    """Swizzled shared-memory layouts, each with a last mode of buffers."""

    q: Any  # (64, D, 1), one warpgroup's
    k: Any  # (tile_n, D, stages)
    v: Any  # (Dv, tile_n, stages), Dv contiguous


def smem_layouts(tile: FwdTile, dtype: Any) -> Layouts:
    row, col = LayoutEnum.ROW_MAJOR, LayoutEnum.COL_MAJOR
    return Layouts(
        q=hopper_helpers.make_smem_layout_a(row, (WG_ROWS, tile.tile_n, tile.dim), dtype, 1),
        k=hopper_helpers.make_smem_layout_b(row, (WG_ROWS, tile.tile_n, tile.dim), dtype, tile.stages),
        v=hopper_helpers.make_smem_layout_b(col, (WG_ROWS, tile.value_dim, tile.tile_n), dtype, tile.stages),
    )


def storage_struct(tile: FwdTile, dtype: Any) -> Any:
    """The struct to allocate; sizes are in elements."""
    bar_count = 2 * tile.wgs + 4 * tile.stages
    q_size = tile.tile_m * tile.dim
    k_size = tile.stages * tile.tile_n * tile.dim
    v_size = tile.stages * tile.tile_n * tile.value_dim

    @cute.struct
    class Storage:
        bars: cute.struct.MemRange[cutlass.Int64, bar_count]
        tiles: cute.struct.MemRange[cutlass.Int32, tile.stages]
        work: cute.struct.Align[cute.struct.MemRange[cutlass.Int32, tile.wgs * WORK], 16]
        q: cute.struct.Align[cute.struct.MemRange[dtype, q_size], 1024]
        k: cute.struct.Align[cute.struct.MemRange[dtype, k_size], 1024]
        v: cute.struct.Align[cute.struct.MemRange[dtype, v_size], 1024]

    return Storage


def warpgroup_tile(tile: FwdTile, memory: Any, layout: Any, dtype: Any, wg: Any) -> cute.Tensor:
    """Warpgroup `wg`'s own Q tile."""
    size = WG_ROWS * tile.dim
    start = memory.data_ptr() + (wg * size if isinstance(wg, int) else cute.assume(wg * size, divby=size))
    return cute.make_tensor(cute.recast_ptr(start, layout.inner, dtype), layout.outer)


def swizzled(memory: Any, layout: Any) -> cute.Tensor:
    """A tensor of `layout` over a memory range."""
    return memory.get_tensor(layout.outer, swizzle=layout.inner)
