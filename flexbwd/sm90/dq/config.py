"""DqConfig: what one compiled dQ kernel is static about; also its cache key."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from flexbwd.sm90.dq.tile import DqTile
from flexbwd.sm90.mods import NO_MODS, ModConfig
from flexbwd.sm90.walks import WalkKind


@dataclass(frozen=True)
class DqConfig:
    tile: DqTile
    dtype: torch.dtype
    walk: WalkKind = field(default_factory=WalkKind)
    mods: ModConfig = NO_MODS
