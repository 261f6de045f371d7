"""Biases of the relative position: one slope, or a learned table."""

from __future__ import annotations

from torch import Tensor

from flexbwd.errors import ShapeError

from .signatures import ScoreMod


def relative_bias(slope: float = 1.0) -> ScoreMod:
    """s' = s + slope · (i − j).

    Source: FlexAttention (Dong et al. 2024, arXiv:2412.05496), relative positional encoding.
    """

    def relative_bias_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score + slope * (q_idx - kv_idx)

    return relative_bias_mod


def relative_table(table: Tensor) -> ScoreMod:
    """s' = s + table[h, i − j + S − 1].

    Args:
        table: `[H, 2S − 1]`, or `[2S − 1]` for all heads alike; may require grad. Lengths up to S.
    Source: relative position representations (Shaw et al. 2018, arXiv:1803.02155) as a scalar bias, Swin Transformer
        (Liu et al. 2021, arXiv:2103.14030).
    """
    if table.ndim not in (1, 2) or table.shape[-1] % 2 == 0:
        raise ShapeError(f"table has shape {tuple(table.shape)}, but must be [H, 2S − 1] or [2S − 1]: one entry for "
                         "each distance from −(S − 1) to S − 1")  # fmt: skip
    zero = (table.shape[-1] - 1) // 2
    if table.ndim == 1:

        def relative_table_shared_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            return score + table[q_idx - kv_idx + zero]

        return relative_table_shared_mod

    def relative_table_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score + table[h, q_idx - kv_idx + zero]

    return relative_table_mod
