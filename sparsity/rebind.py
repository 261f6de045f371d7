"""The tensors a callable holds (closure cells, defaults, partials, attributes), and the same callable holding others.

Of an object only those attributes count whose names occur in the code that runs: a bound method of a model holds the
buffer it reads, not the model's weights.
"""

from __future__ import annotations

import copy
import functools
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

_NUMBERS = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)
_LEAVES = (*_NUMBERS, type, types.ModuleType, types.BuiltinFunctionType)
_MODULE_TABLES = ("_parameters", "_buffers", "_modules")


def captured_tensors(fn: Any) -> list[Tensor]:
    """Every tensor that `fn` holds, each once, in a fixed order. Tensors read from globals are not held."""
    return list(_Reach(fn).tensors.values())


def global_tensors(fn: Any) -> dict[str, Tensor]:
    """Tensors that functions reachable from `fn` read as globals, by name."""
    return _Reach(fn).globals


def map_tensors(fn: Any, convert: Callable[[Tensor], Tensor]) -> Any:
    """`fn` with every tensor it holds converted; `fn` itself, untouched, where `convert` changes none.

    Functions are made anew around the same code with new closure cells; partials, methods, containers and callable
    objects (also modules) are copied. What holds no converted tensor stays the very same object.
    """
    reach = _Reach(fn)
    changed = {key: new for key, t in reach.tensors.items() if (new := convert(t)) is not t}
    return _Rebuild(reach, changed).run(fn) if changed else fn


def _original(fn: Any) -> Any:
    """The function inside a `torch.compile` wrapper: a mask is traced by us anyway."""
    while callable(inner := getattr(fn, "_torchdynamo_orig_callable", None)):
        fn = inner
    return fn


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            yield from _names(const)


def _cells(fn: types.FunctionType) -> Iterator[Any]:
    for cell in fn.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # an empty cell: its variable is not assigned yet
            continue


class _Reach:
    """What a callable reaches: `tensors` by id, tensors read as `globals`, and all attribute `names` in its code."""

    def __init__(self, root: Any) -> None:
        self.names: set[str] = {"__call__", "forward"}
        known = 0
        while known != len(self.names):  # a method found late may read attributes of an object seen before
            known = len(self.names)
            self.tensors: dict[int, Tensor] = {}
            self.globals: dict[str, Tensor] = {}
            self._seen: set[int] = set()
            self._keep_alive: list[Any] = []
            self._visit(root)

    def parts(self, item: Any) -> Iterator[Any]:
        """What `item` holds directly, in a fixed order."""
        if isinstance(item, types.FunctionType):
            item = _original(item)
            yield from (*_cells(item), *(item.__defaults__ or ()), *(item.__kwdefaults__ or {}).values())
        elif isinstance(item, functools.partial):
            yield from (item.func, *item.args, *item.keywords.values())
        elif isinstance(item, types.MethodType):
            yield from (item.__func__, item.__self__)
        elif isinstance(item, dict):
            yield from item.values()
        elif isinstance(item, (list, tuple)):
            yield from item
        else:
            yield from self.attributes(item).values()

    def attributes(self, item: Any) -> dict[str, Any]:
        """Instance attributes that the code may read."""
        own = set(getattr(item, "__dict__", ()))
        own.update(*(c.__dict__.get("__slots__", ()) for c in type(item).__mro__))
        if isinstance(item, torch.nn.Module):
            own.update(*(item.__dict__.get(table, ()) for table in _MODULE_TABLES))
        return {name: getattr(item, name) for name in sorted(own & self.names) if hasattr(item, name)}

    def _visit(self, item: Any) -> None:
        if isinstance(item, Tensor):
            self.tensors.setdefault(id(item), item)
        if isinstance(item, (Tensor, *_LEAVES)) or id(item) in self._seen:
            return
        self._seen.add(id(item))
        self._keep_alive.append(item)  # an id names an object only while that lives
        if isinstance(item, types.FunctionType):
            self._read_code(_original(item))
        elif not isinstance(item, (functools.partial, types.MethodType, dict, list, tuple)):
            self._read_methods(type(item))
        for part in self.parts(item):
            self._visit(part)

    def _read_code(self, fn: types.FunctionType) -> None:
        for name in _names(fn.__code__):
            self.names.add(name)
            value = fn.__globals__.get(name)
            if isinstance(value, Tensor):
                self.globals[name] = value
            elif isinstance(value, types.FunctionType) and id(value) not in self._seen:
                self._seen.add(id(value))
                self._read_code(value)

    def _read_methods(self, cls: type) -> None:
        for name in tuple(self.names):
            member = getattr(cls, name, None)
            member = member.fget if isinstance(member, property) else member
            if isinstance(member, types.FunctionType) and not member.__module__.startswith("torch."):
                self.names.update(_names(member.__code__))


class _Rebuild:
    """Copies of the objects that reach a changed tensor; cycles (a function that calls itself) are kept."""

    def __init__(self, reach: _Reach, changed: dict[int, Tensor]) -> None:
        self._reach = reach
        self._changed = changed
        self._done: dict[int, Any] = {}

    def run(self, item: Any) -> Any:
        """`item`, or its copy when it leads to a changed tensor."""
        if isinstance(item, Tensor):
            return self._changed.get(id(item), item)
        if id(item) in self._done:
            return self._done[id(item)]
        if not self._leads_to_change(item, set()):
            return item
        made = self._make(item)
        self._done[id(item)] = made
        return made

    def _leads_to_change(self, item: Any, seen: set[int]) -> bool:
        if isinstance(item, Tensor):
            return id(item) in self._changed
        if isinstance(item, _LEAVES) or id(item) in seen:
            return False
        seen.add(id(item))
        return any(self._leads_to_change(part, seen) for part in self._reach.parts(item))

    def _make(self, item: Any) -> Any:
        if isinstance(item, types.FunctionType):
            return self._function(item)
        if isinstance(item, functools.partial):
            keywords = {k: self.run(v) for k, v in item.keywords.items()}
            return type(item)(self.run(item.func), *map(self.run, item.args), **keywords)
        if isinstance(item, types.MethodType):
            return types.MethodType(self.run(item.__func__), self.run(item.__self__))
        if isinstance(item, dict):
            made = copy.copy(item)
            made.update({k: self.run(v) for k, v in item.items()})
            return made
        if isinstance(item, list):
            return [self.run(v) for v in item]
        if isinstance(item, tuple):
            parts = [self.run(v) for v in item]
            return type(item)(*parts) if hasattr(item, "_fields") else tuple(parts)
        return self._object(item)

    def _function(self, wrapped: types.FunctionType) -> types.FunctionType:
        fn = _original(wrapped)
        cells = tuple(types.CellType() for _ in fn.__closure__ or ())
        made = types.FunctionType(fn.__code__, fn.__globals__, fn.__name__, None, cells or None)
        self._done[id(wrapped)] = self._done[id(fn)] = made  # before the contents: they may lead back here
        for new, old in zip(cells, fn.__closure__ or (), strict=True):
            try:
                new.cell_contents = self.run(old.cell_contents)
            except ValueError:
                continue  # stays empty, like the original
        made.__defaults__ = fn.__defaults__ and tuple(self.run(v) for v in fn.__defaults__)
        made.__kwdefaults__ = fn.__kwdefaults__ and {k: self.run(v) for k, v in fn.__kwdefaults__.items()}
        made.__dict__.update(fn.__dict__)
        made.__qualname__, made.__doc__, made.__module__ = fn.__qualname__, fn.__doc__, fn.__module__
        made.__annotations__ = fn.__annotations__
        return made

    def _object(self, item: Any) -> Any:
        made = copy.copy(item)
        self._done[id(item)] = made
        for name, value in self._reach.attributes(item).items():
            new = self.run(value)
            if new is not value:
                object.__setattr__(made, name, new)
        return made
