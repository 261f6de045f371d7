"""BwdWalk: which query tiles a key tile visits, in runs that are static about their kind.

    m:   m_begin ... m_full-1 | m_full ... m_end-1
             edge tiles       |     full tiles

A full tile is compared with nothing; an edge tile with the ragged end of the keys and, when causal, with the
diagonal. Ragged queries need no compare: their LSE is +inf, so that P = 0. Block lists will be a second kind of
walk with the same method.
"""

from dataclasses import dataclass

import cutlass
from cutlass import Int32


@dataclass(frozen=True)
class BwdWalk:
    """Tiles of the dense or causal (keep i >= j) score matrix, for the key tile `n_block`."""

    tile_m: cutlass.Constexpr[int]
    tile_n: cutlass.Constexpr[int]
    causal: cutlass.Constexpr[bool]
    q_len: Int32
    kv_len: Int32

    def runs(self, n_block: Int32) -> tuple[Int32, Int32, Int32]:
        """(m_begin, m_full, m_end); m_begin = m_end when no query sees these keys."""
        first_key = n_block * self.tile_n
        m_end = (self.q_len + (self.tile_m - 1)) // self.tile_m
        m_begin, m_full = Int32(0), Int32(0)
        if self.causal:
            m_begin = cutlass.min(m_end, first_key // self.tile_m)
            m_full = cutlass.min(m_end, (first_key + (self.tile_n + self.tile_m - 2)) // self.tile_m)
        ragged = first_key + self.tile_n > self.kv_len
        m_full = cutlass.select_(ragged, m_end, m_full)
        return m_begin, m_full, m_end


def work_item(index: Int32, n_blocks: Int32, heads: Int32, section: Int32) -> tuple[Int32, Int32]:
    """(n_block, head) of a CTA: sections of heads in turn; inside one, key tiles in order, heads side by side."""
    number = index // (section * n_blocks)
    rest = index - number * (section * n_blocks)
    first = number * section
    here = cutlass.min(section, heads - first)
    n_block = rest // here
    return n_block, first + rest - n_block * here
