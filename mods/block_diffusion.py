"""Training mask of block diffusion language models."""

from __future__ import annotations

from torch import Tensor

from flexbwd.errors import ConfigError

from .signatures import MaskMod


def block_diffusion(length: int, block: int) -> MaskMod:
    """keep (same copy and block_j = block_i) or (clean_j and block_j < block_i).

    The sequence is the noised copy (tokens 0 … length − 1) and then the clean one. A noised block sees itself and the
    clean blocks before it; a clean block sees itself and the clean blocks before it.

    Args:
        length: tokens of one copy.  block: tokens diffused together.
    Source: BD3-LM (Arriola et al. 2025, arXiv:2503.09573), §3.1.
    """
    if length < 1 or block < 1:
        raise ConfigError(f"{length=} and {block=} must be at least 1: both count tokens")

    def block_diffusion_mask(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        q_clean, kv_clean = q_idx >= length, kv_idx >= length
        q_block, kv_block = q_idx % length // block, kv_idx % length // block
        same_copy = (q_clean == kv_clean) & (q_block == kv_block)
        return same_copy | (kv_clean & (kv_block < q_block))

    return block_diffusion_mask
