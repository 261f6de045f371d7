"""Causal inside chunks of fixed length."""

from __future__ import annotations

from torch import Tensor

from flexbwd.errors import ConfigError

from .signatures import MaskMod


def chunked_causal(chunk: int) -> MaskMod:
    """keep i // chunk = j // chunk and j ≤ i.

    Source: Llama 4 (Meta 2025), local layers of interleaved attention, chunks of 8192 tokens.
    """
    if chunk < 1:
        raise ConfigError(f"{chunk=} must be at least 1: it is a length in tokens")

    def chunked_causal_mask(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return (q_idx // chunk == kv_idx // chunk) & (kv_idx <= q_idx)

    return chunked_causal_mask
