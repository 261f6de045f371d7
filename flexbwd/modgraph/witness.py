"""The quick way to see that a callable is what it was: a few identities instead of a whole fingerprint.

A witness exists for plain functions whose code reaches only constants, tensors, trusted modules and other such
functions, through closure cells, defaults and globals. Whatever else a callable may be, it is fingerprinted at every
call.
"""

from __future__ import annotations

import weakref
from types import CellType, CodeType, FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor

from .bytecode import Chains, recipe_of
from .locate import is_trusted_module

_CONSTANTS = frozenset((int, bool, float, str, bytes, type(None), torch.dtype, torch.device))
_TENSORS = (Tensor, torch.nn.Parameter)
_MISSING = object()
_MANY = 64


class _Unvouched(Exception):
    """Something reached is mutable, or its reading cannot be followed."""


class Witness:
    """What `fn` and the functions it calls held when they were traced."""

    __slots__ = ("_cells", "_functions", "_globals", "_tensors")

    def __init__(self, fn: FunctionType) -> None:
        self._functions: list[tuple[weakref.ref[FunctionType], CodeType, Any]] = []
        self._cells: list[tuple[CellType, Any]] = []
        self._globals: list[tuple[dict[str, Any], str, Any]] = []
        self._tensors: list[tuple[weakref.ref[Tensor], tuple[Any, ...]]] = []
        self._function(fn, {})

    @classmethod
    def of(cls, mod: Any) -> Witness | None:
        """A witness of `mod`, or None where none can be given."""
        if type(mod) is not FunctionType:
            return None
        try:
            return cls(mod)
        except _Unvouched:
            return None

    def holds(self) -> bool:
        """Is everything still the same object, and every tensor of the same facts?"""
        for function, code, defaults in self._functions:
            fn = function()
            if (
                fn is None
                or fn.__code__ is not code
                or fn.__defaults__ is not defaults
                or fn.__kwdefaults__
                or fn.__dict__
            ):
                return False
        try:
            for cell, held in self._cells:
                if cell.cell_contents is not _held(held):
                    return False
        except ValueError:  # the cell was emptied
            return False
        for scope, name, held in self._globals:
            if scope.get(name, _MISSING) is not _held(held):
                return False
        for tensor, facts in self._tensors:
            t = tensor()
            if t is None or _facts(t) != facts:
                return False
        return True

    def _function(self, fn: FunctionType, seen: dict[int, None]) -> None:
        if id(fn) in seen:
            return
        if len(seen) > _MANY or fn.__dict__ or fn.__kwdefaults__:
            raise _Unvouched
        seen[id(fn)] = None
        recipe = recipe_of(fn.__code__)
        if recipe.opaque:
            raise _Unvouched
        self._functions.append((weakref.ref(fn), fn.__code__, fn.__defaults__))
        for default in fn.__defaults__ or ():
            self._value(default, seen)
        for index, _, chains in recipe.cells:
            cell = fn.__closure__[index]  # type: ignore[index]
            try:
                held = cell.cell_contents
            except ValueError:
                raise _Unvouched from None
            self._cells.append((cell, _hold(held)))
            self._reached(held, chains, seen)
        for name, chains in recipe.globals:
            held = fn.__globals__.get(name, _MISSING)
            self._globals.append((fn.__globals__, name, _hold(held)))
            if held is not _MISSING:
                self._reached(held, chains, seen)

    def _reached(self, held: Any, chains: Chains, seen: dict[int, None]) -> None:
        if type(held) is ModuleType and is_trusted_module(held.__name__):
            return
        if any(chain.attrs for chain in chains) and type(held) not in _TENSORS:
            raise _Unvouched
        self._value(held, seen)

    def _value(self, held: Any, seen: dict[int, None]) -> None:
        kind = type(held)
        if kind is FunctionType:
            if held.__closure__ is not None or not is_trusted_module(held.__module__):
                self._function(held, seen)
        elif kind in _TENSORS:
            self._tensors.append((weakref.ref(held), _facts(held)))
        elif kind not in _CONSTANTS:
            raise _Unvouched


def _hold(obj: Any) -> Any:
    """What to keep of an object: tensors and functions weakly, so that a witness keeps nothing alive."""
    return weakref.ref(obj) if type(obj) in _TENSORS or type(obj) is FunctionType else obj


def _held(kept: Any) -> Any:
    return kept() if type(kept) is weakref.ref else kept


def _facts(t: Tensor) -> tuple[Any, ...]:
    return (t.dtype, t.shape, t.stride(), t.device, t.requires_grad)
