"""Pictures of masks, score mods and training: what is computed, tile by tile and element by element.

    picture = flexbwd.viz.picture(mask_mod, score_mod, lengths=(1024, 1024))
    flexbwd.viz.draw(picture, "causal + ALiBi").savefig("mask.png")

`picture` samples the mods and needs no matplotlib; `flexbwd show` prints it as text. The `draw` functions return
matplotlib figures and need `pip install flexbwd[viz]`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flexbwd.errors import OptionError, ShapeError, UnsupportedError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

EMPTY, PARTIAL, FULL = 0, 1, 2
MAX_CELLS = 1024  # cells of the element picture per axis
SAMPLES_PER_CELL = 4  # rows and columns evaluated per cell
STRIP_ELEMENTS = 1 << 20  # elements evaluated at a time
CURVE = (-40.0, 40.0, 161)  # scores: from, to, points
TILE_COLOURS = ("#f4f4f2", "#8fb8de", "#1f4e79")  # empty, partial, full

Mod = Callable[..., Any]
Array = NDArray[Any]


@dataclass(frozen=True, eq=False)
class Picture:
    """What a mask and a score mod do at one batch entry and head.

    Attributes:
        lengths, block_size: (q, kv).
        tiles: int8 `[q blocks, kv blocks]`: EMPTY, PARTIAL or FULL.
        kept: fp32 `[<= MAX_CELLS, <= MAX_CELLS]`: share of elements kept in each cell.
        score: fp32 like `kept`: mean of score_mod(at_score) over the kept elements of a cell, NaN where there are none;
            None without a score mod.
        curve: fp32 `[2, points]`: scores, and what score_mod makes of them at the middle one of the kept elements.
    """

    lengths: tuple[int, int]
    block_size: tuple[int, int]
    tiles: Array
    kept: Array
    score: Array | None = None
    at_score: float = 0.0
    curve: Array | None = None

    def count(self, kind: int) -> int:
        """Number of tiles of a class."""
        return int((self.tiles == kind).sum())

    @property
    def skipped(self) -> float:
        """Share of tiles that are never visited, 0 to 1."""
        return self.count(EMPTY) / self.tiles.size if self.tiles.size else 0.0

    @property
    def is_flat(self) -> bool:
        """The score mod does the same at every element shown, so that its curve tells more than a map."""
        if self.score is None or not np.isfinite(self.score).any():
            return False
        low, high = np.nanmin(self.score), np.nanmax(self.score)
        return bool(high - low <= 1e-6 * max(abs(low), abs(high), 1e-30))


def picture(
    mask: Any = None,
    score_mod: Mod | None = None,
    *,
    lengths: tuple[int, int] = (1024, 1024),
    block_size: int | tuple[int, int] = 128,
    heads: int = 1,
    head: int = 0,
    at_score: float = 0.0,
) -> Picture:
    """Classify the tiles and sample the elements of a mask and a score mod.

    Args:
        mask: a mask_mod, a bool tensor, or a BlockMask (whose lengths and block size then count); None keeps all.
        score_mod: `(score, b, h, q_idx, kv_idx) -> score`, evaluated at `at_score`.
        heads, head: how many heads the mods know, and the one to look at. Batch entry 0 is shown.
    Raises:
        OptionError: no such head.  ShapeError: a length below 1.  MaskError, ModError: as for attention itself.
    """
    from flexbwd.sparsity import BlockMask, create_block_mask

    if not 0 <= head < heads:
        raise OptionError(f"{head=} is not one of {heads} heads; pass heads= and a head below it")
    if isinstance(mask, BlockMask):
        lengths, block_size = mask.seq_lengths, mask.block_size
    if min(lengths) < 1:
        raise ShapeError(f"{lengths=} must be at least 1: there is nothing to draw otherwise")
    sizes = (block_size, block_size) if isinstance(block_size, int) else block_size
    if mask is not None and not isinstance(mask, BlockMask):
        mask = create_block_mask(mask, 1, heads, *lengths, BLOCK_SIZE=sizes)
    tiles = np.full([-(-n // s) for n, s in zip(lengths, sizes, strict=True)], FULL, dtype=np.int8)
    if mask is not None:
        tiles = _tile_classes(mask, head, tiles.shape)
    sampler = _Sampler(tiles, sizes, mask, score_mod, head, at_score)
    kept, score = _sample(sampler, lengths)
    if score_mod is None:
        return Picture(lengths, sizes, tiles, kept)
    return Picture(lengths, sizes, tiles, kept, score, at_score, _curve(sampler, kept, lengths))


# -- sampling ----------------------------------------------------------------------------------------------------------
def _tile_classes(block_mask: Any, head: int, shape: tuple[int, ...]) -> Array:
    """The q → kv lists of batch entry 0 as an array of classes."""
    lists = block_mask.q_to_kv
    tiles = np.full(shape, EMPTY, dtype=np.int8)
    for count, index, kind in ((*lists[:2], PARTIAL), (*lists[2:], FULL)):
        if count is None:
            continue
        h = min(head, count.shape[1] - 1)
        listed = torch.arange(index.shape[-1]) < count[0, h].cpu()[:, None]
        rows, slots = listed.nonzero(as_tuple=True)
        tiles[rows.numpy(), index[0, h].cpu()[rows, slots].numpy()] = kind
    return tiles


class _Evaluated:
    """A mod as a function of broadcastable coordinates."""

    def __init__(self, mod: Mod, kind: Any):
        from flexbwd.modgraph.frontend import trace
        from flexbwd.modgraph.to_torch import TorchProgram

        traced, tensors = trace(mod, kind, device=torch.device("cpu"))
        self.captures = traced.prologue.run(tensors)
        self.program = TorchProgram([traced.output])

    def __call__(self, **inputs: Tensor) -> Tensor:
        with torch.no_grad():
            return self.program(inputs, self.captures, torch.float32)[0]


class _Sampler:
    """Evaluates keep and score on a grid of rows and columns."""

    def __init__(
        self, tiles: Array, sizes: tuple[int, int], block_mask: Any, score_mod: Mod | None, head: int, at_score: float
    ):
        from flexbwd.modgraph.frontend import ModKind

        self.tiles, self.sizes = torch.from_numpy(tiles), sizes
        self.head, self.at_score = head, at_score
        self.dense: Tensor | None = None
        self.mask: _Evaluated | None = None
        if block_mask is not None and block_mask.bits is not None:
            self.dense = block_mask.element_mask()
        elif block_mask is not None and block_mask.mask_mod is not None:
            self.mask = _Evaluated(block_mask.mask_mod, ModKind.MASK)
        self.score = _Evaluated(score_mod, ModKind.SCORE) if score_mod is not None else None

    def __call__(self, q_idx: Tensor, kv_idx: Tensor) -> tuple[Tensor, Tensor | None]:
        """keep (bool) and score (fp32 or None), each `[rows, columns]`, at int32 coordinates."""
        shape = (len(q_idx), len(kv_idx))
        tile = self.tiles[(q_idx // self.sizes[0]).long()][:, (kv_idx // self.sizes[1]).long()]
        at = {"b": torch.zeros(1, 1), "h": torch.full((1, 1), self.head), "q_idx": q_idx[:, None], "kv_idx": kv_idx}
        at = {name: value.to(torch.int32) for name, value in at.items()}
        at["kv_idx"] = at["kv_idx"][None, :]
        keep = tile == FULL
        if self.dense is not None:
            h = min(self.head, self.dense.shape[1] - 1)
            keep = keep | ((tile == PARTIAL) & self.dense[0, h][q_idx.long()][:, kv_idx.long()])
        elif self.mask is not None:
            keep = keep | ((tile == PARTIAL) & self.mask(**at))
        else:
            keep = keep | (tile == PARTIAL)
        if self.score is None:
            return keep, None
        score = self.score(score=torch.full(shape, self.at_score), **at).expand(shape)
        return keep & (score != -torch.inf), score


def _axis(length: int) -> tuple[Tensor, Array]:
    """Indices to evaluate along one axis, and where each cell's indices start.

    Up to MAX_CELLS * SAMPLES_PER_CELL every index; beyond, a few per cell at uneven places, so that a periodic mask
    does not meet a sampling of the same period.
    """
    cells = min(length, MAX_CELLS)
    if length <= MAX_CELLS * SAMPLES_PER_CELL:
        index = torch.arange(length, dtype=torch.int32)
        return index, np.array([cell * length // cells for cell in range(cells)])
    strata = MAX_CELLS * SAMPLES_PER_CELL
    edges = np.arange(strata + 1) * length // strata
    jitter = np.random.default_rng(0).random(strata)
    index = torch.from_numpy((edges[:-1] + jitter * (edges[1:] - edges[:-1])).astype(np.int32))
    return index, np.arange(0, strata, SAMPLES_PER_CELL)


def _sample(sampler: _Sampler, lengths: tuple[int, int]) -> tuple[Array, Array]:
    """kept and score by cell, evaluated in strips of whole rows of cells."""
    (rows, row_cells), (columns, column_cells) = _axis(lengths[0]), _axis(lengths[1])
    bounds = np.append(row_cells, len(rows))
    kept = np.zeros((len(row_cells), len(column_cells)), dtype=np.float32)
    score = np.full(kept.shape, np.nan, dtype=np.float32)
    per_strip = max(1, STRIP_ELEMENTS // (len(columns) * SAMPLES_PER_CELL))
    for first in range(0, len(row_cells), per_strip):
        last = min(first + per_strip, len(row_cells))
        begin = bounds[first]
        keep, values = sampler(rows[begin : bounds[last]], columns)
        starts = (row_cells[first:last] - begin, column_cells)
        number = _pool(np.ones(keep.shape, np.float32), starts)
        survivors = _pool(keep.numpy().astype(np.float32), starts)
        kept[first:last] = survivors / number
        if values is not None:
            total = _pool(torch.where(keep, values, 0.0).numpy(), starts)
            with np.errstate(invalid="ignore", divide="ignore"):
                score[first:last] = np.where(survivors > 0, total / survivors, np.nan)
    return kept, score


def _curve(sampler: _Sampler, kept: Array, lengths: tuple[int, int]) -> Array | None:
    """score_mod along CURVE at the middle one of the kept cells; None when nothing is kept."""
    assert sampler.score is not None
    cells = np.argwhere(kept > 0)
    if not len(cells):
        return None
    middle = cells[len(cells) // 2]
    q_idx, kv_idx = (int(c) * n // m for c, n, m in zip(middle, lengths, kept.shape, strict=True))
    at = {"b": 0, "h": sampler.head, "q_idx": q_idx, "kv_idx": kv_idx}
    scores = torch.linspace(*CURVE)
    values = sampler.score(score=scores, **{name: torch.tensor([i], dtype=torch.int32) for name, i in at.items()})
    return torch.stack([scores, values.expand_as(scores)]).numpy()


def _pool(values: Array, starts: Sequence[Array]) -> Array:
    """Sums over cells."""
    return np.asarray(np.add.reduceat(np.add.reduceat(values, starts[0], axis=0), starts[1], axis=1))


# -- figures -----------------------------------------------------------------------------------------------------------
def _figure(width: float, height: float) -> Figure:
    """An empty figure outside pyplot: no global state, no display."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UnsupportedError("drawing needs matplotlib; install it with: pip install flexbwd[viz]") from error
    return Figure(figsize=(width, height), layout="constrained", dpi=120)


def draw(shown: Picture, title: str = "") -> Figure:
    """Tile classes, kept elements and, when there is a score mod, its values, side by side.

    Raises:
        UnsupportedError: matplotlib is not installed.
    """
    panels = 2 if shown.score is None else 3
    figure = _figure(4.3 * panels, 5.1)
    axes = figure.subplots(1, panels)
    _draw_tiles(axes[0], shown)
    _draw_kept(axes[1], shown)
    if shown.is_flat:
        _draw_curve(axes[2], shown)
    elif shown.score is not None:
        _draw_score(axes[2], shown)
    for axis in axes:
        axis.set_anchor("N")
    for axis in axes[: 2 if shown.is_flat else 3]:
        axis.set(xlabel="kv_idx", ylabel="q_idx")
        axis.xaxis.set_label_position("top")
        axis.xaxis.tick_top()
    if title:
        figure.suptitle(title)
    return figure


def _extent(shown: Picture) -> tuple[float, float, float, float]:
    return (0, shown.lengths[1], shown.lengths[0], 0)


def _draw_tiles(axis: Axes, shown: Picture) -> None:
    from matplotlib.colors import ListedColormap
    from matplotlib.patches import Patch

    rows, columns = shown.tiles.shape
    extent = (0, columns * shown.block_size[1], rows * shown.block_size[0], 0)
    axis.imshow(shown.tiles, cmap=ListedColormap(TILE_COLOURS), vmin=0, vmax=2, extent=extent, interpolation="nearest")
    _tile_lines(axis, shown)
    names = (("empty", EMPTY), ("partial", PARTIAL), ("full", FULL))
    patches = [
        Patch(facecolor=TILE_COLOURS[kind], edgecolor="#888888", label=f"{shown.count(kind)} {name}")
        for name, kind in names
    ]
    axis.legend(handles=patches, loc="upper center", bbox_to_anchor=(0.5, -0.02), ncols=3, frameon=False, fontsize=8)
    axis.set_title(f"tiles: {100 * shown.skipped:.1f} % skipped", fontsize=10)


def _draw_kept(axis: Axes, shown: Picture) -> None:
    axis.imshow(shown.kept, cmap="Blues", vmin=0, vmax=1, extent=_extent(shown), interpolation="nearest")
    _tile_lines(axis, shown)
    axis.set_title(f"elements: {100 * float(shown.kept.mean()):.1f} % kept", fontsize=10)


def _draw_score(axis: Axes, shown: Picture) -> None:
    assert shown.score is not None
    finite = shown.score[np.isfinite(shown.score)]
    low, high = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 0.0)
    signed = low < 0 < high
    if signed:
        low, high = -max(-low, high), max(-low, high)
    cmap = "RdBu_r" if signed else "viridis"
    axis.set_facecolor("#dddddd")
    image = axis.imshow(
        shown.score, cmap=cmap, vmin=low, vmax=high, extent=_extent(shown), interpolation="nearest", aspect="equal"
    )
    axis.figure.colorbar(image, ax=axis, location="bottom", shrink=0.8, pad=0.02)
    axis.set_title(f"score_mod at score {shown.at_score:g}", fontsize=10)


def _draw_curve(axis: Axes, shown: Picture) -> None:
    assert shown.curve is not None
    axis.plot(shown.curve[0], shown.curve[0], color="#bbbbbb", linewidth=0.8, linestyle="--")
    axis.plot(*shown.curve, color="#1f4e79")
    axis.set(xlabel="score", ylabel="score_mod(score)", box_aspect=1)
    axis.grid(alpha=0.3)
    axis.set_title("score_mod, the same everywhere", fontsize=10)


def _tile_lines(axis: Axes, shown: Picture) -> None:
    """Tile borders, where there are few enough to be told apart."""
    rows, columns = shown.tiles.shape
    if max(rows, columns) > 64:
        return
    lines: dict[str, Any] = {"color": "#777777", "linewidth": 0.3}
    for row in range(1, rows):
        axis.axhline(row * shown.block_size[0], **lines)
    for column in range(1, columns):
        axis.axvline(column * shown.block_size[1], **lines)


def draw_loss(losses: Sequence[float], title: str = "", smooth: int = 10) -> Figure:
    """A loss curve: each step, and the mean of the last `smooth` ones.

    Raises:
        OptionError: no losses, or `smooth` below 1.  UnsupportedError: matplotlib is not installed.
    """
    if not losses or smooth < 1:
        raise OptionError(f"{len(losses)} losses with {smooth=}: give at least one of each")
    values = np.asarray(losses, dtype=np.float64)
    sums = np.cumsum(np.insert(values, 0, 0.0))
    ends = np.arange(1, len(values) + 1)
    begins = np.maximum(ends - smooth, 0)
    figure = _figure(6.0, 3.6)
    axis = figure.subplots()
    axis.plot(ends, values, color="#8fb8de", linewidth=0.8, label="step")
    axis.plot(ends, (sums[ends] - sums[begins]) / (ends - begins), color="#1f4e79", label=f"mean of {smooth}")
    axis.set(xlabel="step", ylabel="loss", title=title)
    axis.grid(alpha=0.3)
    axis.legend(frameon=False)
    return figure
