"""The zoo, mod by mod: formula, source, picture, code, and for masks the measured block sparsity."""

from __future__ import annotations

import inspect
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from flexbwd import create_block_mask, mods, viz

LENGTH = 4096  # of the measured block sparsity
SHOWN = 256  # of the pictures
HEADS = 4
PICTURES = "_build/zoo"  # below the source folder; git ignores it


def markdown(kind: str, source_dir: Path) -> str:
    """Sections of all mods of a kind, "mask" or "score"; writes their pictures below `source_dir`."""
    (source_dir / PICTURES).mkdir(parents=True, exist_ok=True)
    return "\n".join(section(entry, source_dir) for entry in mods.zoo(kind))


def section(entry: Any, source_dir: Path) -> str:
    """One mod."""
    image = f"{PICTURES}/{entry.name}.png"
    draw(entry).savefig(source_dir / image)
    lines = [f"### {entry.name}", "", f"![{entry.name}](/{image})", "", "```text", entry.formula, "```", ""]
    if entry.kind == "mask":
        lines += [f"{sparsity(entry.name):.1f} % of the blocks are skipped at S = {LENGTH}.", ""]
    if entry.source:
        lines += [f"Source: {entry.source}.", ""]
    lines += ["```python", inspect.getsource(entry.factory).rstrip(), "```", ""]
    return "\n".join(lines)


@cache
def sparsity(name: str) -> float:
    """Percentage of 128 × 128 blocks that the example of a mask skips at S = LENGTH, one batch entry and head."""
    mask = mods.get(name).example(1, 1, LENGTH, LENGTH)
    return create_block_mask(mask, 1, 1, LENGTH, LENGTH).sparsity()


def draw(entry: Any) -> Figure:
    """Kept elements of a mask, or the values of a score mod at score 1, of an example of SHOWN elements."""
    mod = entry.example(1, HEADS, SHOWN, SHOWN, torch.Generator().manual_seed(1))
    lengths, figure = (SHOWN, SHOWN), Figure(figsize=(1.9, 1.9), layout="constrained", dpi=96)
    axis = figure.subplots()
    if entry.kind == "mask":
        shown = viz.picture(mod, lengths=lengths, heads=HEADS, block_size=64)
        axis.imshow(shown.kept, cmap="Blues", vmin=0, vmax=1, interpolation="nearest")
    else:
        shown = viz.picture(None, mod, lengths=lengths, heads=HEADS, at_score=1.0)
        _draw_score(axis, np.asarray(shown.score))
    axis.set(xticks=(), yticks=())
    return figure


def _draw_score(axis: Axes, score: np.ndarray) -> None:
    finite = score[np.isfinite(score)]
    reach = max(float(np.abs(finite - 1.0).max()), 1e-6) if finite.size else 1.0
    axis.imshow(score, cmap="RdBu_r", vmin=1.0 - reach, vmax=1.0 + reach, interpolation="nearest")
