"""BwdTile: the tile sizes of one backward kernel, and the table that picks them."""

from __future__ import annotations

from dataclasses import dataclass

from flexbwd.errors import ConfigError
from flexbwd.sm90.tile import SMEM_BYTES, padded_dim

WGS = 2  # MMA warpgroups
WG_THREADS = 128
MMA_THREADS = WGS * WG_THREADS
_BARRIER_BYTES = 1024


@dataclass(frozen=True)
class BwdTile:
    """One CTA owns `tile_n` key rows of one key head and walks query tiles of `tile_m` rows.

    The two MMA warpgroups share a tile in one of two ways:
      tile_n = 128   by keys: each has 64 key rows of S and dP (swapped: K·Qᵀ, V·dOᵀ) and of dK, dV. P and dS stay in
                     registers as A operands of dV and dK; only dS goes to shared memory, for dQ. D up to 128.
      tile_n = 64    by dims: each has half the queries of S and dP, and half the head dim of dK, dV and dQ; P and dS
                     both go through shared memory. D up to 256.
    """

    dim: int  # of q and k, padded
    value_dim: int  # of v and dO, padded
    tile_m: int = 64  # query rows per step
    tile_n: int = 128  # key rows held by one CTA
    q_stages: int = 2  # Q and LSE tiles in flight
    do_stages: int = 2  # dO and delta tiles in flight
    ds_stages: int = 2  # P / dS buffers: with 2, one barrier a step

    def __post_init__(self) -> None:
        if self.tile_n not in (64, 128):
            raise ConfigError(f"{self.tile_n=} must be 64 or 128, what two warpgroups can share; change the tile table")
        if self.tile_m not in (64, 128) or (self.tile_n == 64 and self.tile_m != 64):
            raise ConfigError(f"{self.tile_m=} must be 64, or 128 with tile_n=128; change the tile table")
        if self.smem_bytes > SMEM_BYTES:
            raise ConfigError(
                f"{self} needs {self.smem_bytes} bytes of shared memory, above {SMEM_BYTES}; use fewer stages"
            )

    @property
    def by_keys(self) -> bool:
        return self.tile_n == 128

    @property
    def dq_wg_rows(self) -> int:
        """Query rows of a warpgroup's share of dQ; with all of them it has half the columns."""
        return 64

    @property
    def dq_wg_dim(self) -> int:
        """Columns of a warpgroup's share of dQ."""
        return self.dim if self.tile_m == 128 else self.dim // WGS

    @property
    def dq_wg_floats(self) -> int:
        """Size of a warpgroup's share of one dQ tile."""
        return self.dq_wg_rows * self.dq_wg_dim

    @property
    def smem_bytes(self) -> int:
        stationary = 2 * self.tile_n * (self.dim + self.value_dim)
        rings = 2 * self.tile_m * (self.q_stages * self.dim + self.do_stages * self.value_dim)
        stats = 4 * self.tile_m * (self.q_stages + self.do_stages)
        weights = 2 * self.tile_m * self.tile_n * self.ds_stages * (1 if self.by_keys else 2)
        return stationary + rings + stats + weights + 4 * self.tile_m * self.dim + _BARRIER_BYTES


def backward_tile(head_dim: int, value_dim: int, roomy: bool = False) -> BwdTile:
    """The tile for these (true) head dims.

    `roomy`: more is kept beside P than 128 queries a step leave registers for, as ∂s'/∂s depends on the score
    (softcap), or captured tensors get gradients.
    """
    dim, dv = padded_dim(head_dim), padded_dim(value_dim)
    widest = max(dim, dv)
    if widest <= 64:
        return BwdTile(dim, dv, tile_m=64 if roomy else 128)
    if widest <= 128:
        return BwdTile(dim, dv)
    if widest <= 192:
        return BwdTile(dim, dv, tile_n=64, ds_stages=1)
    if widest <= 224:
        return BwdTile(dim, dv, tile_n=64, do_stages=1, ds_stages=1)
    return BwdTile(dim, dv, tile_n=64, q_stages=1, do_stages=1, ds_stages=1)
