"""Compiled kernels on disk, shared by all processes of one user.

    <root>/<fingerprint>/<key>.so       one kernel, or .o where nothing could link it; see objects.py
    <root>/<fingerprint>/<key>.lock     held while compiling: one process compiles, the others wait and then load
    <root>/<fingerprint>/about.txt      what the fingerprint is made of; its age says when it was last used

The fingerprint covers our sources, the DSL with its flavour, tvm-ffi, the driver, the architecture and the compiler's
environment; the key is the configuration. Kernels made where there was no driver serve every driver, so that an image
can be filled on a machine without a GPU. Kernels are native code: a folder is used only if nobody but its owner can
write there, and the owner is this user (or root, for reading). Any trouble with the disk costs a compile, no more.

Environment: FLEXBWD_CACHE=0 switches it off, FLEXBWD_CACHE_DIR moves it.
"""

from __future__ import annotations

import functools
import hashlib
import os
import stat
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flexbwd.errors import CacheNotice
from flexbwd.jit import objects, tidy
from flexbwd.jit.codec import canonical
from flexbwd.jit.toolchain import NO_DRIVER, edited, toolchain

LOCK_SECONDS = 120.0
ABOUT = "about.txt"
_DAY_SECONDS = 86400.0


@dataclass(frozen=True)
class Cache:
    """Kernels of this toolchain under one root.

    Attributes:
        root: None switches everything off.
        folders: where kernels are looked for, in this order.
        store: where they are put: the first of `folders`, or None.
    """

    root: Path | None = None
    folders: tuple[Path, ...] = ()
    store: Path | None = None

    @classmethod
    def under(cls, root: Path) -> Cache:
        """The cache under `root`, made if need be; says why not, once, if it cannot be used."""
        tools = toolchain()
        own, any_driver = root / tools.fingerprint(), root / tools.fingerprint(NO_DRIVER)
        reason = _make(root, own)
        if reason:
            notice(f"{reason}; kernels are compiled anew in every process. Set FLEXBWD_CACHE_DIR to a folder of yours")
        folders = [f for f in dict.fromkeys((own, any_driver)) if _trusted(f)]
        if own in folders:
            _mark_used(own)
        return cls(root, tuple(folders), None if reason else own)

    def find(self, config: Any) -> objects.Launch | None:
        """The kernel of `config`, or None."""
        if not self.folders:
            return None
        text = canonical(config)
        for folder in self.folders:
            found = _load(folder, text)
            if found is not None:
                return found
        return None

    def find_or_make(self, config: Any, make: Callable[[], Any]) -> tuple[objects.Launch, bool]:
        """The kernel of `config` and whether `make()` (a compiled function of the DSL) made it, here and now."""
        found = self.find(config)
        if found is not None:
            return found, False
        if self.store is None:
            return make(), True
        text = canonical(config)
        with _locked(self.store / f"{key_of(text)}.lock") as mine:
            found = _load(self.store, text)  # another process may have made it meanwhile
            if found is not None:
                return found, False
            kernel = make()
            if mine and _flavour_as_expected() and not edited():
                self._write(kernel, text)
                # what was stored is what runs, here too: it also lacks the DSL's Python wrapper around each call
                return _load(self.store, text) or kernel, True
        return kernel, True

    def _write(self, kernel: Any, text: str) -> None:
        assert self.store is not None and self.root is not None
        try:
            objects.write(kernel, text, self.store / key_of(text))
            tidy.once(self.root, keep=self.folders)
        except OSError as error:
            notice(f"{self.store} cannot be written ({error.strerror}); kernels are compiled anew in every process")
        except Exception as error:
            notice(f"a compiled kernel cannot be stored ({type(error).__name__}: {error})")


def default() -> Cache:
    """The cache that the environment asks for."""
    if os.environ.get("FLEXBWD_CACHE", "1") == "0" or os.name != "posix":
        return Cache()
    return _default(root_folder())


@functools.cache
def _default(root: Path) -> Cache:
    return Cache() if edited() else Cache.under(root)


def root_folder() -> Path:
    """FLEXBWD_CACHE_DIR, else the user's cache folder."""
    named = os.environ.get("FLEXBWD_CACHE_DIR")
    if named:
        return Path(named).expanduser().absolute()
    import platformdirs

    return Path(platformdirs.user_cache_path("flexbwd"))


def key_of(text: str) -> str:
    """File name, without suffix, of the configuration with the canonical `text`."""
    return hashlib.sha256(text.encode()).hexdigest()[:40]


@functools.cache
def notice(reason: str) -> None:
    """Say once why the cache does not help."""
    warnings.warn(f"flexbwd: {reason}", CacheNotice, stacklevel=2)


# -- folders -----------------------------------------------------------------------------------------------------------
def _make(root: Path, own: Path) -> str:
    """Make the folders; the reason why kernels cannot be stored there, or ""."""
    try:
        own.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        return f"the kernel cache {root} cannot be made ({error.strerror})"
    for folder in (root, own):
        if not _trusted(folder):
            return f"the kernel cache {folder} belongs to another user, or others can write there"
        if folder.stat().st_uid != os.getuid():
            return f"the kernel cache {folder} belongs to root"
    if not os.access(own, os.W_OK | os.X_OK):
        return f"the kernel cache {own} cannot be written"
    try:
        about = own / ABOUT
        if not about.exists():
            about.write_text("\n".join([*toolchain().facts, f"driver={toolchain().driver}", ""]))
    except OSError as error:
        return f"the kernel cache {own} cannot be written ({error.strerror})"
    return ""


def _trusted(folder: Path) -> bool:
    """Is it a folder where only this user, or root, could have put code?"""
    try:
        found = folder.stat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid in (os.getuid(), 0) and not found.st_mode & 0o022


def _mark_used(folder: Path) -> None:
    about = folder / ABOUT
    try:
        if time.time() - about.stat().st_mtime > _DAY_SECONDS:
            os.utime(about)
    except OSError:
        pass  # read-only, or tidied away by another process


# -- entries -----------------------------------------------------------------------------------------------------------
def _load(folder: Path, text: str) -> objects.Launch | None:
    for suffix in (objects.LIBRARY, objects.OBJECT):
        path = folder / (key_of(text) + suffix)
        try:
            if path.is_file() and objects.sound(path, text):
                return objects.load(path)
        except Exception:
            continue  # truncated, foreign, or made for other libraries: compile
    return None


def _flavour_as_expected() -> bool:
    """Did the DSL choose the flavour that the fingerprint names?"""
    version = sys.modules.get("cutlass.base_dsl.version_info")
    return version is None or version.CUDA_VERSION.major == toolchain().flavour


@contextmanager
def _locked(path: Path) -> Iterator[bool]:
    """Hold the key's lock; yields False, without it, when it cannot be had: compile, but store nothing."""
    import filelock

    lock = filelock.FileLock(path, mode=0o600)
    try:
        lock.acquire(timeout=LOCK_SECONDS)
    except (OSError, NotImplementedError, filelock.Timeout):
        yield False
        return
    try:
        yield True
    finally:
        lock.release()
