"""FwdTile: the tile sizes of one forward kernel, and the table that picks them."""

from __future__ import annotations

from dataclasses import dataclass

from flexbwd.errors import ConfigError
from flexbwd.sm90.walks import WalkKind

SMEM_BYTES = 232448  # what one CTA may have on SM90
WG_ROWS = 64  # rows of a wgmma, and of a warpgroup's score tile
WG_THREADS = 128
_BARRIER_BYTES = 1024
_DENSE = WalkKind()
_L2_BYTES = 32 << 20  # of 50 MiB on H200: what K and V of one section of heads may take
_REGISTERS = {2: (24, 240), 3: (32, 160)}  # (producer, MMA) per thread after setmaxnreg, by MMA warpgroups


def padded_dim(dim: int) -> int:
    """A head dim as held in shared memory: TMA fills what lies beyond the tensor with zeros."""
    return max(32, -(-dim // 32) * 32)


def heads_in_l2(kv_len: int, head_dim: int, value_dim: int) -> int:
    """Key heads whose K and V (16-bit) stay in L2 together. Uneven work items of that many heads are handed out longest
    first. H200, causal D128 B2 S8192 H16: 8 heads 0.84 ms, 4 and 16 heads 0.91, 1 head 0.99."""
    return max(1, _L2_BYTES // max(1, 2 * kv_len * (head_dim + value_dim)))


@dataclass(frozen=True)
class QueryTile:
    """Tile sizes of a kernel whose CTA owns `wgs` x 64 query rows of one head and walks key tiles of `tile_n` rows."""

    dim: int  # of q and k, padded
    value_dim: int  # of v, and out or dO, padded
    wgs: int = 2  # MMA warpgroups
    tile_n: int = 128  # key rows per step

    def __post_init__(self) -> None:
        if self.wgs not in _REGISTERS:
            raise ConfigError(f"{self.wgs=} must be 2 or 3: registers are handed out for these; change the tile table")
        if self.tile_n % 16 or not 16 <= self.tile_n <= 256:
            raise ConfigError(
                f"{self.tile_n=} must be a multiple of 16 up to 256, a wgmma's K and N; change the tile table"
            )
        if self.smem_bytes > SMEM_BYTES:
            raise ConfigError(
                f"{self} needs {self.smem_bytes} bytes of shared memory, above {SMEM_BYTES}; use smaller tiles"
            )

    @property
    def tile_m(self) -> int:
        """Query rows per CTA."""
        return self.wgs * WG_ROWS

    @property
    def threads(self) -> int:
        """One producer warpgroup and the MMA warpgroups."""
        return (self.wgs + 1) * WG_THREADS

    @property
    def producer_registers(self) -> int:
        return _REGISTERS[self.wgs][0]

    @property
    def mma_registers(self) -> int:
        return _REGISTERS[self.wgs][1]

    @property
    def smem_bytes(self) -> int:
        """Shared memory of a CTA."""
        return 2 * self._held + _BARRIER_BYTES

    @property
    def _held(self) -> int:
        """16-bit elements in shared memory."""
        raise NotImplementedError


@dataclass(frozen=True)
class FwdTile(QueryTile):
    """Of the forward kernel: Q, a K ring and a V ring."""

    stages: int = 2  # K and V tiles in flight, each
    ordered: bool = True  # warpgroups take turns on the tensor cores: one multiplies while the others exponentiate
    lazy: bool = True  # O is rescaled only when the maximum has grown a lot (softmax.py)

    @property
    def _held(self) -> int:
        return self.tile_m * self.dim + self.stages * self.tile_n * (self.dim + self.value_dim)


def forward_tile(head_dim: int, value_dim: int, walk: WalkKind = _DENSE, based: bool = False) -> FwdTile:
    """The tile for these (true) head dims. Tiles of listed walks divide 128: one block mask serves all head dims. So do
    those of mods with an IndexBase (`based`): no tile has rows or columns of two blocks.

    Time over FlashAttention-4's on one H200, bf16, S8192, before the persistent kernel: D64 dense, 5 stages 1.00
    (2: 1.04, 4: 1.09), causal 2 stages 1.02 (4: 1.09); D128 dense, tile_n 128 and 3 stages 1.02 (2: 1.03; tile_n 112:
    1.31, 160: 1.18, 176: 1.21); D256 tile_n 64 1.25. Since then, over this table: D64 dense lazy 1.02; D128 not lazy
    dense 1.11, causal 1.04; D256 not lazy 1.06, not ordered 1.12.
    """
    dim, dv = padded_dim(head_dim), padded_dim(value_dim)
    widest, blocked = max(dim, dv), walk.lists or based
    if widest <= 64:
        if blocked:
            return FwdTile(dim, dv, wgs=2, tile_n=128, stages=2)
        return FwdTile(dim, dv, wgs=3, tile_n=128, stages=2 if walk.band else 5, lazy=False)
    if widest <= 128:
        return FwdTile(dim, dv, tile_n=128, stages=3)
    if blocked:
        return FwdTile(dim, dv, tile_n=64, stages=3 if widest <= 192 else 2)
    if widest <= 192:
        return FwdTile(dim, dv, tile_n=112 if dim == dv else 96)
    return FwdTile(dim, dv, tile_n=80 if dim == dv else 64)
