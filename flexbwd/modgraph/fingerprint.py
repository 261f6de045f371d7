"""The fingerprint of a callable: everything its graph can depend on, as one hashable key.

Code by identity; Python numbers, strings and containers by value and type; captured tensors by dtype, shape, stride,
device and requires_grad (never by value), and by which of them are one object. Anything else makes the fingerprint
`opaque`: such a callable is traced anew at every call, so that a graph is never stale.
"""

from __future__ import annotations

import builtins
import enum
import functools
from collections import OrderedDict
from collections.abc import Callable
from types import BuiltinFunctionType, FunctionType, MethodDescriptorType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor

from .bytecode import Chain, Chains, recipe_of
from .locate import is_trusted_module, unwrapped_attr

Path = tuple[Any, str, Any] | None  # (parent, kind, key); None is the callable itself

_DEPTH = 12
_PARTS = 4096
_ITEMS = 256
_UNSAFE_BUILTINS = frozenset(
    getattr(builtins, name)
    for name in ("globals", "locals", "vars", "eval", "exec", "compile", "open", "input", "id", "hash", "__import__")
)
_CHANGING_ATTRS = ("grad", "grad_fn", "_version", "is_leaf", "storage_offset", "data_ptr", "untyped_storage")


class Fingerprint:
    """Walks a callable once; use `key` and `tensors` afterwards.

    Attributes:
        key: hashable; equal keys mean equal graphs, unless `opaque`.
        tensors: the captured tensors that were found, each once.  paths: how each was reached.
        held: objects named in the key by identity.
    """

    __slots__ = ("_depth", "_functions", "_ids", "held", "opaque", "parts", "paths", "tensors")

    def __init__(self, mod: Any) -> None:
        self.parts: list[Any] = []
        self.tensors: list[Tensor] = []
        self.paths: list[Path] = []
        self.held: list[Any] = []
        self.opaque = False
        self._ids: dict[int, int] = {}
        self._functions: dict[tuple[int, int], int] = {}
        self._depth = 0
        self.value(mod, None, called=True)

    @property
    def key(self) -> tuple[Any, ...]:
        return tuple(self.parts)

    # -- values ------------------------------------------------------------------------------------------------------
    def value(self, obj: Any, path: Path, called: bool = False) -> None:
        """Add one object to the key."""
        kind = type(obj)
        handler = _HANDLERS.get(kind)
        if handler is not None:
            handler(self, obj, path)
        else:
            self._other(obj, kind, path, called)

    def give_up(self, obj: Any) -> None:
        self.parts.append(type(obj))
        self.opaque = True

    def tensor(self, t: Tensor, path: Path) -> None:
        seen = self._ids.get(id(t))
        if seen is not None:
            self.parts.append(seen)
            return
        self._ids[id(t)] = len(self.tensors)
        self.tensors.append(t)
        self.paths.append(path)
        if t.layout is not torch.strided or t.is_nested:
            self.give_up(t)
            return
        self.parts += (type(t), t.dtype, t.shape, t.stride(), t.device, t.requires_grad)

    def _plain(self, obj: Any, path: Path) -> None:
        self.parts += (type(obj), obj)

    def _float(self, obj: float, path: Path) -> None:
        # 0.0 == -0.0 and nan != nan: the text tells them apart
        self.parts += (float, obj if obj == obj and obj != 0 else repr(obj))

    def _by_text(self, obj: Any, path: Path) -> None:
        self.parts += (type(obj), repr(obj))

    def _slice(self, obj: slice, path: Path) -> None:
        self._sequence((obj.start, obj.stop, obj.step), path)

    def _sequence(self, items: Any, path: Path) -> None:
        self.parts += (type(items), len(items))
        if not self._enter(items):
            return
        for i, item in enumerate(items):
            self.value(item, (path, "item", i))
        self._depth -= 1

    def _mapping(self, items: Any, path: Path) -> None:
        self.parts += (type(items), len(items))
        if not self._enter(items):
            return
        for k, item in items.items():
            self.value(k, None)
            self.value(item, (path, "item", k))
        self._depth -= 1

    def _set(self, items: Any, path: Path) -> None:
        if all(type(i) in (int, str, bool, bytes) for i in items) and len(items) <= _ITEMS:
            self.parts += (type(items), frozenset((type(i), i) for i in items))
        else:
            self.give_up(items)

    def _enter(self, items: Any) -> bool:
        if self._depth >= _DEPTH or len(items) > _ITEMS or len(self.parts) > _PARTS:
            self.give_up(items)
            return False
        self._depth += 1
        return True

    # -- callables -----------------------------------------------------------------------------------------------------
    def _function(self, fn: FunctionType, path: Path, bound: Any = None, bound_path: Path = None) -> None:
        if "_torchdynamo_orig_callable" in fn.__dict__:
            self.value(fn._torchdynamo_orig_callable, (path, "attr", "_torchdynamo_orig_callable"), called=True)  # type: ignore[attr-defined]
            return
        if fn.__closure__ is None and is_trusted_module(fn.__module__):
            self.parts.append(fn)
            return
        mark = (id(fn), id(bound))
        seen = self._functions.get(mark)
        if seen is not None or self._depth >= _DEPTH or len(self.parts) > _PARTS:
            self.opaque = self.opaque or seen is None
            self.parts += (FunctionType, seen)
            return
        self._functions[mark] = len(self._functions)
        self._depth += 1
        recipe = recipe_of(fn.__code__)
        self.opaque = self.opaque or recipe.opaque
        self.held.append(recipe)
        self.parts += (FunctionType, id(recipe.code))
        self._defaults(fn, path)
        if fn.__dict__:
            self._mapping(fn.__dict__, (path, "attr", "__dict__"))
        for index, name, chains in recipe.cells:
            cell = fn.__closure__[index]  # type: ignore[index]
            try:
                obj = cell.cell_contents
            except ValueError:  # not assigned yet
                self.parts.append("empty cell")
                continue
            self._chains(obj, chains, (path, "cell", (index, name)))
        self._globals(fn, recipe.globals, path)
        if bound is not None:
            self._chains(bound, recipe.self_chains, bound_path)
        self._depth -= 1

    def _defaults(self, fn: FunctionType, path: Path) -> None:
        defaults = fn.__defaults__ or ()
        first = fn.__code__.co_argcount - len(defaults)
        for i, default in enumerate(defaults):
            self.value(default, (path, "default", (i, fn.__code__.co_varnames[first + i])))
        for name, default in (fn.__kwdefaults__ or {}).items():
            self.value(default, (path, "kwdefault", name))

    def _globals(self, fn: FunctionType, names: tuple[tuple[str, Chains], ...], path: Path) -> None:
        scope = fn.__globals__
        for name, chains in names:
            if name in scope:
                obj = scope[name]
                if type(obj) is ModuleType and is_trusted_module(obj.__name__):
                    self.parts.append(obj)
                else:
                    self._chains(obj, chains, (path, "global", name))
            else:
                obj = getattr(builtins, name, None)
                self.parts.append(name)
                if obj in _UNSAFE_BUILTINS:
                    self.opaque = True

    def _chains(self, root: Any, chains: Chains, path: Path) -> None:
        for chain in chains:
            self._chain(root, chain, path)

    def _chain(self, obj: Any, chain: Chain, path: Path) -> None:
        for name in chain.attrs:
            kind = type(obj)
            if kind is ModuleType and is_trusted_module(obj.__name__):
                break
            if kind in _DATA and hasattr(kind, name):
                self.opaque = self.opaque or name in _CHANGING_ATTRS
                break
            try:
                obj = getattr(obj, name)
            except AttributeError:
                self.give_up(obj)
                return
            path = (path, "attr", name)
        self.value(obj, path, chain.called)

    def _method(self, method: MethodType, path: Path) -> None:
        fn, bound = method.__func__, method.__self__
        if type(fn) is not FunctionType:
            self.give_up(method)
            return
        self._function(fn, (path, "attr", "__func__"), bound, (path, "attr", "__self__"))

    def _partial(self, part: functools.partial[Any], path: Path) -> None:
        self.parts.append(functools.partial)
        self.value(part.func, (path, "attr", "func"), called=True)
        self._sequence(part.args, (path, "attr", "args"))
        self._mapping(part.keywords, (path, "attr", "keywords"))

    def _builtin(self, fn: BuiltinFunctionType, path: Path) -> None:
        if is_trusted_module(fn.__module__ or ""):
            self.parts.append(fn)
            return
        owner = fn.__self__
        if owner is None or isinstance(owner, ModuleType):
            self.give_up(fn)
        elif isinstance(owner, type):
            self.parts.append(fn)
            self.opaque = self.opaque or not is_trusted_module(owner.__module__)
        else:
            self.parts.append(fn.__name__)
            self.value(owner, (path, "attr", "__self__"))

    def _module(self, module: ModuleType, path: Path) -> None:
        if is_trusted_module(module.__name__):
            self.parts.append(module)
        else:
            self.give_up(module)

    def _class(self, cls: type, path: Path) -> None:
        self.parts.append(cls)
        self.opaque = self.opaque or not is_trusted_module(cls.__module__)

    # -- everything else -----------------------------------------------------------------------------------------------
    def _other(self, obj: Any, kind: type, path: Path, called: bool) -> None:
        wrapped = unwrapped_attr(obj)
        if isinstance(obj, Tensor):
            self.tensor(obj, path)
        elif isinstance(obj, enum.Enum):
            self._plain(obj, path)
        elif wrapped:
            self.value(getattr(obj, wrapped), (path, "attr", wrapped), called=True)
        elif isinstance(obj, type):
            self._class(obj, path)
        elif isinstance(obj, tuple) and hasattr(kind, "_fields"):
            self._sequence(obj, path)
        elif kind.__module__ == "numpy" and hasattr(obj, "dtype") and getattr(obj, "ndim", 1) == 0:
            self.parts.append(kind)
            self.value(obj.item(), path)
        elif is_trusted_module(kind.__module__) and (kind.__name__ in ("ufunc", "OpOverload", "OpOverloadPacket")):
            self.parts.append(obj)
        elif isinstance(obj, torch.nn.Module) and is_trusted_module(kind.__module__):
            self._torch_module(obj, path)
        elif called and callable(obj) and not hasattr(kind, "__getitem__"):
            self._callable_object(obj, kind, path)
        else:
            self.give_up(obj)

    def _torch_module(self, module: torch.nn.Module, path: Path) -> None:
        """A container of torch.nn: all of its state."""
        self.parts.append(type(module))
        for name, part in module.__dict__.items():
            self.parts.append(name)
            if name not in ("_parameters", "_buffers", "_modules"):
                self.value(part, (path, "attr", name))
            elif self._enter(part):
                for key, child in part.items():
                    self.parts.append(key)
                    self.value(child, (path, "attr", key))
                self._depth -= 1

    def _callable_object(self, obj: Any, kind: type, path: Path) -> None:
        """An object with `__call__`, or a Module with `forward` and no hooks, that is only called."""
        self.parts.append(kind)
        name = "__call__"
        if isinstance(obj, torch.nn.Module):
            hooks = (obj._forward_hooks, obj._forward_pre_hooks, obj._backward_hooks, obj._backward_pre_hooks)
            self.opaque = self.opaque or any(hooks)
            if "forward" not in obj.__dict__ and kind.__call__ is torch.nn.Module.__call__:
                name = "forward"
        fn = getattr(kind, name, None)
        if name in getattr(obj, "__dict__", {}) or type(fn) is not FunctionType:
            self.give_up(obj)
            return
        self._function(fn, ((path, "attr", name), "attr", "__func__"), obj, path)


_PLAIN = (int, bool, str, bytes, type(None), type(Ellipsis), range, torch.dtype, torch.device, torch.layout)
_CONTAINERS = (tuple, list, torch.Size, dict, OrderedDict, set, frozenset)
#: kinds whose own attributes say nothing that the value does not
_DATA = frozenset((*_PLAIN, *_CONTAINERS, float, complex, slice, Tensor, torch.nn.Parameter))
_HANDLERS: dict[type, Callable[[Fingerprint, Any, Path], None]] = {
    **dict.fromkeys((*_PLAIN, torch.memory_format), Fingerprint._plain),
    float: Fingerprint._float,
    complex: Fingerprint._by_text,
    slice: Fingerprint._slice,
    **dict.fromkeys((tuple, list, torch.Size), Fingerprint._sequence),
    **dict.fromkeys((dict, OrderedDict), Fingerprint._mapping),
    **dict.fromkeys((set, frozenset), Fingerprint._set),
    **dict.fromkeys((Tensor, torch.nn.Parameter), Fingerprint.tensor),
    FunctionType: Fingerprint._function,
    MethodType: Fingerprint._method,
    functools.partial: Fingerprint._partial,
    BuiltinFunctionType: Fingerprint._builtin,
    ModuleType: Fingerprint._module,
    type: Fingerprint._class,
    MethodDescriptorType: Fingerprint._plain,
}
