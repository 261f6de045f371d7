"""Graphormer: a bias by the distance of two nodes in a graph."""

from __future__ import annotations

import torch
from torch import Tensor

from flexbwd.errors import ShapeError

from .signatures import ScoreMod


def graphormer(table: Tensor, distance: Tensor) -> ScoreMod:
    """s' = s + table[h, distance[b, i, j]].

    Args:
        table: `[H, distances]`, may require grad.
        distance: integer `[B, N, N]`, from `graph_distances`.
    Source: Graphormer (Ying et al. 2021, arXiv:2106.05234), §3.1.2, spatial encoding.
    """
    if table.ndim != 2 or distance.ndim != 3:
        raise ShapeError(f"table has shape {tuple(table.shape)} and distance {tuple(distance.shape)}, but they must be "
                         "[H, distances] and [B, N, N]")  # fmt: skip

    def graphormer_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score + table[h, distance[b, q_idx, kv_idx]]

    return graphormer_mod


def graph_distances(adjacency: Tensor, furthest: int) -> Tensor:
    """Hops between every two nodes, int32 `[B, N, N]`; more than `furthest`, or no way at all, is `furthest + 1`.

    Args:
        adjacency: `[B, N, N]`, nonzero where an edge leads from row to column.
    """
    edges = (adjacency != 0).to(torch.float32)
    reached = torch.eye(adjacency.shape[-1], device=adjacency.device).expand_as(edges)
    distance = torch.full(adjacency.shape, furthest + 1, dtype=torch.int32, device=adjacency.device)
    distance.masked_fill_(reached > 0, 0)
    for hops in range(1, furthest + 1):
        reached = (reached @ edges > 0).to(torch.float32)
        distance.masked_fill_((reached > 0) & (distance > hops), hops)
    return distance
