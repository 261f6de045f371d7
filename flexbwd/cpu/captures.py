"""Gradients of captured tensors:  d(capture)[index] += Σ_kept ds' · ∂s'/∂(loaded value).

Each load first sums the tile over the dimensions its index does not depend on, then adds what is left to an
accumulator in fp32 (fp64): as a view where the index counts along rows and columns, along diagonals where it depends
on q_idx - kv_idx only, else element by element. Every path adds in a fixed order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from flexbwd.modgraph.modplan import LoadClass, LoadSite
from flexbwd.modgraph.to_torch import TorchProgram, index_runs, run_view
from flexbwd.modgraph.torch_ops import inside

Inputs = Mapping[str, Tensor]
Origins = Mapping[str, int]


class CaptureSite:
    """One load through which a gradient flows, compiled."""

    def __init__(self, site: LoadSite) -> None:
        self.slot, self.kind = site.slot, site.kind
        self.runs = index_runs(site.node.args)
        self.index = TorchProgram(site.node.args)

    def add(self, into: Tensor, grad: Tensor, inputs: Inputs, origins: Origins, captures: Sequence[Tensor]) -> None:
        """Add a mod tile of element gradients to `into`, the capture's accumulator.

        Args:
            into: contiguous, the capture's shape.
            grad: `[batch, kv heads, group, rows, columns]`, 0 where masked.
        """
        if not into.dim():
            into.add_(grad.sum())
            return
        if not into.numel():
            return
        if self.runs is not None:
            view = run_view(into, self.runs, inputs, origins)
            if view is not None:
                view.add_(sum_to(grad, view.shape))
                return
        index = [inside(i, n) for i, n in zip(self.index(inputs, captures, grad.dtype), into.shape, strict=True)]
        consecutive = "q_idx" in origins and "kv_idx" in origins
        if self.kind is LoadClass.TOEPLITZ and consecutive and grad.shape[-1] > 1 and grad.shape[-2] > 1:
            grad, index = _diagonals(grad, index)
        offset = sum((i.to(torch.int64) * s for i, s in zip(index, into.stride(), strict=True)), start=_zero())
        grad = sum_to(grad, offset.shape)
        into.view(-1).scatter_add_(0, offset.expand(grad.shape).reshape(-1), grad.reshape(-1))


def sum_to(grad: Tensor, shape: Sequence[int]) -> Tensor:
    """`grad` summed over the dimensions that `shape`, aligned at the end, lacks or has once."""
    lead = grad.dim() - len(shape)
    dims = [d for d in range(grad.dim()) if grad.shape[d] != 1 and (d < lead or shape[d - lead] == 1)]
    summed = grad.sum(dims, keepdim=True) if dims else grad
    return summed.reshape(summed.shape[max(lead, 0) :])


def _zero() -> Tensor:
    return torch.zeros((), dtype=torch.int64, device="cpu")


def _diagonals(grad: Tensor, index: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Sums along the diagonals column - row = const, and the index of one element of each.

    Written with a left margin of R columns and read with rows one element longer, column t of the buffer holds the
    diagonal column - row = t - R.
    """
    shapes = torch.broadcast_shapes(*(i.shape for i in index))
    lead = grad.dim() - len(shapes)
    keep = [1 if d < lead else shapes[d - lead] for d in range(grad.dim() - 2)]
    grad = sum_to(grad, (*keep, *grad.shape[-2:]))
    rows, columns = grad.shape[-2:]
    width = rows + columns
    count = grad.numel() // (rows * columns)
    buffer = torch.zeros(count, rows * width + rows, dtype=grad.dtype, device="cpu")
    buffer[:, : rows * width].view(count, rows, width)[:, :, rows:] = grad.reshape(count, rows, columns)
    skewed = buffer.as_strided((count, rows, width), (buffer.stride(0), width + 1, 1))
    sums = skewed.sum(1)[:, 1:].view(*grad.shape[:-2], 1, width - 1)

    def along(i: Tensor) -> Tensor:
        if i.dim() < 2 or i.shape[-2:] == (1, 1):
            return i
        i = i.expand(*i.shape[:-2], rows, columns)
        return torch.cat([i[..., 1:, :1].mT.flip(-1), i[..., :1, :]], -1)

    return sums, [along(i) for i in index]
