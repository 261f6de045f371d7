"""Attention with linear biases."""

from __future__ import annotations

import torch
from torch import Tensor

from flexbwd.errors import ConfigError, ShapeError

from .signatures import ScoreMod


def alibi(heads: int) -> ScoreMod:
    """s' = s + slope_h · (j − i), slope_h = 2^(−8(h+1)/H).

    When H is no power of two: the slopes of the next smaller power, then every other slope of twice that power, as the
    paper does. Slopes are computed in the mod, so the mod serves every device. Meant for causal masks.
    Source: Train Short, Test Long (Press et al. 2021, arXiv:2108.12409), §3.
    """
    if heads < 1:
        raise ConfigError(f"{heads=} must be at least 1")
    power = 1 << (heads.bit_length() - 1)
    if power == heads:

        def alibi_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            return score + torch.exp2((h + 1) * (-8.0 / heads)) * (kv_idx - q_idx)

        return alibi_mod

    def alibi_interleaved_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        steps = torch.where(h < power, 2 * (h + 1), 2 * (h - power) + 1)
        return score + torch.exp2(steps * (-4.0 / power)) * (kv_idx - q_idx)

    return alibi_interleaved_mod


def alibi_learned(slopes: Tensor) -> ScoreMod:
    """s' = s + slopes[h] · (j − i).

    Args:
        slopes: `[H]`, may require grad.
    Source: Press et al. 2021 (arXiv:2108.12409), §3, where trained slopes are tried.
    """
    if slopes.ndim != 1:
        raise ShapeError(f"slopes has shape {tuple(slopes.shape)}, but must be [H]: one slope per query head")

    def alibi_learned_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score + slopes[h] * (kv_idx - q_idx)

    return alibi_learned_mod
