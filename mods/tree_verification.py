"""Speculative decoding: a tree of drafted tokens verified in one pass."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flexbwd.errors import ShapeError

from .signatures import MaskMod


def tree_verification(ancestors: Tensor, prefix: int) -> MaskMod:
    """keep j < prefix or ancestors[i, j − prefix].

    Queries are the drafted tokens, keys the accepted prefix followed by the drafted tokens.

    Args:
        ancestors: bool `[nodes, nodes]`: entry [i, j] says that j lies on the path from the root to i, itself included;
            see `tree_ancestors`.
    Source: SpecInfer (Miao et al. 2024, arXiv:2305.09781), tree attention.
    """
    if ancestors.ndim != 2 or ancestors.shape[0] != ancestors.shape[1] or not ancestors.shape[0]:
        raise ShapeError(f"ancestors has shape {tuple(ancestors.shape)}, but must be [nodes, nodes] with nodes ≥ 1")
    last = ancestors.shape[0] - 1

    def tree_verification_mask(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        node = kv_idx - prefix
        on_path = ancestors[q_idx, torch.clamp(node, 0, last)] & (node >= 0) & (node <= last)
        return (kv_idx < prefix) | on_path

    return tree_verification_mask


def tree_ancestors(parents: Sequence[int]) -> Tensor:
    """The `ancestors` table of a tree: parents[n] < n is the parent of node n, −1 for a root."""
    table = torch.eye(len(parents), dtype=torch.bool)
    for node, parent in enumerate(parents):
        if parent >= node:
            raise ShapeError(f"parents[{node}] = {parent}, but a parent must come before its child (−1: a root)")
        if parent >= 0:
            table[node] |= table[parent]
    return table
