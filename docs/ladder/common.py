"""What every level shares: inputs of one head, the oracle, and the comparison. The levels hold the ideas."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor


class Head(NamedTuple):
    """One head of attention: query, grad_out `[Sq, D]`, key, value `[Skv, D]`."""

    query: Tensor
    key: Tensor
    value: Tensor
    grad_out: Tensor

    @property
    def scale(self) -> float:
        return float(self.query.shape[1] ** -0.5)


def head(q_len: int, kv_len: int, dim: int, dtype: torch.dtype = torch.float64) -> Head:
    """Random inputs, the same at each call."""
    generator = torch.Generator().manual_seed(0)

    def draw(rows: int) -> Tensor:
        return torch.randn(rows, dim, generator=generator, dtype=torch.float64).to(dtype)

    return Head(draw(q_len), draw(kv_len), draw(kv_len), draw(q_len))


def causal(i: Tensor, j: Tensor) -> Tensor:
    """The mask of the examples: query i sees key j."""
    return i >= j


def oracle(given: Head, keep: Tensor) -> dict[str, Tensor]:
    """out, dq, dk, dv in fp64, by torch's autograd; `keep` is bool `[Sq, Skv]`."""
    q, k, v = (t.double().requires_grad_() for t in given[:3])
    out = (given.scale * q @ k.mT).masked_fill(~keep, -torch.inf).softmax(-1) @ v
    grads = torch.autograd.grad(out, (q, k, v), given.grad_out.double())
    return dict(zip(("out", "dq", "dk", "dv"), (out.detach(), *grads), strict=True))


def errors(got: Mapping[str, Tensor], want: Mapping[str, Tensor]) -> dict[str, float]:
    """Relative errors in norm."""
    return {name: float((t.double() - want[name]).norm() / want[name].norm()) for name, t in got.items()}


def check(got: Mapping[str, Tensor], want: Mapping[str, Tensor], at_most: float) -> None:
    """Print the relative errors, and fail above `at_most`."""
    found = errors(got, want)
    print("relative error against fp64: " + ", ".join(f"{name} {e:.1e}" for name, e in found.items()))
    assert all(e <= at_most for e in found.values()), f"an error is above {at_most}"  # NaN fails too
