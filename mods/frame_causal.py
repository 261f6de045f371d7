"""Video: every token of a frame sees its own frame and all earlier ones."""

from __future__ import annotations

from torch import Tensor

from flexbwd.errors import ConfigError

from .signatures import MaskMod


def frame_causal(tokens_per_frame: int) -> MaskMod:
    """keep j // n ≤ i // n, with n tokens per frame.

    Source: block-causal video diffusion, CausVid (Yin et al. 2024, arXiv:2412.07772).
    """
    if tokens_per_frame < 1:
        raise ConfigError(f"{tokens_per_frame=} must be at least 1")

    def frame_causal_mask(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return kv_idx // tokens_per_frame <= q_idx // tokens_per_frame

    return frame_causal_mask
