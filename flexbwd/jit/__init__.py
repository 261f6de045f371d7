"""Compiling and launching CuTe kernels: once per configuration, kept in memory and on disk, in parallel when asked."""

from __future__ import annotations

from typing import Any

__all__ = ["after_warmup", "events"]


def __getattr__(name: str) -> Any:
    if name == "after_warmup":
        from flexbwd.jit.alarm import after_warmup

        return after_warmup
    if name == "events":
        from flexbwd.jit.compile import events

        return events
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
