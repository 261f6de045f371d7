"""A learned gate on the scores of each key."""

from __future__ import annotations

import torch
from torch import Tensor

from flexbwd.errors import ShapeError

from .signatures import ScoreMod


def sigmoid_gate(gate: Tensor) -> ScoreMod:
    """s' = s · σ(gate[h, j]).

    A shut gate makes every query indifferent to the key: its score is 0, not −∞.

    Args:
        gate: `[H, S]` logits, may require grad.
    Source: gated linear units (Dauphin et al. 2017, arXiv:1612.08083), the gate applied to scores.
    """
    if gate.ndim != 2:
        raise ShapeError(f"gate has shape {tuple(gate.shape)}, but must be [H, S]: a logit per head and key")

    def sigmoid_gate_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score * torch.sigmoid(gate[h, kv_idx])

    return sigmoid_gate_mod
