"""FwdConfig: what one compiled forward kernel is static about; also its cache key."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from flexbwd.sm90.mods import NO_MODS, ModConfig
from flexbwd.sm90.tile import FwdTile
from flexbwd.sm90.walks import WalkKind

_DENSE = WalkKind()


@dataclass(frozen=True)
class FwdConfig:
    tile: FwdTile
    dtype: torch.dtype
    walk: WalkKind = _DENSE
    mods: ModConfig = NO_MODS
    prescale: bool = False  # multiply scores by scale before the maximum: needed when scale <= 0
    want_max: bool = False  # write row maxima

    @property
    def scaled(self) -> bool:
        """Scores come to the softmax multiplied by scale * log2(e)."""
        return self.prescale or self.mods.has_score

    @property
    def exact(self) -> bool:
        """The softmax subtracts the row's maximum itself, not one that may lie a little lower."""
        return self.want_max or not self.tile.lazy

    @property
    def may_kill(self) -> bool:
        """Scores of a full tile may be -inf, so that a row may have kept nothing so far."""
        return self.mods.has_score or self.mods.has_keep
