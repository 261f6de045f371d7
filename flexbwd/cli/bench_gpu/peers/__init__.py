"""The implementations that are timed: ours and its variants, and the peers, each in a module of its own.

A module has `serves(w, variant)` and `prepare(w, given, variant)`, and imports its library only in the latter.
"""

from __future__ import annotations

import fnmatch
import importlib
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType

from torch import Tensor

from flexbwd.cli.bench_gpu.operands import Operands
from flexbwd.cli.bench_gpu.workloads import Workload
from flexbwd.errors import OptionError

OURS = "flexbwd"


def _same(t: Tensor) -> Tensor:
    return t


@dataclass(frozen=True, eq=False)
class Prepared:
    """One implementation, ready to be called on one workload.

    Attributes:
        forward: the output, attached to `leaves`.
        leaves: q, k, v and captures that are trained, in the implementation's own layout.
        grad_out: gradient of the output, in the output's layout.
        heads_first: a view `[B, H, S, D]` of a tensor in that layout.
    """

    forward: Callable[[], Tensor]
    leaves: tuple[Tensor, ...]
    grad_out: Tensor
    heads_first: Callable[[Tensor], Tensor] = _same


@dataclass(frozen=True)
class Impl:
    """An implementation by name.

    Attributes:
        label: how tables call it.
        module: of this package.
        variant: which of the module's ways.
        requires: the library that must be installed, as (import name, how to get it); none for ours and torch's.
        counts: whether it can be the best peer: it answers the same question.
    """

    name: str
    label: str
    module: str
    variant: str = ""
    requires: tuple[str, str] | None = None
    counts: bool = True

    @property
    def is_peer(self) -> bool:
        """Something else than ours."""
        return self.module != "ours"

    def missing(self) -> str | None:
        """What is not installed, or None."""
        if self.requires is None:
            return None
        try:
            found = importlib.util.find_spec(self.requires[0])
        except ModuleNotFoundError:  # of a parent package
            found = None
        return None if found is not None else f"{self.requires[1]} is not installed"

    def _code(self) -> ModuleType:
        return importlib.import_module(f"flexbwd.cli.bench_gpu.peers.{self.module}")

    def serves(self, w: Workload) -> bool:
        """Whether the workload can be put to it at all."""
        return bool(self._code().serves(w, self.variant))

    def prepare(self, w: Workload, given: Operands) -> Prepared:
        found: Prepared = self._code().prepare(w, given, self.variant)
        return found


_FA4 = ("flash_attn.cute", "flash-attn-4")
IMPLS = {
    impl.name: impl
    for impl in (
        Impl(OURS, "flexbwd", "ours"),
        Impl("fa4", "FA4, flags", "fa4", "flags", _FA4),
        Impl("fa4-mods", "FA4, mods + lists", "fa4", "mods", _FA4),
        # no mask: the documents are sequences of their own. Shown beside those that take a mask, as what it could cost
        Impl("fa4-varlen", "FA4, varlen", "fa4", "varlen", _FA4, counts=False),
        Impl("flex", "torch flex", "flex"),
        Impl("cudnn", "cuDNN", "cudnn"),
        Impl("flexbwd-deterministic", "flexbwd, deterministic", "ours", "deterministic"),
        Impl("flexbwd-learned", "flexbwd, captures trained", "ours", "learned"),
    )
}


def select(patterns: Sequence[str]) -> tuple[list[Impl], list[str]]:
    """(installed implementations that a glob matches, what is missing of the others); all for no globs."""
    dead = [p for p in patterns if not fnmatch.filter(IMPLS, p)]
    if dead:
        raise OptionError(f"--impl {' '.join(dead)} matches none of {', '.join(IMPLS)}")
    chosen = [i for i in IMPLS.values() if not patterns or any(fnmatch.fnmatch(i.name, p) for p in patterns)]
    absent = {i.label: i.missing() for i in chosen}
    return [i for i in chosen if absent[i.label] is None], [f"{k}: {v}" for k, v in absent.items() if v is not None]
