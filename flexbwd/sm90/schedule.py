"""Schedules: the order in which work items (tiles of rows of all heads) are handed out, and who gets the next.

A section is as many heads as keep their K and V in L2 together. Uneven work goes longest first inside a section, so
that the short items fill the end. CTAs draw tickets: CTA c begins with item c, and whoever is done takes the next.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32


@dataclass(frozen=True)
class GridSchedule:
    """index -> section of heads -> row -> head within the section; `batch` x `heads` heads of `rows` items each."""

    last_first: cutlass.Constexpr[bool]  # rows from the last to the first: longest first where row r sees keys up to r
    rows: Int32
    heads: Int32
    batch: Int32
    section: Int32  # heads

    def items(self) -> Int32:
        return self.rows * self.heads * self.batch

    def item(self, index: Int32) -> tuple[Int32, Int32, Int32]:
        """(row, head, batch) of a work index."""
        per_section = self.section * self.rows
        section = index // per_section
        rest = index - section * per_section
        first_head = section * self.section
        here = cutlass.min(self.section, self.heads * self.batch - first_head)
        row = rest // here
        head = first_head + (rest - row * here)
        if self.last_first:
            row = self.rows - 1 - row
        batch = head // self.heads
        return row, head - batch * self.heads, batch


@dataclass(frozen=True)
class ListSchedule:
    """The order that came with the lists: (batch * heads + head) * rows + row, longest first."""

    order: cute.Tensor  # int32 [items]
    rows: Int32
    heads: Int32

    def items(self) -> Int32:
        return self.order.shape[0]

    def item(self, index: Int32) -> tuple[Int32, Int32, Int32]:
        item = self.order[index]
        head = item // self.rows
        batch = head // self.heads
        return item - head * self.rows, head - batch * self.heads, batch


@dataclass(frozen=True)
class Tickets:
    """Hands out work indices: one counter in global memory, 0 before and after a launch.

    Each CTA draws until it draws a blank, so `items` tickets are drawn in all (items - ctas hits, ctas blanks): who
    drew the last puts the counter back. Launches that can run at the same time must not share a counter.
    """

    counter: cute.Tensor  # int32 [1]
    items: Int32
    ctas: Int32

    @cute.jit
    def draw(self) -> Int32:
        """The next work index, the same in all lanes of the calling warp; a blank is >= items."""
        ticket = Int32(0)
        if cute.arch.lane_idx() == 0:
            ticket = cute.arch.atomic_add(self.counter.iterator, Int32(1), sem="relaxed", scope="gpu")
        return self.ctas + cute.arch.shuffle_sync(ticket, 0)

    @cute.jit
    def put_back(self, blank: Int32):
        """After the blank, by the warp that drew."""
        if (blank == self.ctas + self.items - 1) & (cute.arch.lane_idx() == 0):
            self.counter[0] = Int32(0)
