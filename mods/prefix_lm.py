"""Prefix language model."""

from __future__ import annotations

from torch import Tensor

from .signatures import MaskMod


def prefix_lm(prefix: int | Tensor) -> MaskMod:
    """keep j < prefix or j ≤ i.

    The prefix is seen by all, the rest is causal. `prefix` is one length, or an integer tensor `[B]` of lengths.
    Source: T5 (Raffel et al. 2020, arXiv:1910.10683), §3.2.1, "causal with prefix".
    """
    if isinstance(prefix, Tensor):

        def prefix_lm_batch_mask(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            return (kv_idx < prefix[b]) | (kv_idx <= q_idx)

        return prefix_lm_batch_mask

    def prefix_lm_mask(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return (kv_idx < prefix) | (kv_idx <= q_idx)

    return prefix_lm_mask
