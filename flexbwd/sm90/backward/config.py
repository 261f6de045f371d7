"""BwdConfig: what one compiled backward kernel is static about; also its cache key."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from flexbwd.sm90.backward.tile import BwdTile
from flexbwd.sm90.mods import NO_MODS, ModConfig
from flexbwd.sm90.walks import DENSE, WalkKind


@dataclass(frozen=True)
class BwdConfig:
    tile: BwdTile
    dtype: torch.dtype
    walk: WalkKind = DENSE
    grouped: bool = False  # more than one query head per key head
    want_dq: bool = True
    want_dk: bool = True
    want_dv: bool = True
    mods: ModConfig = NO_MODS
    want_captures: bool = False  # gradients of captured tensors

    @property
    def want_ds(self) -> bool:
        return self.want_dq or self.want_dk or self.want_captures


def trained_slots(mods: ModConfig) -> list[int]:
    """Load slots of the captured tensors that can get a gradient; the kernel's targets come in this order."""
    return [] if mods.graph is None else sorted({s.slot for s in mods.graph.sites})
