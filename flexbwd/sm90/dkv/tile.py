"""DkvTile: the tile sizes of one dK/dV kernel, and the table that picks them."""

from __future__ import annotations

from dataclasses import dataclass

from flexbwd.errors import ConfigError
from flexbwd.sm90.tile import SMEM_BYTES, WG_ROWS, WG_THREADS, padded_dim

WGS = 2  # MMA warpgroups: one for dV, one for dK
THREADS = (1 + WGS) * WG_THREADS
_BARRIER_BYTES = 1024


@dataclass(frozen=True)
class DkvTile:
    """A cluster owns `tile_n` key rows of one key head, each CTA 64 of them, and walks query tiles of `tile_m` rows."""

    dim: int  # of q, k and dK, padded
    value_dim: int  # of v, dO and dV, padded
    tile_m: int = 64  # query rows per step
    q_stages: int = 2  # Q and LSE tiles in flight
    do_stages: int = 2  # dO and delta tiles in flight
    p_stages: int = 2  # tiles of P on their way from one warpgroup to the other
    cluster: int = 2  # CTAs that load Q and dO for each other; see dkv_tile

    def __post_init__(self) -> None:
        if self.tile_m not in (64, 128):
            raise ConfigError(f"{self.tile_m=} must be 64 or 128; change the tile table")
        if self.smem_bytes > SMEM_BYTES:
            raise ConfigError(
                f"{self} needs {self.smem_bytes} bytes of shared memory, above {SMEM_BYTES}; use fewer stages"
            )

    @property
    def tile_n(self) -> int:
        """Key rows per cluster. 64 per CTA: both accumulators of 64 x 256 fill half of a warpgroup's registers each."""
        return WG_ROWS * self.cluster

    @property
    def smem_bytes(self) -> int:
        stationary = 2 * WG_ROWS * (self.dim + self.value_dim)
        rings = 2 * self.tile_m * (self.q_stages * self.dim + self.do_stages * self.value_dim)
        stats = 4 * self.tile_m * (self.q_stages + self.do_stages)
        weights = 2 * self.tile_m * WG_ROWS * self.p_stages
        return stationary + rings + stats + weights + _BARRIER_BYTES


def dkv_tile(head_dim: int, value_dim: int) -> DkvTile:
    """The tile for these (true) head dims.

    Clusters do not pay: L2 is not the limit. One H200, B2 S8192, alone (cluster 1 / 2), ms: D256 H8 dense 3.36 / 3.41,
    causal 1.79 / 1.86; D192 H10 causal 1.44 / 1.80. They stay until kernels without them have run with lists and mods.
    """
    dim, dv = padded_dim(head_dim), padded_dim(value_dim)
    if max(dim, dv) <= 192:
        return DkvTile(dim, dv, q_stages=3)
    return DkvTile(dim, dv)
