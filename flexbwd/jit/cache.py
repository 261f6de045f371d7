"""Compiled kernels on disk: one TVM-FFI object file per key, shared by all processes of one user.

    <root>/<fingerprint>/<key>.o        the object, written under another name and renamed
    <root>/<fingerprint>/<key>.sum      sha256 of the object: a truncated or foreign file does not match it and is a
    miss
    <root>/<fingerprint>/<key>.lock     held while compiling: one process compiles, others wait and then load

The fingerprint covers our sources, the DSL and its flavour, tvm-ffi, architecture and compiler environment; the key
covers the
configuration's class and fields as canonical JSON. Nothing is unpickled. Objects are native code: the folder is the
user's own, mode 0700.

Environment: FLEXBWD_CACHE=0 switches it off, FLEXBWD_CACHE_DIR moves it.
"""

from __future__ import annotations

import dataclasses
import fcntl
import functools
import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_ENTRY = "flexbwd_kernel"
_LOCK_SECONDS = 120.0
_ENV = ("CUTE_DSL_ARCH", "CUTE_DSL_LINEINFO", "CUTE_DSL_COMPILER_OPT", "CUTE_DSL_PTXAS_PATH")


def load_or_make(config: Any, make: Callable[[], Any]) -> Any:
    """The kernel of `config` from disk, or `make()`, which is then stored. Any trouble with the disk only costs the
    compile."""
    folder = _folder()
    if folder is None:
        return make()
    path = folder / f"{_key(config)}.o"
    found = _load(path)
    if found is not None:
        return found
    with _locked(path.with_suffix(".lock")) as mine:
        found = _load(path)
        if found is not None:
            return found
        kernel = make()
        if mine:
            _store(path, kernel)
        return kernel


def describe(value: Any) -> Any:
    """`value` as plain JSON: dataclasses by class name and fields, enums and dtypes by their text."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        # fields that take no part in equality (a mod's graph, whose hash is another field) take none here
        fields = {f.name: describe(getattr(value, f.name)) for f in dataclasses.fields(value) if f.compare}
        return {"class": f"{type(value).__module__}.{type(value).__qualname__}", **fields}
    if isinstance(value, (tuple, list)):
        return [describe(v) for v in value]
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value.hex()
    return f"{type(value).__name__}:{value}"


def _key(config: Any) -> str:
    text = json.dumps(describe(config), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:40]


@functools.cache
def _fingerprint() -> str:
    from importlib import metadata

    facts: list[str] = [sys.platform, os.uname().machine]
    for package in ("nvidia-cutlass-dsl", "nvidia-cutlass-dsl-libs-base", "apache-tvm-ffi"):
        try:
            facts.append(f"{package}={metadata.version(package)}")
        except metadata.PackageNotFoundError:
            facts.append(f"{package}=?")
    from cutlass.base_dsl import version_info

    facts.append(f"flavour={version_info.CUDA_VERSION}")
    facts += [f"{name}={os.environ.get(name, '')}" for name in _ENV]
    digest = hashlib.sha256("\n".join(facts).encode())
    root = Path(__file__).resolve().parents[1]
    for source in sorted([*root.glob("sm90/**/*.py"), *root.glob("jit/*.py"), *root.glob("modgraph/**/*.py")]):
        digest.update(str(source.relative_to(root)).encode())
        digest.update(source.read_bytes())
    return digest.hexdigest()[:32]


@functools.cache
def _folder() -> Path | None:
    if os.environ.get("FLEXBWD_CACHE", "1") == "0":
        return None
    from flexbwd.jit.compile import load_dsl

    load_dsl()
    try:
        folder = root_folder() / _fingerprint()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
    except OSError:
        return None
    if status.st_uid != os.getuid() or status.st_mode & 0o022:
        return None  # someone else could put code there
    return folder


def root_folder() -> Path:
    """Where the cache lives: FLEXBWD_CACHE_DIR, else the user's cache folder."""
    named = os.environ.get("FLEXBWD_CACHE_DIR")
    if named:
        return Path(named).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "flexbwd"


def _load(path: Path) -> Any | None:
    try:
        want = path.with_suffix(".sum").read_text()
        if hashlib.sha256(path.read_bytes()).hexdigest() != want:
            return None
        import cutlass.cute as cute

        module = cute.runtime.load_module(str(path), enable_tvm_ffi=True)
        kernel = getattr(module, _ENTRY)
    except Exception:
        return None
    return _Loaded(module, kernel)


class _Loaded:
    """A function of a loaded object; keeps the object loaded."""

    __slots__ = ("_kernel", "_module")

    def __init__(self, module: Any, kernel: Any) -> None:
        self._module, self._kernel = module, kernel

    def __call__(self, *arguments: Any) -> Any:
        return self._kernel(*arguments)


def _store(path: Path, kernel: Any) -> None:
    suffix = f".{os.getpid()}.{time.monotonic_ns()}.tmp"
    temporary, total = path.with_suffix(suffix + ".o"), path.with_suffix(suffix)
    try:
        kernel.export_to_c(str(temporary), function_name=_ENTRY)
        total.write_text(hashlib.sha256(temporary.read_bytes()).hexdigest())
        os.replace(temporary, path)
        os.replace(total, path.with_suffix(".sum"))
    except Exception:
        for leftover in (temporary, total):
            leftover.unlink(missing_ok=True)


@contextmanager
def _locked(path: Path) -> Iterator[bool]:
    """Hold the key's lock; yields False, without it, when it cannot be had in time: compile, but store nothing."""
    try:
        handle = os.open(path, os.O_CREAT | os.O_RDWR, 0o600)
    except OSError:
        yield False
        return
    try:
        yield _acquire(handle)
    finally:
        os.close(handle)


def _acquire(handle: int) -> bool:
    give_up = time.monotonic() + _LOCK_SECONDS
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() > give_up:
                return False
            time.sleep(0.02)
        except OSError:
            return False
