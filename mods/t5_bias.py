"""T5's bucketed relative position bias."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from flexbwd.errors import ConfigError, ShapeError

from .signatures import ScoreMod


def t5_bias(table: Tensor, bidirectional: bool = True, max_distance: int = 128) -> ScoreMod:
    """s' = s + table[h, bucket(j − i)].

    Half of the buckets hold one distance each, the others grow logarithmically up to `max_distance`. Bidirectional:
    one half of all buckets is for keys after the query. Causal: all keys after it share bucket 0.

    Args:
        table: `[H, buckets]`, may require grad.
    Source: T5 (Raffel et al. 2020, arXiv:1910.10683), §2.1.
    """
    if table.ndim != 2:
        raise ShapeError(f"table has shape {tuple(table.shape)}, but must be [H, buckets]")
    buckets = t5_buckets(table.shape[1], bidirectional, max_distance).to(table.device)

    def t5_bias_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        shift = torch.clamp(kv_idx - q_idx, -max_distance, max_distance)
        return score + table[h, buckets[shift + max_distance]]

    return t5_bias_mod


def t5_buckets(buckets: int, bidirectional: bool, max_distance: int) -> Tensor:
    """The bucket of every shift j − i from −max_distance to max_distance, int32; beyond, the ends repeat.

    Looked up instead of computed per element: a logarithm next to a bucket's edge would fall to either side of it,
    depending on precision. Rounding is that of the fp32 formula that T5 checkpoints were trained with.
    """
    side = buckets // 2 if bidirectional else buckets
    exact = side // 2
    if exact < 1 or max_distance <= exact:
        raise ConfigError(f"{buckets=} leave {exact} exact distances of {max_distance=}: need at least 1, and fewer "
                          "than max_distance")  # fmt: skip
    shift = torch.arange(-max_distance, max_distance + 1)
    distance = shift.abs() if bidirectional else (-shift).clamp(min=0)
    steps = torch.log(distance.clamp(min=1).to(torch.float32) / exact) / math.log(max_distance / exact)
    coarse = (exact + (steps * (side - exact)).to(torch.int64)).clamp(max=side - 1)
    bucket = torch.where(distance < exact, distance, coarse)
    if bidirectional:
        bucket = bucket + torch.where(shift > 0, side, 0)
    return bucket.to(torch.int32)
