"""Walks on the host: which scores of a call are visited. What a kernel is static about is `kind_of(walk)`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from flexbwd.sm90.lists import TileLists

_FAR = 1 << 28  # beyond any length: a band limit is clamped to it, so that tile arithmetic stays within 32 bits


@dataclass(frozen=True)
class Dense:
    """Every score."""


@dataclass(frozen=True)
class Band:
    """Scores with lo <= q - kv <= hi; None is no limit. Causal is lo 0, a causal window of w + 1 keys lo 0, hi w."""

    lo: int | None = None
    hi: int | None = None

    @property
    def limits(self) -> tuple[int, int]:
        """(lo, hi) as the kernels take them; a missing one is 0 and never read."""
        lo, hi = (0 if x is None else max(-_FAR, min(_FAR, x)) for x in (self.lo, self.hi))
        return lo, hi


@dataclass(frozen=True, eq=False)
class Lists:
    """The tiles of block lists, at the granularity of the kernel that walks them."""

    lists: TileLists


Walk = Dense | Band | Lists
CAUSAL = Band(0, None)


class WalkKind(NamedTuple):
    """The static part of a walk: a field of kernel configurations."""

    lists: bool = False
    has_lo: bool = False
    has_hi: bool = False

    @property
    def band(self) -> bool:
        return self.has_lo or self.has_hi


DENSE = WalkKind()


def kind_of(walk: Walk) -> WalkKind:
    """Limits are run-time values; that there are any is static."""
    if isinstance(walk, Band):
        return WalkKind(False, walk.lo is not None, walk.hi is not None)
    return WalkKind(lists=isinstance(walk, Lists))
