"""Says when a kernel is compiled that warm-up should have brought.

A compile takes seconds; in a serving process it must not happen after start-up. Loading a kernel from disk takes
milliseconds and is no alarm.

    with flexbwd.jit.after_warmup():            # or "warn"
        serve()                                 # a compile raises CompileAfterWarmupError

FLEXBWD_COMPILE_ALARM=warn or =error does the same from the end of the process's first warm-up on.
"""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from flexbwd.errors import CompileAfterWarmupError, CompileNotice, OptionError

MODES = ("off", "warn", "error")
ENVIRONMENT = "FLEXBWD_COMPILE_ALARM"

_lock = threading.Lock()
_armed: list[
    list[str]
] = []  # modes of the open blocks, for all threads: autograd's backward runs in threads of its own
_warming = 0
_warmed = False


@contextmanager
def after_warmup(mode: str = "error") -> Iterator[None]:
    """Inside the block a compile, in any thread, raises ("error") or warns ("warn"); "off" allows it again."""
    _check(mode, "after_warmup(mode)")
    block = [mode]  # an object of its own: blocks of other threads may have the same mode
    with _lock:
        _armed.append(block)
    try:
        yield
    finally:
        with _lock:
            _armed[:] = [b for b in _armed if b is not block]


@contextmanager
def warming() -> Iterator[None]:
    """What is compiled inside the block was asked for; at its end the process counts as warm."""
    global _warming, _warmed
    with _lock:
        _warming += 1
    try:
        yield
    finally:
        with _lock:
            _warming -= 1
            _warmed = True


def check(name: str) -> None:
    """Called before the kernel `name` is compiled."""
    mode = _mode()
    if mode == "off":
        return
    text = (
        f"{name} is compiled after warm-up; call flexbwd.warmup with these shapes and options first, or keep the "
        "kernel cache (FLEXBWD_CACHE_DIR)"
    )
    if mode == "error":
        raise CompileAfterWarmupError(text)
    warnings.warn(f"flexbwd: {text}", CompileNotice, stacklevel=2)


def _mode() -> str:
    with _lock:
        if _warming:
            return "off"
        if _armed:
            return _armed[-1][0]
        warmed = _warmed
    mode = os.environ.get(ENVIRONMENT, "") or "off"
    _check(mode, ENVIRONMENT)
    return mode if warmed else "off"


def _check(mode: str, what: str) -> None:
    if mode not in MODES:
        raise OptionError(f"{what} is {mode!r}; it must be one of {', '.join(MODES)}")
