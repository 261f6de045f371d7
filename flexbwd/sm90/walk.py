"""Walk: which key tiles a query tile visits, in runs that are static about their kind.

    n:   0 ........ n_full-1 | n_full ...... n_end-1
              full tiles     |     edge tiles            visited from the right: edges first, then full tiles

A full tile is compared with nothing; an edge tile with the ragged end of the keys and, when causal, with the
diagonal. The first tile
of a walk always goes through the edge body. Block lists will be a second kind of walk with the same two methods.
"""

from dataclasses import dataclass

import cutlass
from cutlass import Int32


@dataclass(frozen=True)
class Walk:
    """Tiles of the dense or causal (keep i >= j) score matrix."""

    tile_m: cutlass.Constexpr[int]
    tile_n: cutlass.Constexpr[int]
    causal: cutlass.Constexpr[bool]
    q_len: Int32
    kv_len: Int32

    def ends(self, m_block: Int32) -> tuple[Int32, Int32]:
        """(n_full, n_end) of a query tile: tiles [0, n_full) are full, [n_full, n_end) edges."""
        n_end = (self.kv_len + (self.tile_n - 1)) // self.tile_n
        n_full = self.kv_len // self.tile_n
        if self.causal:
            first_row = m_block * self.tile_m
            past_row = cutlass.min(first_row + self.tile_m, self.q_len)  # keys below it are seen by some row
            n_end = cutlass.min(n_end, (past_row + (self.tile_n - 1)) // self.tile_n)
            n_full = cutlass.min(n_full, (first_row + 1) // self.tile_n)  # keys of these are seen by every row
        return n_full, n_end
