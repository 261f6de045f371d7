"""How to reach a captured tensor from the callable, so that torch.compile reads it as an input of its graph."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class CapturePath:
    """Attribute and item steps from a callable to one of its captured tensors.

    Attributes:
        steps: ("attr", name) or ("item", key), in order.  name: as the user would write it.
    """

    steps: tuple[tuple[str, Any], ...]
    name: str

    def read(self, mod: Any) -> Tensor:
        """The tensor as it is now. Straight-line Python once torch.compile unrolls the steps."""
        for kind, key in self.steps:
            mod = getattr(mod, key) if kind == "attr" else mod[key]
        return mod


_EXPANDED = {
    "cell": lambda key: (("attr", "__closure__"), ("item", key[0]), ("attr", "cell_contents")),
    "global": lambda key: (("attr", "__globals__"), ("item", key)),
    "default": lambda key: (("attr", "__defaults__"), ("item", key[0])),
    "kwdefault": lambda key: (("attr", "__kwdefaults__"), ("item", key)),
    "attr": lambda key: (("attr", key),),
    "item": lambda key: (("item", key),),
}
_HIDDEN = ("__func__", "func", "_torchdynamo_orig_callable", "_orig_mod", "__dict__")


def capture_path(path: Any) -> CapturePath:
    """The public form of a fingerprint's path."""
    links = []
    while path is not None:
        path, kind, key = path
        links.append((kind, key))
    steps: tuple[tuple[str, Any], ...] = ()
    name = ""
    for kind, key in reversed(links):
        steps += _EXPANDED[kind](key)
        name = _named(name, kind, key)
    return CapturePath(steps, name or "captured tensor")


def _named(name: str, kind: str, key: Any) -> str:
    if kind in ("cell", "default"):
        return key[1]
    if kind in ("global", "kwdefault"):
        return str(key)
    if kind == "item" or key.isdigit():  # a ParameterList holds attributes named by numbers
        return f"{name}[{int(key) if kind == 'attr' else key!r}]"
    if key == "__self__":
        return "self"
    return name if key in _HIDDEN else f"{name or 'self'}.{key}"
