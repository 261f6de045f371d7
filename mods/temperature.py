"""A temperature of the softmax per head."""

from __future__ import annotations

from torch import Tensor

from flexbwd.errors import ShapeError

from .signatures import ScoreMod


def head_temperature(temperature: Tensor) -> ScoreMod:
    """s' = s / temperature[h].

    Args:
        temperature: `[H]`, not 0, may require grad.
    Source: Swin Transformer V2 (Liu et al. 2021, arXiv:2111.09883), a learned temperature per head.
    """
    if temperature.ndim != 1:
        raise ShapeError(f"temperature has shape {tuple(temperature.shape)}, but must be [H]: one per query head")

    def head_temperature_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score / temperature[h]

    return head_temperature_mod
