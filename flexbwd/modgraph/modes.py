"""The two modes a mod runs under: indexing, conversions and mutation as Python sees them, then every aten call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from flexbwd.errors import ModShapeError

from .importer import Importer
from .recorder import plain_torch

_CONVERSIONS: dict[str, Callable[[Any], Any]] = {
    "__bool__": bool,
    "__int__": int,
    "__float__": float,
    "__index__": int,
    "__long__": int,
    "__complex__": complex,
    "item": lambda x: x,
    "tolist": lambda x: x,
    "is_nonzero": bool,
}
_LEAVES_TORCH = ("numpy", "__array__", "__dlpack__", "__contains__", "data_ptr", "__reduce_ex__", "__deepcopy__")
_LITERALS = (torch.tensor, torch.as_tensor, torch.asarray, Tensor.new_tensor)
_INDEX = torch.ops.aten.index.Tensor


class RecordMode(TorchDispatchMode):
    """Hands every aten call to the recorder."""

    def __init__(self, recorder: Importer) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.recorder.dispatch(func, args, kwargs or {}, self)


class IndexMode(TorchFunctionMode):
    """Turns `T[h, q]` with traced scalars into a load, and refuses what a kernel has no meaning for."""

    def __init__(self, recorder: Importer) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if func is Tensor.__getitem__:
            return self._getitem(*args)
        if name in _CONVERSIONS and args and isinstance(args[0], Tensor):
            return self._converted(name, args[0])
        if name in _LEAVES_TORCH and args and isinstance(args[0], Tensor):
            raise self.recorder.data_dependent(name.strip("_"))
        if _mutates(name, kwargs) and any(isinstance(a, Tensor) for a in (*args, *kwargs.values())):
            raise self.recorder.mutation(_spelled(name))
        if func in _LITERALS:
            return self._literal(func, args, kwargs)
        return func(*args, **kwargs)

    def _converted(self, name: str, tensor: Tensor) -> Any:
        value = self.recorder.value(tensor)
        if value.literal is None or value.literal.numel() != 1:
            raise self.recorder.data_dependent(_spelled(name), captured=not value.is_indexed)
        with plain_torch():
            number = value.literal.item()
        return _CONVERSIONS[name](number)

    def _literal(self, func: Any, args: Any, kwargs: Any) -> Any:
        if any(isinstance(a, Tensor) for a in (*args[:2], *kwargs.values())) and func is not Tensor.new_tensor:
            return func(*args, **kwargs)
        self.recorder.in_literal = True
        given = (*args, *(kwargs[n] for n in ("data", "obj") if n in kwargs))
        self.recorder.literal_data = given[1 if func is Tensor.new_tensor else 0]
        try:
            return func(*args, **kwargs)
        finally:
            self.recorder.in_literal = False

    def _getitem(self, tensor: Tensor, index: Any) -> Tensor:
        items = list(index) if isinstance(index, tuple) else [index]
        if any(isinstance(i, (list, tuple)) and any(isinstance(x, Tensor) for x in i) for i in items):
            remedy = "index with scalars: T[h, q]"
            raise self.recorder.error(ModShapeError, "a list of tensors is used as an index", remedy=remedy)
        if not any(isinstance(i, Tensor) for i in items):
            return tensor[index]
        items = _without_ellipsis(items, tensor.dim())
        basic = tuple(slice(None) if isinstance(i, Tensor) else i for i in items)
        if any(not (isinstance(i, slice) and i == slice(None)) for i in basic):
            tensor = tensor[basic]
        # what is left: one tensor or one kept dimension per non-integer entry
        kept = [i if isinstance(i, Tensor) else None for i in items if not isinstance(i, int) or isinstance(i, bool)]
        return _index_by(_index_by(tensor, kept, scalars=True), _without_scalars(kept), scalars=False)


def _without_ellipsis(items: list[Any], rank: int) -> list[Any]:
    if not any(i is Ellipsis for i in items):
        return items
    used = sum(i.dim() if isinstance(i, Tensor) and i.dtype == torch.bool else 1 for i in items if _consumes(i))
    at = next(n for n, i in enumerate(items) if i is Ellipsis)
    return [*items[:at], *[slice(None)] * (rank - used), *items[at + 1 :]]


def _consumes(item: Any) -> bool:
    return item is not None and item is not Ellipsis


def _without_scalars(kept: list[Tensor | None]) -> list[Tensor | None]:
    return [i for i in kept if i is None or i.dim()]


def _index_by(tensor: Tensor, kept: list[Tensor | None], *, scalars: bool) -> Tensor:
    """`tensor` indexed by the 0-dim entries (as by integers), or by the others (torch's advanced indexing)."""
    chosen = [i if i is not None and (i.dim() == 0) is scalars else None for i in kept]
    while chosen and chosen[-1] is None:
        chosen.pop()
    return _INDEX(tensor, chosen) if chosen else tensor


def _mutates(name: str, kwargs: Any) -> bool:
    if kwargs.get("out") is not None:
        return True
    if name.startswith("__"):
        return name in ("__setitem__", "__set__", "__delitem__") or (name.startswith("__i") and name in _IN_PLACE)
    return name.endswith("_") and not name.startswith("_")


_IN_PLACE = frozenset(
    f"__i{op}__"
    for op in ("add", "sub", "mul", "div", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift")
)


def _spelled(name: str) -> str:
    """A dunder as the user wrote it."""
    known = {
        "__bool__": "a truth value (if / and / or / not)",
        "__int__": "int()",
        "__float__": "float() or a function of math",
        "__index__": "an index, range() or slice bound",
        "__setitem__": "T[...] = value",
        "item": ".item()",
        "tolist": ".tolist()",
    }
    return known.get(name, name)
