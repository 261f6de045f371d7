"""TileLists: block lists at the granularity of one kernel's tiles."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class TileLists(NamedTuple):
    """The tiles that every row of tiles visits, int32; a broadcast batch or head has size 1.

    Forward and dQ: a row is a query tile, its entries key tiles. Backward: a row is a key tile, its entries query tiles.
    """

    counts: Tensor  # [B|1, H|1, rows, 4] = (n_partial, n_edge, n_full, 0); 16-byte aligned
    tiles: Tensor  # [B|1, H|1, rows, max]: partial, then edge, then full; entries past the counts mean nothing
    order: Tensor  # [B * H * rows] work items (batch * H + head) * rows + row, longest first; H: heads of the rows
