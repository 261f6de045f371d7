"""DkvConfig: what one compiled dK/dV kernel is static about; also its cache key."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from flexbwd.sm90.dkv.tile import DkvTile
from flexbwd.sm90.mods import NO_MODS, ModConfig
from flexbwd.sm90.walks import WalkKind


@dataclass(frozen=True)
class DkvConfig:
    tile: DkvTile
    dtype: torch.dtype
    walk: WalkKind = field(default_factory=WalkKind)
    grouped: bool = False  # more than one query head per key head
    want_dk: bool = True
    want_dv: bool = True
    mods: ModConfig = NO_MODS
