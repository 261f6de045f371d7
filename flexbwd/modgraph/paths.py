"""What a captured tensor is called in the user's own code: `slopes`, `self.bias`, `tables[1]`."""

from __future__ import annotations

from typing import Any

_HIDDEN = ("__func__", "func", "_torchdynamo_orig_callable", "_orig_mod", "__dict__")


def capture_name(path: Any) -> str:
    """The name at the end of a fingerprint's path."""
    links = []
    while path is not None:
        path, kind, key = path
        links.append((kind, key))
    name = ""
    for kind, key in reversed(links):
        name = _named(name, kind, key)
    return name or "captured tensor"


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
