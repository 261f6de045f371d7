"""Sandwich: the position-position term of sinusoidal embeddings as a bias."""

from __future__ import annotations

import torch
from torch import Tensor

from flexbwd.errors import ConfigError

from .signatures import ScoreMod


def sandwich(heads: int, length: int, width: int = 128, device: torch.device | str = "cpu") -> ScoreMod:
    """s' = s + H / (8(h+1)) · Σ_n cos((i − j) · 10000^(−2n / width)), n < width / 2.

    The sum is a table over i − j, made once in fp64.

    Args:
        length: the longest sequence.  width: of the embedding that the term comes from; even.
    Source: Dissecting Transformer Length Extrapolation (Chi et al. 2022, arXiv:2212.10356).
    """
    if heads < 1 or length < 1 or width < 2 or width % 2:
        raise ConfigError(f"{heads=} and {length=} must be at least 1, {width=} even and at least 2")
    frequencies = 10000.0 ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    distances = torch.arange(1 - length, length, dtype=torch.float64)
    table = torch.cos(distances[:, None] * frequencies).sum(-1).to(device, torch.float32)
    zero = length - 1

    def sandwich_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score + table[q_idx - kv_idx + zero] * (heads / (8.0 * (h + 1)))

    return sandwich_mod
