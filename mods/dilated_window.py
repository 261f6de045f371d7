"""Window with gaps."""

from __future__ import annotations

import torch
from torch import Tensor

from flexbwd.errors import ConfigError

from .signatures import MaskMod


def dilated_window(radius: int, dilation: int) -> MaskMod:
    """keep |i − j| ≤ radius and |i − j| mod dilation = 0.

    `radius` is in tokens, so a query sees 2·(radius // dilation) + 1 keys.
    Source: Longformer (Beltagy et al. 2020, arXiv:2004.05150), §3.1, dilated sliding window.
    """
    if radius < 0 or dilation < 1:
        raise ConfigError(f"{radius=} must be at least 0 and {dilation=} at least 1")

    def dilated_window_mask(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        distance = torch.abs(q_idx - kv_idx)
        return (distance <= radius) & (distance % dilation == 0)

    return dilated_window_mask
