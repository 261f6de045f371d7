"""Batches of unequal lengths, padded."""

from __future__ import annotations

from torch import Tensor

from .signatures import MaskMod


def padding_right(lengths: Tensor) -> MaskMod:
    """keep j < length_b.

    Padding follows the tokens. Queries in the padding still see the tokens; their outputs are to be ignored.
    Args:
        lengths: integer `[B]`.
    Source: Attention Is All You Need (Vaswani et al. 2017, arXiv:1706.03762), key padding mask.
    """

    def padding_right_mask(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return kv_idx < lengths[b]

    return padding_right_mask


def padding_left(lengths: Tensor, total: int) -> MaskMod:
    """keep j ≥ total − length_b.

    Padding precedes the tokens, as batched generation lays prompts out.
    Args:
        lengths: integer `[B]`.  total: the padded key length.
    Source: left padding for batched decoding (Wolf et al. 2020, arXiv:1910.03771).
    """

    def padding_left_mask(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return kv_idx >= total - lengths[b]

    return padding_left_mask
