"""Where in the user's source something happened, for messages."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

import torch

_OURS = os.path.dirname(os.path.abspath(__file__)) + os.sep
_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
_STDLIB = os.path.dirname(os.path.abspath(contextlib.__file__)) + os.sep


@functools.lru_cache(maxsize=4096)
def _is_users(filename: str) -> bool:
    path = os.path.abspath(filename)
    site = "site-packages" in path
    return not (path.startswith((_OURS, _TORCH)) or (path.startswith(_STDLIB) and not site))


def place(filename: str, line: int) -> str:
    """`file:line` with the file's last part only."""
    return f"{os.path.basename(filename)}:{line}"


def user_line() -> str:
    """`file:line` of the innermost frame that is neither torch's, the standard library's nor this package's."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if _is_users(frame.f_code.co_filename):
            return place(frame.f_code.co_filename, frame.f_lineno)
        frame = frame.f_back
    return ""


def error_line(error: BaseException) -> str:
    """`file:line` of the innermost frame of the user's code that `error` passed through."""
    found, tb = "", error.__traceback__
    while tb is not None:
        code = tb.tb_frame.f_code
        if _is_users(code.co_filename):
            found = place(code.co_filename, tb.tb_lineno)
        tb = tb.tb_next
    return found


_TRUSTED = ("torch", "math", "cmath", "builtins", "operator", "_operator", "itertools", "functools", "enum", "typing",
            "numpy", "collections", "numbers", "__future__")  # fmt: skip
_WRAPPED = ("_torchdynamo_orig_callable", "_orig_mod")


@functools.lru_cache(maxsize=1024)
def is_trusted_module(name: str | None) -> bool:
    """Is the module one whose functions always mean the same?"""
    return name is not None and name.partition(".")[0] in _TRUSTED and "random" not in name


def unwrapped_attr(mod: Any) -> str:
    """The attribute that holds what torch.compile wrapped, or ""."""
    for name in _WRAPPED:
        if name in getattr(mod, "__dict__", {}) or (name == "_orig_mod" and name in getattr(mod, "_modules", {})):
            return name
    return ""


def unwrap(mod: Any) -> Any:
    """`mod` without the wrappers of torch.compile: the callable that the user wrote."""
    while name := unwrapped_attr(mod):
        mod = getattr(mod, name)
    return mod


def code_of(mod: Any) -> CodeType | None:
    """The code object that runs when `mod` is called, if there is one."""
    mod = unwrap(mod)
    while isinstance(mod, functools.partial):
        mod = unwrap(mod.func)
    mod = getattr(mod, "__func__", mod)
    if isinstance(mod, torch.nn.Module):
        mod = type(mod).forward
    elif not hasattr(mod, "__code__"):
        mod = vars(type(mod)).get("__call__")
    return getattr(mod, "__code__", None)


def name_of(mod: Callable[..., Any]) -> str:
    """A telling name: the function's, or the class's."""
    mod = unwrap(mod)
    while isinstance(mod, functools.partial):
        mod = unwrap(mod.func)
    name = getattr(mod, "__name__", None)
    return name if isinstance(name, str) else type(mod).__name__


def defined_at(mod: Any) -> str:
    """`file:line` of the definition, or ""."""
    code = code_of(mod)
    return place(code.co_filename, code.co_firstlineno) if code is not None else ""
