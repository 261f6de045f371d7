"""Local window plus tokens that see all and are seen by all."""

from __future__ import annotations

from torch import Tensor

from .signatures import MaskMod


def global_tokens(is_global: Tensor, radius: int) -> MaskMod:
    """keep |i − j| ≤ radius or global_i or global_j.

    Args:
        is_global: bool `[S]`, S ≥ both lengths.
    Source: Longformer (Beltagy et al. 2020, arXiv:2004.05150), §3.1, global attention.
    """

    def global_tokens_mask(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        near = (q_idx - kv_idx <= radius) & (kv_idx - q_idx <= radius)
        return near | is_global[q_idx] | is_global[kv_idx]

    return global_tokens_mask
