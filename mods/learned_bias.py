"""Learned additive biases, by what they depend on."""

from __future__ import annotations

from torch import Tensor

from flexbwd.errors import ShapeError

from .signatures import ScoreMod


def head_bias(bias: Tensor) -> ScoreMod:
    """s' = s + bias[h].

    Softmax does not see it; the LSE does, and so does a merge of several attentions.
    Args:
        bias: `[H]`, may require grad.
    Source: FlexAttention (Dong et al. 2024, arXiv:2412.05496), captured per-head tensors.
    """
    _check_ndim(bias, (1,), "[H]")

    def head_bias_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score + bias[h]

    return head_bias_mod


def key_bias(bias: Tensor) -> ScoreMod:
    """s' = s + bias[j].

    Args:
        bias: `[S]`, or `[B, S]` by batch entry; may require grad.
    Source: FlexAttention (Dong et al. 2024, arXiv:2412.05496), captured per-key tensors.
    """
    _check_ndim(bias, (1, 2), "[S] or [B, S]")
    if bias.ndim == 2:

        def key_bias_batch_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            return score + bias[b, kv_idx]

        return key_bias_batch_mod

    def key_bias_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score + bias[kv_idx]

    return key_bias_mod


def batch_bias(bias: Tensor) -> ScoreMod:
    """s' = s + bias[b, h].

    Softmax does not see it; the LSE does.
    Args:
        bias: `[B, H]`, may require grad.
    Source: FlexAttention (Dong et al. 2024, arXiv:2412.05496), captured per-batch tensors.
    """
    _check_ndim(bias, (2,), "[B, H]")

    def batch_bias_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score + bias[b, h]

    return batch_bias_mod


def pair_bias(bias: Tensor) -> ScoreMod:
    """s' = s + bias[h, i, j].

    Args:
        bias: `[Sq, Skv]`, `[H, Sq, Skv]` or `[B, H, Sq, Skv]`; may require grad.
    Source: AlphaFold (Jumper et al. 2021, doi:10.1038/s41586-021-03819-2), supplement 1.6.2, attention with pair bias.
    """
    _check_ndim(bias, (2, 3, 4), "[Sq, Skv], [H, Sq, Skv] or [B, H, Sq, Skv]")
    if bias.ndim == 2:

        def pair_bias_shared_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            return score + bias[q_idx, kv_idx]

        return pair_bias_shared_mod
    if bias.ndim == 3:

        def pair_bias_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            return score + bias[h, q_idx, kv_idx]

        return pair_bias_mod

    def pair_bias_batch_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score + bias[b, h, q_idx, kv_idx]

    return pair_bias_batch_mod


def _check_ndim(bias: Tensor, allowed: tuple[int, ...], shapes: str) -> None:
    if bias.ndim not in allowed:
        raise ShapeError(f"bias has shape {tuple(bias.shape)}, but must be {shapes}")
