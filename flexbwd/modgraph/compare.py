"""A traced mod against the user's callable: values, derivative and captured gradients on a small grid of elements."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flexbwd.errors import ModBoundsError
from flexbwd.reference import Coordinates, evaluate_mod

from .frontend import TracedMod
from .ir import Node
from .modplan import LoadSite, ModPlan
from .to_torch import evaluate

_COORDINATES = ("b", "h", "q_idx", "kv_idx")


@dataclass(frozen=True)
class Sizes:
    """The grid that is sampled: every element of it."""

    batch: int
    heads: int
    q_len: int
    kv_len: int

    @property
    def ranges(self) -> dict[str, tuple[int, int]]:
        """Inclusive range of each integer input."""
        sizes = (self.batch, self.heads, self.q_len, self.kv_len)
        return {name: (0, n - 1) for name, n in zip(_COORDINATES, sizes, strict=True)}


@dataclass(frozen=True)
class Grid:
    """Flat lists over elements: where they are, a score each, and a weight for sums of gradients."""

    where: Coordinates
    scores: Tensor
    weights: Tensor

    @property
    def inputs(self) -> dict[str, Tensor]:
        return {"score": self.scores} | {n: c.to(torch.int32) for n, c in zip(_COORDINATES, self.where, strict=True)}

    def only(self, kept: Tensor) -> Grid:
        b, h, i, j = (c[kept] for c in self.where)
        return Grid((b, h, i, j), self.scores[kept], self.weights[kept])

    @staticmethod
    def of(sizes: Sizes, dtype: torch.dtype, seed: int) -> Grid:
        shape = (sizes.batch, sizes.heads, sizes.q_len, sizes.kv_len)
        b, h, i, j = torch.ones(shape).nonzero(as_tuple=True)
        generator = torch.Generator().manual_seed(seed)
        scores, weights = (torch.randn(b.numel(), generator=generator, dtype=dtype) for _ in range(2))
        return Grid((b, h, i, j), 2.0 * scores, weights)


@dataclass(frozen=True)
class Difference:
    """Two values that should be one.

    Attributes:
        what: the value in question.  against: what it was compared with.
        at: coordinates of the worst element: of the grid, or of the captured tensor.
        got, want: both values there.  count, total: how many elements differ, of how many.
    """

    what: str
    against: str
    at: Mapping[str, int]
    got: float
    want: float
    count: int
    total: int

    def __str__(self) -> str:
        place = ", ".join(f"{name}={value}" for name, value in self.at.items()) or "its only element"
        share = f"{self.count} of {self.total} elements"
        return f"{self.what} is {self.got:.9g}, {self.against} gives {self.want:.9g}, at {place}; {share} differ"


Found = list[Difference]  # none or one


def compare(pair: tuple[str, str], got: Tensor, want: Tensor, tolerance: float, at: Sequence[Tensor] | None) -> Found:
    """The worst element of `got` that differs from `want` by more than tolerance · (1 + |want|), if any.

    In a captured tensor, whose elements are sums, the largest |want| counts.
    A NaN in `want` agrees with anything: torch's derivative through a branch not taken may be NaN, ours is not.

    Args:
        pair: what `got` and `want` are.
        at: b, h, q_idx and kv_idx of each element; None where the elements are a captured tensor's.
    """
    size = want.abs()
    if at is None and size.numel():
        size = size.nan_to_num().max()
    error = (got - want).abs() / (1.0 + size)
    error = error.masked_fill(want.isnan() | (got == want), 0.0).nan_to_num(nan=math.inf)
    wrong = int((error > tolerance).sum())
    if not wrong:
        return []
    worst = torch.unravel_index(error.argmax(), error.shape)
    if at is None:
        place = {f"dim {d}": int(n) for d, n in enumerate(worst)}
    else:
        place = {name: int(c[worst]) for name, c in zip(_COORDINATES, at, strict=True)}
    return [Difference(*pair, place, float(got[worst]), float(want[worst]), wrong, error.numel())]


# -- the user's callables ---------------------------------------------------------------------------------------------
def call(mod: Callable[..., Any], grid: Grid, *leading: Tensor) -> Tensor:
    """The user's callable itself at every element of the grid, differentiable.

    Raises:
        ModBoundsError: it reads a captured tensor outside its bounds there.
    """
    dtype = grid.scores.dtype
    try:
        return evaluate_mod(mod, leading, grid.where, dtype, dtype)
    except IndexError as error:
        name = getattr(mod, "__name__", type(mod).__name__)
        sizes = ", ".join(f"{n} < {int(c.max()) + 1}" for n, c in zip(_COORDINATES, grid.where, strict=True))
        raise ModBoundsError(
            f"{error}, evaluated for {sizes}",
            mod=name,
            remedy="pass check_mod the batch, heads and lengths that the captured tensors are made for",
        ) from error


@dataclass(frozen=True)
class Derivatives:
    """∂s'/∂s by element, and Σ weight · ∂s'/∂c for each captured tensor c of the user; None where none flows."""

    score: Tensor
    captures: list[Tensor | None]


def autograd_derivatives(mod: Callable[..., Any], grid: Grid, tensors: Sequence[Tensor]) -> Derivatives:
    """By torch's autograd, through the user's callable."""
    leaf = grid.scores.clone().requires_grad_()
    out = call(mod, grid, leaf)
    trained = [t for t in tensors if t.requires_grad]
    if not out.requires_grad:
        return Derivatives(torch.zeros_like(leaf), [None for _ in tensors])
    (score,) = torch.autograd.grad(out.sum(), leaf, retain_graph=True, allow_unused=True)
    sums = iter(torch.autograd.grad(out, trained, grid.weights, allow_unused=True) if trained else ())
    captures = [next(sums) if t.requires_grad else None for t in tensors]
    return Derivatives(torch.zeros_like(leaf) if score is None else score, captures)


# -- the plan ---------------------------------------------------------------------------------------------------------
def values(nodes: Sequence[Node], grid: Grid, captures: Sequence[Tensor]) -> list[Tensor]:
    """Values of graph nodes at every element of the grid."""
    found = evaluate(nodes, grid.inputs, [c.detach() for c in captures], grid.scores.dtype)
    return [v.expand(grid.scores.shape) for v in found]


def planned_derivatives(plan: ModPlan, traced: TracedMod, grid: Grid, tensors: Sequence[Tensor]) -> Derivatives:
    """By the plan's Jacobian factors, scattered to the captures, then through the prologue to the user's tensors."""
    with torch.enable_grad():
        captures = traced.prologue.run(tensors)
    sums = [torch.zeros(c.shape, dtype=grid.scores.dtype) for c in captures]
    (score,) = values([plan.j_score], grid, captures)
    for site in plan.loads:
        if site.jacobian is not None:
            _scatter(sums[site.slot], site, grid, captures)
    ends = [(c, g.to(c.dtype)) for c, g in zip(captures, sums, strict=True) if c.requires_grad]
    trained = [t for t in tensors if t.requires_grad]
    if not ends or not trained:
        return Derivatives(score, [None for _ in tensors])
    outputs, grads = zip(*ends, strict=True)
    found = iter(torch.autograd.grad(outputs, trained, grads, allow_unused=True))
    return Derivatives(score, [next(found) if t.requires_grad else None for t in tensors])


def _scatter(total: Tensor, site: LoadSite, grid: Grid, captures: Sequence[Tensor]) -> None:
    """Add weight · jacobian of a load at the elements it reads."""
    assert site.jacobian is not None
    factor, *index = values([site.jacobian, *site.node.args], grid, captures)
    terms = grid.weights * factor
    if not index:
        total += terms.sum()
        return
    places = tuple((i + n * (i < 0)).clamp(0, n - 1).long() for i, n in zip(index, total.shape, strict=True))
    total.index_put_(places, terms, accumulate=True)
