"""Kernel configurations as plain JSON: canonical, for cache keys, and whole, to tell a worker process what to compile.

    canonical(config)       one text for equal configurations; fields that take no part in equality are left out
    to_wire(config)         everything, shared objects once: a mod's graph is a DAG and stays one
    from_wire(document)     the configuration again

Both read dataclasses, named tuples, enums, torch dtypes and plain values; anything else is refused, so that no key ever
holds an address. A class with `wire_empty = True` (a table that fills itself) is made anew on the other side. Decoding
makes only classes of flexbwd's own modules; nothing is unpickled.
"""

from __future__ import annotations

import dataclasses
import enum
import importlib
import json
from collections.abc import Mapping
from typing import Any

import torch

from flexbwd.errors import ConfigError
from flexbwd.modgraph.ir import Node, topological

PACKAGE = "flexbwd"


def canonical(value: Any) -> str:
    """`value` as one line of JSON, the same in every process."""
    return json.dumps(_Encoder(whole=False).encode(value), sort_keys=True, separators=(",", ":"))


def to_wire(value: Any) -> dict[str, Any]:
    """`value` and the objects it shares, as JSON."""
    encoder = _Encoder(whole=True)
    encoded = encoder.encode(value)
    return {"value": encoded, "shared": encoder.shared}


def from_wire(document: Mapping[str, Any]) -> Any:
    """What `to_wire` was given; equal to it, and identical objects are identical again."""
    decoder = _Decoder()
    for item in document["shared"]:
        decoder.shared.append(decoder.decode(item))
    return decoder.decode(document["value"])


def find(path: str) -> Any:
    """The object named "module:qualified.name", of flexbwd only."""
    module, _, name = path.partition(":")
    if module.partition(".")[0] != PACKAGE:
        raise ConfigError(f"{path} is not part of {PACKAGE}: only its own builders and configurations are looked up")
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    return found


def path_of(thing: Any) -> str:
    """ "module:qualified.name" of a class or a function."""
    return f"{thing.__module__}:{thing.__qualname__}"


class _Encoder:
    """Objects compared by identity (graph nodes) become references into `shared` when everything is kept."""

    def __init__(self, whole: bool) -> None:
        self.whole = whole
        self.shared: list[Any] = []
        self._place: dict[int, int] = {}

    def encode(self, value: Any) -> Any:
        if value is None or isinstance(value, (bool, str)):
            return value
        if isinstance(value, enum.Enum):
            return {"enum": path_of(type(value)), "name": value.name}
        if isinstance(value, int):
            return int(value)
        if isinstance(value, float):
            return {"float": value.hex()}
        if isinstance(value, torch.dtype):
            return {"dtype": str(value).removeprefix("torch.")}
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return self._object(value)
        return self._container(value)

    def _object(self, value: Any) -> Any:
        if "__eq__" in vars(type(value)):
            return self._fields(value)
        if not self.whole:
            raise ConfigError(f"{type(value).__name__} is compared by identity and cannot be part of a cache key")
        if id(value) not in self._place:
            # operands first: a deep graph must not become deep recursion
            for node in topological([value]) if isinstance(value, Node) else ():
                self._share(node)
            self._share(value)
        return {"ref": self._place[id(value)]}

    def _share(self, value: Any) -> None:
        if id(value) not in self._place:
            encoded = self._fields(value)
            self._place[id(value)] = len(self.shared)
            self.shared.append(encoded)

    def _fields(self, value: Any) -> Any:
        fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if self.whole or f.compare}
        return {"class": path_of(type(value)), "fields": {name: self.encode(v) for name, v in fields.items()}}

    def _container(self, value: Any) -> Any:
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            fields = {name: self.encode(v) for name, v in zip(value._fields, value, strict=True)}
            return {"class": path_of(type(value)), "fields": fields}
        if isinstance(value, tuple):
            return {"tuple": [self.encode(v) for v in value]}
        if isinstance(value, Mapping):
            return {"map": [[self.encode(k), self.encode(v)] for k, v in value.items()]}
        if self.whole and getattr(type(value), "wire_empty", False):
            return {"new": path_of(type(value))}
        if isinstance(value, (set, frozenset)):
            return {"set": sorted((self.encode(v) for v in value), key=lambda v: json.dumps(v, sort_keys=True))}
        raise ConfigError(
            f"{value!r} in a kernel configuration: only numbers, text, dtypes, enums, tuples and frozen dataclasses "
            "have a canonical form"
        )


class _Decoder:
    def __init__(self) -> None:
        self.shared: list[Any] = []

    def decode(self, item: Any) -> Any:
        if not isinstance(item, dict):
            return item
        kind = next(iter(item))
        content = item[kind]
        if kind == "ref":
            return self.shared[content]
        if kind == "float":
            return float.fromhex(content)
        if kind == "dtype":
            found = getattr(torch, content)
            return found if isinstance(found, torch.dtype) else _refuse(content)
        if kind == "enum":
            return _type(content, enum.Enum)[item["name"]]
        if kind == "new":
            return _type(content, object)()
        if kind == "tuple":
            return tuple(self.decode(v) for v in content)
        if kind == "set":
            return frozenset(self.decode(v) for v in content)
        if kind == "map":
            return {self.decode(k): self.decode(v) for k, v in content}
        return self._make(content, item["fields"])

    def _make(self, path: str, encoded: Mapping[str, Any]) -> Any:
        fields = {name: self.decode(v) for name, v in encoded.items()}
        made = find(path)
        if not isinstance(made, type):
            return _refuse(path)
        if issubclass(made, tuple) and hasattr(made, "_fields"):
            return made(**fields)
        if not dataclasses.is_dataclass(made):
            return _refuse(path)
        init = {f.name for f in dataclasses.fields(made) if f.init}
        return made(**{name: v for name, v in fields.items() if name in init})


def _type(path: str, base: type) -> Any:
    found = find(path)
    return found if isinstance(found, type) and issubclass(found, base) else _refuse(path)


def _refuse(what: str) -> Any:
    raise ConfigError(f"{what} is nothing that a kernel configuration is made of")
