"""Accumulator fragments in groups of columns: what is computed for one group on the way lives shortly, in few
registers."""

from collections.abc import Iterator
from typing import Any

import cutlass.cute as cute

from flexbwd.sm90.numerics import rows_and_columns

_GROUP = 8  # elements: 4 columns of 2 rows


def groups(*fragments: cute.Tensor) -> Iterator[tuple[Any, ...]]:
    """(columns, each fragment's part [2 rows, 4 columns]) of every group; columns as `numerics.column_of` counts."""
    for start in range(0, cute.size(fragments[0]), _GROUP):
        columns = tuple(range(start // 2, (start + _GROUP) // 2))
        yield columns, *[rows_and_columns(part(f, columns)) for f in fragments]


def part(fragment: cute.Tensor, columns: tuple[int, ...]) -> cute.Tensor:
    """The elements of a group in the fragment's order."""
    return cute.make_tensor(fragment.iterator + 2 * columns[0], cute.make_layout((_GROUP,)))
