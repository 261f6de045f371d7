"""Values derived from tensors, kept until one of those tensors dies or is written to."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Generic, NamedTuple, TypeVar

from torch import Tensor

T = TypeVar("T")


class _Entry(NamedTuple):
    value: object
    tensors: tuple[weakref.ref, ...]
    versions: tuple[int, ...]


class Memory(Generic[T]):
    """The `size` values used last.

    A tensor counts as the same while it is the same object with the same version counter; inference tensors, which
    have no such counter, are never remembered. Writes that bypass the counter (`.data`, numpy views) go unnoticed, as
    they do in autograd.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._entries: OrderedDict[Hashable, _Entry] = OrderedDict()

    def get(self, key: Hashable, tensors: Sequence[Tensor], make: Callable[[], T]) -> T:
        """The value of `key` and these tensors, made now if it is not known."""
        if any(t.is_inference() for t in tensors):
            return make()
        versions = tuple([t._version for t in tensors])
        full_key = (key, *map(id, tensors))
        entry = self._entries.get(full_key)
        if entry is not None and entry.versions == versions and _alive(entry, tensors):
            self._entries.move_to_end(full_key)
            return entry.value  # type: ignore[return-value]
        value = make()
        self._entries[full_key] = _Entry(value, tuple(weakref.ref(t) for t in tensors), versions)
        self._entries.move_to_end(full_key)
        while len(self._entries) > self._size:
            self._entries.popitem(last=False)
        return value


def _alive(entry: _Entry, tensors: Sequence[Tensor]) -> bool:
    return all(ref() is t for ref, t in zip(entry.tensors, tensors, strict=True))
