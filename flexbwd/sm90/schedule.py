"""Schedule: the order in which work items (query tiles of all heads) are handed to CTAs.

    index -> section of heads -> m_block -> head within the section

A section is as many heads as keep their K and V in L2 together. Causal work goes longest first inside a section, so
that the short
items fill the end. With fewer CTAs than items a CTA takes every grid-th item (persistent), longest-first work in a
snake (every second
round backwards) so that no CTA gets the longer item of every round; with as many CTAs the hardware hands the items out.
"""

from dataclasses import dataclass

import cutlass
from cutlass import Int32


@dataclass(frozen=True)
class Schedule:
    """`heads` x `batch` heads of `m_blocks` items; `section` heads share L2."""

    longest_first: cutlass.Constexpr[bool]
    m_blocks: Int32
    heads: Int32
    batch: Int32
    section: Int32
    ctas: Int32  # the grid

    def items(self) -> Int32:
        return self.m_blocks * self.heads * self.batch

    def item(self, index: Int32) -> tuple[Int32, Int32, Int32]:
        """(m_block, head, batch) of a work index."""
        if self.longest_first:
            index = self._snake(index)
        per_section = self.section * self.m_blocks
        section = index // per_section
        rest = index - section * per_section
        first_head = section * self.section
        here = cutlass.min(self.section, self.heads * self.batch - first_head)
        m_block = rest // here
        head = first_head + (rest - m_block * here)
        if self.longest_first:
            m_block = self.m_blocks - 1 - m_block
        batch = head // self.heads
        return m_block, head - batch * self.heads, batch

    def _snake(self, index: Int32) -> Int32:
        """The index in the snake: a whole odd round runs backwards."""
        lap = index // self.ctas
        start = lap * self.ctas
        whole = cutlass.min(self.items() // (start + self.ctas), 1)
        backwards = (lap & 1) * whole
        place = index - start
        return start + place + backwards * (self.ctas - 1 - 2 * place)
