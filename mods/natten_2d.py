"""Neighbourhood attention on an image, tokens in raster order."""

from __future__ import annotations

import torch
from torch import Tensor

from flexbwd.errors import ConfigError

from .signatures import MaskMod


def natten_2d(canvas: tuple[int, int], kernel: tuple[int, int]) -> MaskMod:
    """keep |row_j − c_row| ≤ k_row // 2 and |col_j − c_col| ≤ k_col // 2; c is the query, clamped off the border.

    Every query sees exactly k_row · k_col keys: near a border the window is shifted inwards, not cut.

    Args:
        canvas: (rows, columns).  kernel: (rows, columns), odd, not larger than the canvas.
    Source: Neighborhood Attention Transformer (Hassani et al. 2023, arXiv:2204.07143).
    """
    if any(k % 2 == 0 or not 0 < k <= n for k, n in zip(kernel, canvas, strict=True)):
        raise ConfigError(f"{kernel=} must be odd and not larger than {canvas=}: the window has a middle and fits")
    (rows, cols), (half_row, half_col) = canvas, (kernel[0] // 2, kernel[1] // 2)

    def natten_2d_mask(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        centre_row = torch.clamp(q_idx // cols, half_row, rows - 1 - half_row)
        centre_col = torch.clamp(q_idx % cols, half_col, cols - 1 - half_col)
        down, right = kv_idx // cols - centre_row, kv_idx % cols - centre_col
        return (down >= -half_row) & (down <= half_row) & (right >= -half_col) & (right <= half_col)

    return natten_2d_mask
