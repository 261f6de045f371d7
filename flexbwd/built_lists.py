"""Block lists built from a mask_mod alone, and found again.

Looking at contents on a GPU would wait for it: there the same tensors, not written to since, count as equal first.
"""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flexbwd.modgraph.analyze import depends
from flexbwd.modgraph.ir import topological
from flexbwd.plan import BlockLists, Plan
from flexbwd.problem import Problem
from flexbwd.sparsity.build import build_lists
from flexbwd.sparsity.tensors import IndexBase


def build(plan: Plan, captures: Sequence[Tensor], problem: Problem, base: IndexBase | None) -> BlockLists:
    """Block lists of the plan's mask; batch and heads are broadcast unless the mask reads them."""
    assert plan.mods.mask is not None
    batch, heads = broadcast(plan, problem.batch, problem.q_heads)
    lengths = (problem.q_len, problem.kv_len)
    return build_lists(
        plan.mods.mask, captures, batch, heads, *lengths, plan.block_size, index_base=base, device=problem.device
    )


def broadcast(plan: Plan, batch: int, heads: int) -> tuple[int | None, int | None]:
    """B and H of the lists: None where the mask does not read it."""
    assert plan.mods.mask is not None
    reads = depends([plan.mods.mask])[plan.mods.mask]
    return (batch if "b" in reads else None), (heads if "h" in reads else None)


class BuiltLists:
    """Block lists by plan, lengths and the contents of the captured tensors the mask reads."""

    def __init__(self, entries: int = 32) -> None:
        self._entries = entries
        self._table: OrderedDict[tuple, list[_Saved]] = OrderedDict()
        self._reads: weakref.WeakKeyDictionary[Plan, tuple[int, ...]] = weakref.WeakKeyDictionary()
        self._lock = threading.Lock()

    def find_or_build(
        self, plan: Plan, number: int, captures: Sequence[Tensor], problem: Problem, base: IndexBase | None
    ) -> BlockLists:
        """Lists of the mask of `plan`, whose id is `number`; equal contents give the very same lists."""
        offsets = () if base is None else (base.b_off, base.h_off, base.q_base is None, base.kv_base is None)
        values = [captures[s] for s in self._slots(plan)]
        if base is not None:
            values += [t for t in (base.q_base, base.kv_base) if t is not None]
        p = problem
        key = (number, p.batch, p.q_heads, p.q_len, p.kv_len, p.device, offsets)
        with self._lock:
            for saved in self._table.get(key, ()):
                if saved.serve(values):
                    self._table.move_to_end(key)
                    return saved.lists
        lists = build(plan, captures, problem, base)
        with self._lock:
            self._table.setdefault(key, []).insert(0, _Saved.of(values, lists))
            del self._table[key][4:]
            self._table.move_to_end(key)
            if len(self._table) > self._entries:
                self._table.popitem(last=False)
        return lists

    def _slots(self, plan: Plan) -> tuple[int, ...]:
        """Slots of the captured tensors that the mask reads."""
        found = self._reads.get(plan)
        if found is None:
            assert plan.mods.mask is not None
            slots = {int(n.attr) for n in topological([plan.mods.mask]) if n.op == "load"}  # type: ignore[call-overload]
            found = self._reads[plan] = tuple(sorted(slots))
        return found


@dataclass(frozen=True, eq=False)
class _Saved:
    """Lists, and the tensors that they were made from: copies, and the originals with their versions."""

    contents: tuple[Tensor, ...]
    originals: tuple[tuple[weakref.ref[Tensor], int], ...]
    lists: BlockLists

    @classmethod
    def of(cls, values: Sequence[Tensor], lists: BlockLists) -> _Saved:
        originals = tuple((weakref.ref(v), _version(v)) for v in values)
        return cls(tuple(v.detach().clone() for v in values), originals, lists)

    def serve(self, values: Sequence[Tensor]) -> bool:
        """Would the lists come out the same for `values`?"""
        if all(
            v.is_cuda and r() is v and n == _version(v) >= 0 for (r, n), v in zip(self.originals, values, strict=True)
        ):
            return True
        return all(map(same_contents, self.contents, values))


def _version(t: Tensor) -> int:
    """How often `t` was written to; -1 where torch does not count."""
    return -1 if t.is_inference() else t._version


def same_contents(x: Tensor, y: Tensor) -> bool:
    return x.dtype == y.dtype and x.shape == y.shape and torch.equal(x, y)


built = BuiltLists()
