"""Masks are built by looking at values, which a traced graph cannot: torch.compile steps aside for it."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import TypeVar

import torch

Function = TypeVar("Function", bound=Callable)


def outside_graphs(fn: Function) -> Function:
    """`fn`, run eagerly with everything it calls, also when called from code that torch.compile runs.

    The same as `torch.compiler.disable`, but the compiler is not imported for it. In a graph that may not be broken
    (`fullgraph=True`) torch says so; build the mask before and pass it in.
    """
    disabled: Callable | None = None

    @functools.wraps(fn)
    def call(*args, **kwargs):  # type: ignore[no-untyped-def]
        if "torch._dynamo" not in sys.modules:
            return fn(*args, **kwargs)
        nonlocal disabled
        if disabled is None:
            disabled = torch.compiler.disable(fn)
        return disabled(*args, **kwargs)

    call._torchdynamo_disable = True  # type: ignore[attr-defined]
    call._torchdynamo_disable_msg = f"{fn.__qualname__} looks at values; build masks outside compiled code"  # type: ignore[attr-defined]
    return call  # type: ignore[return-value]
