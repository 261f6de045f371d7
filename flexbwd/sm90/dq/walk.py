"""DqWalk: the forward's schedule and walk, as the roles of the dQ kernel ask for them."""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from flexbwd.sm90.dq.tile import DqTile
from flexbwd.sm90.schedule import GridSchedule, ListSchedule
from flexbwd.sm90.walk import BandWalk, ListWalk
from flexbwd.sm90.walks import WalkKind


@dataclass(frozen=True)
class Item:
    """A query tile of a query head."""

    m_block: Int32
    head: Int32
    batch: Int32


@dataclass(frozen=True)
class Runs:
    """Tiles of each kind that an item visits, in this order."""

    partial: Int32
    edge: Int32
    full: Int32

    @property
    def total(self) -> Int32:
        return self.partial + self.edge + self.full


@dataclass(frozen=True)
class DqWalk:
    kind: cutlass.Constexpr[WalkKind]
    schedule: Any  # GridSchedule, ListSchedule
    tiles: Any  # BandWalk, ListWalk
    heads: Int32  # query heads

    @classmethod
    def of(cls, kind: WalkKind, tile: DqTile, q: cute.Tensor, kv_len: Int32, detail: tuple) -> "DqWalk":
        """`q` (Sq, D, Hq, B). `detail`: (section,), for a band (section, lo, hi), or lists (order, counts, tiles)."""
        q_len, heads, batch = q.shape[0], q.shape[2], q.shape[3]
        rows = (q_len + (tile.tile_m - 1)) // tile.tile_m
        if kind.lists:
            order, counts, listed = detail
            return cls(kind, ListSchedule(order, rows, heads), ListWalk(counts, listed, q_len, kv_len), heads)
        lo, hi = detail[1:] if kind.band else (Int32(0), Int32(0))
        schedule = GridSchedule(kind.has_lo, rows, heads, batch, detail[0])
        band = BandWalk(tile.tile_m, tile.tile_n, kind.has_lo, kind.has_hi, q_len, kv_len, lo, hi)
        return cls(kind, schedule, band, heads)

    @property
    def q_len(self) -> Int32:
        return self.tiles.q_len

    @property
    def kv_len(self) -> Int32:
        return self.tiles.kv_len

    @property
    def items(self) -> Int32:
        return self.schedule.items()

    def item(self, index: Int32) -> Item:
        return Item(*self.schedule.item(index))

    def runs(self, item: Item) -> Runs:
        return Runs(*[cute.arch.make_warp_uniform(n) for n in self.tiles.runs(item.m_block, item.head, item.batch)])

    def tile(self, item: Item, i: Int32) -> Int32:
        """The i-th key tile; for the loader, which hands it to the other roles."""
        return self.tiles.tile(item.m_block, item.head, item.batch, i)
