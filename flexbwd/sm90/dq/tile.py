"""DqTile: the tile sizes of one dQ kernel, and the table that picks them."""

from __future__ import annotations

from dataclasses import dataclass

from flexbwd.sm90.tile import QueryTile, padded_dim


@dataclass(frozen=True)
class DqTile(QueryTile):
    """Of the dQ kernel: Q (its place is taken by dQ at the end), dO, a K ring and a V ring."""

    tile_n: int = 64  # key rows per step
    k_stages: int = 2  # K tiles in flight: a tile is read by S and, half a step later, by dQ
    v_stages: int = 2  # V tiles in flight
    ordered: bool = True  # warpgroups take turns to issue S and dP

    @property
    def _held(self) -> int:
        stationary = self.tile_m * (self.dim + self.value_dim)
        return stationary + self.tile_n * (self.k_stages * self.dim + self.v_stages * self.value_dim)


def dq_tile(head_dim: int, value_dim: int) -> DqTile:
    """The tile for these (true) head dims. tile_m and tile_n divide 128: one block mask serves every head dim."""
    dim, dv = padded_dim(head_dim), padded_dim(value_dim)
    widest = max(dim, dv)
    if widest <= 64:
        return DqTile(dim, dv, tile_n=128, k_stages=4, v_stages=4)
    if widest <= 128:
        return DqTile(dim, dv, tile_n=128)
    if widest <= 192:
        return DqTile(dim, dv)
    return DqTile(dim, dv, v_stages=1)
