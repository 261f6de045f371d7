"""DeltaConfig and ConvertConfig: what the kernels around the backward are static about; also their cache keys.

Apart from the kernels, so that a process that finds these on disk does not import the DSL.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

ROW_WIDTH = 8  # 16-bit elements of a 16-byte load


@dataclass(frozen=True)
class DeltaConfig:
    dtype: torch.dtype
    value_dim: int  # true
    tile_m: int  # rows per CTA
    dq_floats: int  # of one tile's accumulator; 0: none to clear
    has_grad_lse: bool

    @property
    def row_threads(self) -> int:
        """Power of two, at most a warp, that covers a row in as few loads as possible."""
        threads = 1
        while threads < 32 and threads * ROW_WIDTH < self.value_dim:
            threads *= 2
        return threads


@dataclass(frozen=True)
class ConvertConfig:
    dtype: torch.dtype
    tile_m: int
    dim: int  # padded
    wg_dim: int  # columns of a warpgroup's share

    @property
    def floats(self) -> int:
        return self.tile_m * self.dim
