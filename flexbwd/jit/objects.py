"""Compiled kernels as files: linked into a shared library, or, where there is no linker, the object itself.

A library loads through tvm-ffi in a millisecond, without the DSL; it resolves the CUDA calls against the DSL's runtime
library, loaded before it by path. An object can only be loaded by the DSL's own linker, after a second of importing it.

    [library or object][canonical JSON of the configuration][trailer]      one file, so that renaming it is atomic

The trailer holds both lengths and a SHA-256 of everything before it: a truncated, altered or foreign file is a miss.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flexbwd.jit.toolchain import toolchain

Launch = Callable[..., Any]

LIBRARY, OBJECT = ".so", ".o"
_ENTRY = "flexbwd_kernel"
_MAGIC = b"flexbwd\1"
_TRAILER = struct.Struct("<QQ32s8s")  # code bytes, configuration bytes, SHA-256 of both, magic


def write(kernel: Any, text: str, stem: Path) -> Path:
    """Put `kernel` (a compiled function of the DSL) and its configuration's `text` at `stem` with the fitting suffix.

    Raises:
        OSError: the folder cannot be written.
    """
    with tempfile.TemporaryDirectory(dir=stem.parent, prefix=f"{stem.name}.tmp") as folder:
        plain, linked = Path(folder) / "kernel.o", Path(folder) / "kernel.so"
        kernel.export_to_c(str(plain), function_name=_ENTRY, export_only_tvm_ffi_symbols=True)
        code = linked if toolchain().runtime is not None and link(plain, linked) else plain
        seal(code, text)
        target = stem.with_name(stem.name + code.suffix)
        os.replace(code, target)
    return target


def link(source: Path, target: Path) -> bool:
    """Make a shared library of an object file; False where that is not possible."""
    for linker, *flags in (("ld", "-z", "noexecstack"), ("cc",), ("gcc",), ("clang",)):
        if shutil.which(linker) is None:
            continue
        run = subprocess.run([linker, "-shared", *flags, "-o", str(target), str(source)], capture_output=True)
        if run.returncode == 0:
            return True
    return False


def seal(path: Path, text: str) -> None:
    """Append the configuration and the trailer."""
    code, config = path.read_bytes(), text.encode()
    digest = hashlib.sha256(code + config).digest()
    with path.open("ab") as file:
        file.write(config + _TRAILER.pack(len(code), len(config), digest, _MAGIC))


def sound(path: Path, text: str) -> bool:
    """Is this file whole, unaltered, and the kernel of the configuration `text`?"""
    content = path.read_bytes()
    if len(content) < _TRAILER.size:
        return False
    body, trailer = content[: -_TRAILER.size], content[-_TRAILER.size :]
    code, config, digest, magic = _TRAILER.unpack(trailer)
    return (
        magic == _MAGIC
        and code + config == len(body)
        and body[code:] == text.encode()
        and hashlib.sha256(body).digest() == digest
    )


def load(path: Path) -> Launch:
    """The function in a file that is `sound`."""
    if path.suffix == OBJECT:
        from flexbwd.jit import dsl

        with dsl.lock:
            module = dsl.load_dsl().runtime.load_module(str(path), enable_tvm_ffi=True)
            return getattr(module, _ENTRY)  # type: ignore[no-any-return]  # keeps its engine alive
    import tvm_ffi

    _load_runtime(toolchain().runtime)
    return tvm_ffi.load_module(str(path)).get_function(_ENTRY)  # type: ignore[no-any-return]


@functools.cache
def _load_runtime(path: Path | None) -> Any:
    """Make the symbols that kernels call known to the loader."""
    if path is None:
        raise OSError("the CuTe DSL's runtime library is not installed")
    return ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
