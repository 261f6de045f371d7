"""Sliding tile attention on video, tokens in tile order."""

from __future__ import annotations

import torch
from torch import Tensor

from flexbwd.errors import ConfigError

from .signatures import MaskMod

Extent = tuple[int, int, int]  # time, height, width


def sta(canvas: Extent, kernel: Extent, tile: Extent, text: int = 0) -> MaskMod:
    """keep −⌊k/2⌋ ≤ tile_j − c ≤ ⌈k/2⌉ − 1 on all three axes; c is the query's tile, clamped off the border.

    Whole tiles are kept or dropped, so tiles as long as a mask block leave no partial block. `text` tokens after the
    video see all and are seen by all. Tokens lie tile by tile, tiles in raster order.

    Args:
        canvas, kernel, tile: (time, height, width) in tokens; tile divides canvas and kernel, kernel fits the canvas.
    Source: Sliding Tile Attention (Zhang et al. 2025, arXiv:2502.04507).
    """
    for n, k, t in zip(canvas, kernel, tile, strict=True):
        if n % t or k % t or not t <= k <= n:
            raise ConfigError(f"{tile=} must divide {canvas=} and {kernel=}, and the kernel must fit the canvas")
    tiles = tuple(n // t for n, t in zip(canvas, tile, strict=True))
    spans = tuple(k // t for k, t in zip(kernel, tile, strict=True))
    tile_length, video = tile[0] * tile[1] * tile[2], canvas[0] * canvas[1] * canvas[2]

    def tile_of(idx: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        number = idx // tile_length
        return number // (tiles[1] * tiles[2]), number // tiles[2] % tiles[1], number % tiles[2]

    def sta_mask(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        near = (q_idx < video) & (kv_idx < video)
        for query_tile, key_tile, count, span in zip(tile_of(q_idx), tile_of(kv_idx), tiles, spans, strict=True):
            before, after = span // 2, span - span // 2 - 1
            shift = key_tile - torch.clamp(query_tile, before, count - 1 - after)
            near = near & (shift >= -before) & (shift <= after)
        reads_text = (kv_idx >= video) & (kv_idx < video + text)
        is_text = (q_idx >= video) & (kv_idx < video + text)
        return near | reads_text | is_text

    return sta_mask
