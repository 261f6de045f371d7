"""Compile a kernel once per configuration, and launch it without looking it up again.

    kernel = kernel_of(config, "flexbwd.sm90.forward.call:build")    # config: a frozen dataclass of plain values
    kernel.run(q, k, v, ...)                                         # torch tensors and numbers, torch's current stream

`build(config)` gives (jit function, fake arguments). It is named, not passed, so that neither this process nor the one
that compiles for it (warm.py) imports the DSL before something must be compiled: a module that holds configurations
must not import `cutlass` at its top. A function at the top level of a module will do as well.

A kernel is looked up in memory, then on disk (`cache.py`), then compiled. `kernel_of` hashes the configuration; a call
site that launches often keeps the `Kernel` and calls `kernel.run`, which after the first call is the compiled function
itself.
"""

from __future__ import annotations

import dataclasses
import enum
import time
from collections import deque
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import torch

from flexbwd.jit import alarm, cache, codec, dsl
from flexbwd.jit.dsl import compile_now, load_dsl
from flexbwd.jit.toolchain import ARCH, OPTIONS

__all__ = ["ARCH", "OPTIONS", "Build", "Event", "Kernel", "compile_now", "compiled", "events", "forget", "kernel_of",
           "load_dsl"]  # fmt: skip

Parts = tuple[Any, tuple[Any, ...]]  # jit function, fake arguments
Build = str | Callable[[Any], Parts]
Launch = Callable[..., Any]


class Event(NamedTuple):
    """A kernel that was compiled, or loaded from disk."""

    name: str
    how: str  # "compiled", "loaded"
    seconds: float


#: The latest ones of this process.
events: deque[Event] = deque(maxlen=1024)


class Kernel:
    """One kernel of one configuration. `run(*arguments)` launches it; the first call looks it up or compiles it."""

    __slots__ = ("build", "config", "event", "is_ready", "run")

    def __init__(self, config: Hashable, build: Build) -> None:
        self.config, self.build = config, build
        self.event: Event | None = None  # how it came last
        self.forget()

    def forget(self) -> None:
        """Drop what is in memory."""
        self.is_ready = False
        self.run: Launch = self._first

    def __repr__(self) -> str:
        return f"Kernel({name_of(self.config)}{'' if self.is_ready else ', not compiled'})"

    def __call__(self, *arguments: Any) -> Any:
        return self.run(*arguments)

    def load(self, store: cache.Cache | None = None) -> bool:
        """Bring it from disk, without compiling; True when it is in memory."""
        if not self.is_ready:
            begin = time.perf_counter()
            found = (cache.default() if store is None else store).find(self.config)
            if found is not None:
                self._take(found, "loaded", begin)
        return self.is_ready

    def ready(self, store: cache.Cache | None = None) -> Launch:
        """The compiled function, from memory, from disk, or compiled now."""
        if self.is_ready:
            return self.run
        with dsl.lock:
            if self.is_ready:  # another thread was first
                return self.run
            begin = time.perf_counter()
            store = cache.default() if store is None else store
            found, new = store.find_or_make(self.config, self._compile)
            self._take(found, "compiled" if new else "loaded", begin)
        return self.run

    def _first(self, *arguments: Any) -> Any:
        return self.ready()(*arguments)

    def _compile(self) -> Any:
        alarm.check(name_of(self.config))
        dsl.load_dsl()
        build: Callable[[Any], Parts] = codec.find(self.build) if isinstance(self.build, str) else self.build
        return compile_now(lambda: build(self.config), name=str(self.config))

    def _take(self, found: Launch, how: str, begin: float) -> None:
        self.event = Event(name_of(self.config), how, time.perf_counter() - begin)
        events.append(self.event)
        self.run = found
        self.is_ready = True


_kernels: dict[Hashable, Kernel] = {}


def kernel_of(config: Hashable, build: Build) -> Kernel:
    """The kernel of `config`: the same object for equal configurations. Compiles nothing yet."""
    found = _kernels.get(config)
    return _kernels.setdefault(config, Kernel(config, build)) if found is None else found


def compiled(config: Hashable, build: Callable[[], Parts]) -> Launch:
    """The compiled function of `config`, brought or made now; `build` takes no arguments."""
    return kernel_of(config, lambda _: build()).ready()


def forget() -> None:
    """Drop every kernel held in memory, also those that call sites keep."""
    with dsl.lock:
        for kernel in _kernels.values():
            kernel.forget()
        _kernels.clear()


def name_of(config: Any) -> str:
    """A configuration in a few words: its class, and the fields that are not at their defaults.

    "Fwd dim 128 value_dim 128 stages 3 bfloat16 has_lo"
    """
    if not dataclasses.is_dataclass(config) or isinstance(config, type):
        return str(config)
    return " ".join([type(config).__name__.removesuffix("Config"), *_words(config)])


def _words(value: Any, name: str = "") -> list[str]:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        shown = [f for f in dataclasses.fields(value) if f.compare and getattr(value, f.name) != f.default]
        return [word for f in shown for word in _words(getattr(value, f.name), f.name)]
    if isinstance(value, tuple):
        names = getattr(value, "_fields", [name] * len(value))
        usual = getattr(type(value), "_field_defaults", {})
        return [
            word for n, v in zip(names, value, strict=True) if n not in usual or v != usual[n] for word in _words(v, n)
        ]
    if value is None:
        return []
    if value is False:
        return [f"no {name}"]
    if value is True:
        return [name]
    if isinstance(value, (torch.dtype, enum.Enum)):
        return [str(value).rpartition(".")[2]]
    text = str(value)
    return [f"{name} {text if len(text) <= 12 else text[:8]}"]  # a hash needs no more
