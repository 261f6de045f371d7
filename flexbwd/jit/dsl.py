"""The CuTe DSL, imported when something must be compiled, and its failures in our words."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from flexbwd.errors import CompileError, FlexError, UnsupportedError
from flexbwd.jit.toolchain import ARCH, OPTIONS, REMEDY

#: The DSL is not thread-safe: everything that imports it, traces or compiles holds this.
lock = threading.RLock()


def load_dsl() -> Any:
    """`cutlass.cute`, set up for sm_90a; without a GPU its default would be another architecture."""
    os.environ.setdefault("CUTE_DSL_ARCH", ARCH)
    try:
        import cutlass.cute as cute
    except ImportError as error:
        raise UnsupportedError(
            f"the GPU kernels need NVIDIA's CuTe DSL, which cannot be imported ({error}); {REMEDY}, or pass "
            "backend='torch'"
        ) from error
    except RuntimeError as error:  # its compiler libraries do not fit the driver, or are half installed
        raise UnsupportedError(f"NVIDIA's CuTe DSL does not start here: {_one_line(error)}") from error
    return cute


def compile_now(build: Callable[[], tuple[Any, tuple[Any, ...]]], options: str = OPTIONS, name: str = "") -> Any:
    """Trace and compile `build()` = (jit function, fake arguments), whatever the caches hold.

    Raises:
        UnsupportedError: the DSL is not installed, or does not run here.
        CompileError: it failed; the DSL's error is chained.
        FlexError: what the kernel's own code raised.
    """
    with lock:
        cute = load_dsl()
        try:
            with _for_hopper():
                function, arguments = build()
                return cute.compile(function, *arguments, options=options)
        except FlexError:
            raise
        except Exception as error:
            mine = _flex_error_behind(error)
            if mine is not None:
                raise mine from error
            raise CompileError(
                f"{name or 'a kernel'} cannot be compiled: {type(error).__name__}: {_one_line(error)}. This is not a "
                "mistake of yours: pass backend='torch' to go on, and report it with this message and the output of "
                "`flexbwd doctor`"
            ) from error


@contextmanager
def _for_hopper() -> Iterator[None]:
    """The DSL reads its architecture once, when it is imported, perhaps by others and for another one."""
    from cutlass.cutlass_dsl import CuTeDSL

    settings = CuTeDSL._get_dsl().envar
    before = settings.arch
    settings.arch = ARCH
    try:
        yield
    finally:
        settings.arch = before


def _flex_error_behind(error: BaseException) -> FlexError | None:
    """The DSL wraps what traced code raises; ours says more."""
    seen: BaseException | None = error
    for _ in range(16):
        if seen is None:
            return None
        if isinstance(seen, FlexError):
            return seen
        seen = seen.__cause__ or seen.__context__
    return None


def _one_line(error: BaseException, limit: int = 400) -> str:
    text = " ".join(re.sub(r"\x1b\[[0-9;]*m", "", str(error)).split())
    return text if len(text) <= limit else text[:limit] + " …"
