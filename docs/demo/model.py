"""A small byte-level transformer whose attention is flexbwd's: ALiBi with learned slopes, softcap, two kinds of layer.

s' = cap · tanh(s / cap) + slope_h · (j − i)        slope_h = exp(log_slope_h), learned
even layers: j ≤ i in the same document             odd layers: the same, and i − j ≤ window
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flexbwd import and_masks, create_block_mask, flex_attention, mods

BYTES = 256


@dataclass(frozen=True)
class Config:
    """Sizes of the model."""

    width: int = 128
    heads: int = 4
    kv_heads: int = 2  # grouped heads: two query heads share one key head
    layers: int = 4
    window: int = 256  # of odd layers
    cap: float = 20.0  # of the scores


class Masks(NamedTuple):
    """One mask for each kind of layer: BlockMasks for flexbwd, bool tensors for dense attention."""

    document: Any
    local: Any


Attention = Callable[[Tensor, Tensor, Tensor, Tensor, float, Any], Tensor]  # q, k, v, slopes, cap, mask


def block_masks(documents: Tensor, window: int) -> Masks:
    """Built once for a batch, shared by all layers and heads, and by forward and backward.

    Args:
        documents: int32 `[B, S]`, the document of every byte.
    """
    batch, length = documents.shape
    document = mods.document_causal(documents)
    local = and_masks(document, mods.sliding_window(window))
    return Masks(*(create_block_mask(mask, batch, None, length, length) for mask in (document, local)))


def sparse_attention(query: Tensor, key: Tensor, value: Tensor, slopes: Tensor, cap: float, mask: Any) -> Tensor:
    """Attention through flexbwd: the mod is plain torch, and its captured `slopes` get their gradient."""

    def capped_alibi(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return cap * torch.tanh(score / cap) + slopes[h] * (kv_idx - q_idx)

    return flex_attention(query, key, value, score_mod=capped_alibi, block_mask=mask)


class Layer(nn.Module):
    """Attention and a feed-forward part, each normalised before and added to the stream."""

    def __init__(self, config: Config, local: bool):
        super().__init__()
        self.config, self.local = config, local
        self.head_dim = config.width // config.heads
        powers = torch.arange(1, config.heads + 1) * (-8.0 / config.heads)
        self.log_slopes = nn.Parameter(powers * torch.log(torch.tensor(2.0)))  # ALiBi's, to begin with
        self.norm_attention, self.norm_mlp = nn.RMSNorm(config.width), nn.RMSNorm(config.width)
        self.qkv = nn.Linear(config.width, (config.heads + 2 * config.kv_heads) * self.head_dim, bias=False)
        self.project = nn.Linear(config.width, config.width, bias=False)
        self.mlp = nn.Sequential(
            nn.Linear(config.width, 4 * config.width), nn.GELU(), nn.Linear(4 * config.width, config.width)
        )

    def forward(self, x: Tensor, masks: Masks, attention: Attention) -> Tensor:
        batch, length, _ = x.shape
        counts = (self.config.heads, self.config.kv_heads, self.config.kv_heads)
        qkv = self.qkv(self.norm_attention(x)).view(batch, length, sum(counts), self.head_dim).transpose(1, 2)
        mask = masks.local if self.local else masks.document
        mixed = attention(*qkv.split(counts, dim=1), self.log_slopes.exp(), self.config.cap, mask)
        x = x + self.project(mixed.transpose(1, 2).reshape(batch, length, -1))
        return x + self.mlp(self.norm_mlp(x))


class ByteModel(nn.Module):
    """Predicts the next byte."""

    def __init__(self, config: Config):
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(BYTES, config.width)
        self.layers = nn.ModuleList(Layer(config, local=bool(n % 2)) for n in range(config.layers))
        self.norm = nn.RMSNorm(config.width)
        self.head = nn.Linear(config.width, BYTES, bias=False)
        nn.init.normal_(self.embed.weight, std=0.5)
        nn.init.zeros_(self.head.weight)  # the first loss is ln 256

    def forward(self, tokens: Tensor, targets: Tensor, masks: Masks, attention: Attention = sparse_attention) -> Tensor:
        """Mean cross-entropy, in nats for each byte."""
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, masks, attention)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())
