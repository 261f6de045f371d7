"""Block masks as text: one character pair per block, or per tile of blocks when the grid is too large to show."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flexbwd.errors import OptionError

from .combine import mask_name
from .lists import EMPTY, FULL, ceil_div, class_grid, map_lists

if TYPE_CHECKING:
    from .block_mask import BlockMask

GLYPHS = {"full": "█", "partial": "░", "empty": " "}


def render(mask: BlockMask, grid_size: int | tuple[int, int] = (20, 20), limit: int = 4) -> str:
    """See `BlockMask.to_string`."""
    size = _grid_size(grid_size)
    if isinstance(limit, bool) or not isinstance(limit, int) or limit < 0:
        raise OptionError(f"limit={limit!r}: it must be the number of (batch, head) pictures to show, an integer >= 0")
    pairs = list(itertools.product(range(mask.shape[0]), range(mask.shape[1])))
    pictures = []
    for b, h in pairs[:limit]:
        lists = map_lists(mask.q_to_kv, lambda t, b=b, h=h: t[b : b + 1, h : h + 1])  # type: ignore[misc]
        pictures.append(f"({b}, {h})\n{picture(class_grid(lists, mask.kv_blocks)[0, 0].cpu(), size)}")
    if len(pairs) > limit:
        pictures.append(f"... {len(pairs) - limit} more: to_string(limit=...), or choose one with mask[batch, head]")
    return "\n\n".join(pictures)


def picture(classes: Tensor, grid_size: tuple[int, int] | None = (20, 20)) -> str:
    """One `[q blocks, kv blocks]` grid of block classes in at most `grid_size` rows and columns (None: all of them).

    A tile of several blocks is full or empty when all its blocks are, else partial.
    """
    rows, columns = classes.shape
    if not rows or not columns:
        return f"(no blocks: {rows} x {columns})"
    steps = (1, 1) if grid_size is None else (ceil_div(rows, grid_size[0]), ceil_div(columns, grid_size[1]))
    full, empty = _tiles(classes == FULL, steps), _tiles(classes == EMPTY, steps)
    lines = []
    for is_full, is_empty in zip(full.tolist(), empty.tolist(), strict=True):
        kinds = ("full" if f else "empty" if e else "partial" for f, e in zip(is_full, is_empty, strict=True))
        lines.append("".join(GLYPHS[kind] * 2 for kind in kinds))
    return "\n".join(lines)


def summary(mask: BlockMask) -> str:
    """The `repr`: sizes, sparsity and mask_mod, one a line."""
    shapes = {name: _shape(t) for name, t in zip(mask.q_to_kv._fields, mask.q_to_kv, strict=True)}
    lines = [f"shape={mask.shape}", f"block_size={mask.block_size}", f"sparsity={mask.sparsity():.2f}%"]
    lines += [f"q_to_kv.{name}={shape}" for name, shape in shapes.items()]
    if mask.bits is not None:
        lines.append(f"bits={_shape(mask.bits.words)}")
    lines.append(f"mask_mod={'None' if mask.mask_mod is None else mask_name(mask.mask_mod)}")
    lines.append(f"device={mask.device}")
    return "BlockMask(\n" + "".join(f"    {line},\n" for line in lines) + ")"


def _shape(t: Tensor | None) -> str:
    return "None" if t is None else str(list(t.shape))


def _grid_size(grid_size: Any) -> tuple[int, int] | None:
    if grid_size == -1:
        return None
    pair = isinstance(grid_size, (tuple, list))
    size = tuple(grid_size) if pair else (grid_size, grid_size)
    if len(size) != 2 or any(isinstance(n, bool) or not isinstance(n, int) or n < 1 for n in size):
        raise OptionError(
            f"grid_size={grid_size!r}: it must be a positive integer, a pair (rows, columns), or -1 for all"
        )
    return size


def _tiles(where: Tensor, steps: tuple[int, int]) -> Tensor:
    """Whether `where` holds in every block of each tile of `steps` blocks."""
    rows, columns = where.shape
    padded = torch.nn.functional.pad(where, (0, -columns % steps[1], 0, -rows % steps[0]), value=True)
    return padded.unflatten(0, (-1, steps[0])).unflatten(2, (-1, steps[1])).all(3).all(1)
