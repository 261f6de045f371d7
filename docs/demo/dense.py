"""The same attention written densely in plain torch, to compare with: no flexbwd anywhere."""

from __future__ import annotations

import math

import torch
from model import Masks
from torch import Tensor
from torch.utils.checkpoint import checkpoint


def dense_masks(documents: Tensor, window: int) -> Masks:
    """Element masks `[B, 1, S, S]`, bool: True keeps."""
    index = torch.arange(documents.shape[1])
    distance = index[:, None] - index
    document = (documents[:, None, :, None] == documents[:, None, None, :]) & (distance >= 0)
    return Masks(document, document & (distance <= window))


def dense_attention(query: Tensor, key: Tensor, value: Tensor, slopes: Tensor, cap: float, mask: Tensor) -> Tensor:
    """softmax over all S × S scores, dropped ones at −inf."""
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    index = torch.arange(query.shape[2])
    score = query @ key.transpose(-1, -2) / math.sqrt(query.shape[-1])
    score = cap * torch.tanh(score / cap) + slopes[:, None, None] * (index - index[:, None])
    return score.masked_fill(~mask, -math.inf).softmax(-1) @ value


def checkpointed_attention(
    query: Tensor, key: Tensor, value: Tensor, slopes: Tensor, cap: float, mask: Tensor
) -> Tensor:
    """`dense_attention`, whose S × S tensors are computed again in the backward: a step then needs one layer's only."""
    return checkpoint(dense_attention, query, key, value, slopes, cap, mask, use_reentrant=False)
