"""Values derived from tensors, kept until one of those tensors dies or is written to."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


class _Entry(NamedTuple):
    value: object
    tensors: tuple[weakref.ref, ...]
    versions: tuple[int, ...]
    contents: tuple[Tensor | None, ...]  # copies of the small ones


_SMALL = 1 << 20  # elements that are compared at every call


class Memory(Generic[T]):
    """The `size` values used last.

    A tensor counts as the same while it is the same object, with the same version counter and, up to a million
    elements, the same contents: writes that bypass the counter (`.data`, numpy views) are seen. Inference tensors,
    which have no counter, are never remembered.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._entries: OrderedDict[Hashable, _Entry] = OrderedDict()

    def get(self, key: Hashable, tensors: Sequence[Tensor], make: Callable[[], T]) -> T:
        """The value of `key` and these tensors, made now if it is not known."""
        if any(t.is_inference() for t in tensors):
            return make()
        full_key = (key, *map(id, tensors))
        entry = self._entries.get(full_key)
        if entry is not None and _unchanged(entry, tensors):
            self._entries.move_to_end(full_key)
            return entry.value  # type: ignore[return-value]
        contents = tuple([t.detach().clone() if t.numel() <= _SMALL else None for t in tensors])
        versions = tuple([t._version for t in tensors])
        value = make()
        self._entries[full_key] = _Entry(value, tuple(weakref.ref(t) for t in tensors), versions, contents)
        self._entries.move_to_end(full_key)
        while len(self._entries) > self._size:
            self._entries.popitem(last=False)
        return value


def _unchanged(entry: _Entry, tensors: Sequence[Tensor]) -> bool:
    for ref, version, copy, t in zip(entry.tensors, entry.versions, entry.contents, tensors, strict=True):
        if ref() is not t or t._version != version or (copy is not None and not torch.equal(copy, t)):
            return False
    return True
