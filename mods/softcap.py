"""Soft cap of the scores."""

from __future__ import annotations

import torch
from torch import Tensor

from flexbwd.errors import ConfigError

from .signatures import ScoreMod


def softcap(cap: float) -> ScoreMod:
    """s' = cap · tanh(s / cap).

    Derivative 1 − tanh²(s / cap).
    Source: Gemma 2 (Gemma Team 2024, arXiv:2408.00118), §2, logit soft-capping.
    """
    if not cap > 0:
        raise ConfigError(f"{cap=} must be positive: scores end between −cap and cap")

    def softcap_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return cap * torch.tanh(score / cap)

    return softcap_mod
