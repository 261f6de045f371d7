"""Scalable softmax: sharper as the context grows."""

from __future__ import annotations

import torch
from torch import Tensor

from flexbwd.errors import ShapeError

from .signatures import ScoreMod


def ssmax(scale: Tensor) -> ScoreMod:
    """s' = scale[h] · ln(i + 1) · s.

    i + 1 is the number of keys that a causal query sees: softmax to the base of that number, to the power scale.

    Args:
        scale: `[H]`, may require grad.
    Source: Scalable-Softmax (Nakanishi 2025, arXiv:2501.19399).
    """
    if scale.ndim != 1:
        raise ShapeError(f"scale has shape {tuple(scale.shape)}, but must be [H]: one per query head")

    def ssmax_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return scale[h] * torch.log(q_idx + 1) * score

    return ssmax_mod
