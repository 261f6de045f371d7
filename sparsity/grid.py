"""The grid of mask blocks over a score matrix, and its walk in strips of bounded size."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from numbers import Integral

import numpy as np
import torch
from torch import Tensor

from flexbwd.errors import MaskError

from .tensors import IndexBase

Array = np.ndarray

_STRIP_ROWS = 64
_STRIP_CELLS = 2**18  # blocks classified at a time


@dataclass(frozen=True, eq=False)
class Axis:
    """One dimension cut into blocks: global coordinates of each block's first and last real element."""

    length: int
    block: int
    first: Array  # int64 [blocks]
    last: Array  # int64 [blocks]

    @property
    def blocks(self) -> int:
        return len(self.first)

    @property
    def sizes(self) -> Array:
        """Real elements of each block."""
        return self.last - self.first + 1

    def positions(self, blocks: slice) -> Array:
        """Global coordinates of all real elements of consecutive blocks."""
        sizes = self.sizes[blocks]
        local = np.arange(int(sizes.sum())) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        return np.repeat(self.first[blocks], sizes) + local

    @classmethod
    def make(cls, length: int, block: int, base: Tensor | None, name: str) -> Axis:
        """Raises MaskError when `base` does not hold one integer per block."""
        start = np.arange(0, length, block, dtype=np.int64)
        stop = np.minimum(start + block, length)
        if base is None:
            return cls(length, block, start, stop - 1)
        if base.shape != start.shape or base.dtype not in (torch.int32, torch.int64):
            raise MaskError(
                f"index_base.{name} has shape {tuple(base.shape)} and dtype {base.dtype}: it must be int32 "
                f"[{len(start)}], one number per block of {block} of the length {length}"
            )
        shift = base.detach().cpu().numpy().astype(np.int64)
        return cls(length, block, start + shift, stop - 1 + shift)


@dataclass(frozen=True, eq=False)
class BlockGrid:
    """All blocks of all (batch, head) pairs that differ; `lead` counts pairs, batch-major."""

    b: Array  # int64 [lead] global batch coordinates
    h: Array  # int64 [lead] global head coordinates
    lead_shape: tuple[int, int]  # (B|1, H|1) computed
    full_shape: tuple[int, int]  # (B|1, H|1) handed out: the same lists for all that do not differ
    q: Axis
    kv: Axis

    @classmethod
    def make(
        cls,
        batches: tuple[int | None, bool],
        heads: tuple[int | None, bool],
        lengths: tuple[int, int],
        block_size: tuple[int, int],
        base: IndexBase | None,
    ) -> BlockGrid:
        """`batches`, `heads`: the number asked for (None: broadcast), and whether the mask differs along it."""
        base = base or IndexBase()
        shape = tuple(n if n is not None and differs else 1 for n, differs in (batches, heads))
        full = tuple(1 if n is None else n for n, _ in (batches, heads))
        b, h = np.meshgrid(np.arange(shape[0]) + base.b_off, np.arange(shape[1]) + base.h_off, indexing="ij")
        return cls(
            b.ravel().astype(np.int64),
            h.ravel().astype(np.int64),
            shape,  # type: ignore[arg-type]
            full,  # type: ignore[arg-type]
            Axis.make(lengths[0], block_size[0], base.q_base, "q_base"),
            Axis.make(lengths[1], block_size[1], base.kv_base, "kv_base"),
        )

    @property
    def lead(self) -> int:
        return len(self.b)

    def strips(self, cells: int | None = None) -> Iterator[tuple[slice, slice]]:
        """(lead, rows) slices of about `cells` blocks, at least one row, that visit every row of blocks once."""
        cells = _STRIP_CELLS if cells is None else cells
        width = max(1, self.kv.blocks)
        rows = max(1, min(_STRIP_ROWS, cells // width, self.q.blocks))
        leads = max(1, cells // (rows * width))
        for lead in range(0, self.lead, leads):
            for row in range(0, self.q.blocks, rows):
                yield slice(lead, min(lead + leads, self.lead)), slice(row, min(row + rows, self.q.blocks))


def check_block_size(block_size: int | tuple[int, int]) -> tuple[int, int]:
    """`(q, kv)` of BLOCK_SIZE; MaskError unless both are positive multiples of 16."""
    sizes = tuple(block_size) if isinstance(block_size, (tuple, list)) else (block_size, block_size)
    if len(sizes) != 2 or any(not isinstance(s, int) or s <= 0 or s % 16 for s in sizes):
        raise MaskError(
            f"BLOCK_SIZE={block_size!r}: it must be a positive multiple of 16, or a pair (q, kv) of them; 128 and 64 "
            "are the fast ones"
        )
    return int(sizes[0]), int(sizes[1])


def check_sizes(B: int | None, H: int | None, Q_LEN: int, KV_LEN: int) -> None:
    """MaskError unless lengths, and B and H where given, are integers >= 0."""
    for name, value in (("B", B), ("H", H), ("Q_LEN", Q_LEN), ("KV_LEN", KV_LEN)):
        optional = name in ("B", "H")
        if value is None and optional:
            continue
        if isinstance(value, bool) or not isinstance(value, Integral) or value < 0:
            rule = "an integer >= 0" + (", or None to broadcast" if optional else "")
            raise MaskError(f"{name}={value!r}: it must be {rule}; pass the size of the attention problem")
