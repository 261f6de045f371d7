"""FwdConfig: what one compiled forward kernel is static about; also its cache key."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from flexbwd.sm90.tile import FwdTile


@dataclass(frozen=True)
class FwdConfig:
    tile: FwdTile
    dtype: torch.dtype
    causal: bool = False
    prescale: bool = False  # multiply scores by scale before the maximum: needed when scale <= 0, and by score mods
