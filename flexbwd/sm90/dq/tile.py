"""DqTile: the tile sizes of one dQ kernel, and the table that picks them."""

from __future__ import annotations

from dataclasses import dataclass

from flexbwd.errors import ConfigError
from flexbwd.sm90.tile import SMEM_BYTES, WG_ROWS, WG_THREADS, padded_dim

_BARRIER_BYTES = 1024
_REGISTERS = {2: (24, 240), 3: (32, 160)}  # (loader, MMA) per thread after setmaxnreg, by MMA warpgroups


@dataclass(frozen=True)
class DqTile:
    """One CTA owns `wgs` x 64 query rows of one head and walks key tiles of `tile_n` rows."""

    dim: int  # of q, k and dQ, padded
    value_dim: int  # of v and dO, padded
    wgs: int = 2  # MMA warpgroups
    tile_n: int = 64  # key rows per step
    k_stages: int = 2  # K tiles in flight: a tile is read by S and, half a step later, by dQ
    v_stages: int = 2  # V tiles in flight
    ordered: bool = True  # warpgroups take turns to issue S and dP

    def __post_init__(self) -> None:
        if self.wgs not in _REGISTERS:
            raise ConfigError(f"{self.wgs=} must be 2 or 3: registers are handed out for these; change the tile table")
        if self.tile_n % 16 or not 16 <= self.tile_n <= 256:
            raise ConfigError(
                f"{self.tile_n=} must be a multiple of 16 up to 256, a wgmma's K and N; change the tile table"
            )
        if self.smem_bytes > SMEM_BYTES:
            raise ConfigError(
                f"{self} needs {self.smem_bytes} bytes of shared memory, above {SMEM_BYTES}; use fewer stages"
            )

    @property
    def tile_m(self) -> int:
        """Query rows per CTA."""
        return self.wgs * WG_ROWS

    @property
    def threads(self) -> int:
        """One loader warpgroup and the MMA warpgroups."""
        return (self.wgs + 1) * WG_THREADS

    @property
    def loader_registers(self) -> int:
        return _REGISTERS[self.wgs][0]

    @property
    def mma_registers(self) -> int:
        return _REGISTERS[self.wgs][1]

    @property
    def smem_bytes(self) -> int:
        """Q (its place is taken by dQ at the end), dO, the K ring, the V ring and the barriers; all 16-bit."""
        stationary = self.tile_m * (self.dim + self.value_dim)
        rings = self.tile_n * (self.k_stages * self.dim + self.v_stages * self.value_dim)
        return 2 * (stationary + rings) + _BARRIER_BYTES


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
