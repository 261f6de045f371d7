"""Compile a kernel once per configuration.

# config: a frozen dataclass of plain values; build() -> (jit function, fake arguments)
kernel = compiled(config, build)
kernel(q, k, v, ...)                  # torch tensors and numbers, on torch's current stream

A kernel is looked up in memory, then on disk (`cache.py`), then compiled. The DSL is not thread-safe, so all
tracing is under one lock.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Hashable
from typing import Any

from flexbwd.jit import cache

Build = Callable[[], tuple[Any, tuple[Any, ...]]]
Kernel = Callable[..., Any]

OPTIONS = "--enable-tvm-ffi"
ARCH = "sm_90a"

_kernels: dict[Hashable, Kernel] = {}
_lock = threading.RLock()


def load_dsl() -> Any:
    """Import the CuTe DSL for sm_90a; without a GPU its default would be another architecture."""
    os.environ.setdefault("CUTE_DSL_ARCH", ARCH)
    import cutlass.cute as cute

    return cute


def compiled(config: Hashable, build: Build) -> Kernel:
    """The kernel of `config`; `build` is called only when neither memory nor disk has it."""
    kernel = _kernels.get(config)
    if kernel is not None:
        return kernel
    with _lock:
        kernel = _kernels.get(config)
        if kernel is None:
            kernel = cache.load_or_make(config, lambda: compile_now(build))
            _kernels[config] = kernel
    return kernel


def compile_now(build: Build, options: str = OPTIONS) -> Any:
    """Trace and compile, whatever the caches hold."""
    with _lock:
        cute = load_dsl()
        function, arguments = build()
        return cute.compile(function, *arguments, options=options)


def forget() -> None:
    """Drop every kernel held in memory."""
    with _lock:
        _kernels.clear()
