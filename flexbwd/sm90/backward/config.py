"""BwdConfig: what one compiled backward kernel is static about; also its cache key."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from flexbwd.sm90.backward.tile import BwdTile


@dataclass(frozen=True)
class BwdConfig:
    tile: BwdTile
    dtype: torch.dtype
    causal: bool = False
    grouped: bool = False  # more than one query head per key head
    want_dq: bool = True
    want_dk: bool = True
    want_dv: bool = True

    @property
    def want_ds(self) -> bool:
        return self.want_dq or self.want_dk
