"""Keeps the cache folder small: kernels of older versions, and what killed processes left behind, go away."""

from __future__ import annotations

import contextlib
import re
import shutil
import time
from collections.abc import Iterable
from pathlib import Path

KEEP_DAYS = 30.0  # since a fingerprint was last used, checked to the day
KEEP_OTHERS = 8  # fingerprints beside our own: each edit of the sources makes one
KEEP_KERNELS = 4096  # of one fingerprint; a kernel takes about 50 KB
_LEFTOVER_SECONDS = 3600.0
_FINGERPRINT = re.compile(r"[0-9a-f]{32}")
_tidied: set[Path] = set()


def once(root: Path, keep: Iterable[Path]) -> None:
    """Tidy `root`, once in this process; `keep` are the fingerprint folders in use."""
    if root not in _tidied:
        _tidied.add(root)
        tidy(root, keep)


def tidy(root: Path, keep: Iterable[Path], now: float | None = None) -> None:
    """Remove old fingerprints, surplus kernels and leftovers. Another process may do the same meanwhile."""
    now = time.time() if now is None else now
    keep = set(keep)
    others = [p for p in root.iterdir() if _FINGERPRINT.fullmatch(p.name) and p not in keep]
    for rank, folder in enumerate(sorted(others, key=_used, reverse=True)):
        if rank >= KEEP_OTHERS or now - _used(folder) > KEEP_DAYS * 86400:
            shutil.rmtree(folder, ignore_errors=True)
    for folder in keep:
        _tidy_kernels(folder, now)


def _tidy_kernels(folder: Path, now: float) -> None:
    if not folder.is_dir():
        return
    kernels = [p for p in folder.iterdir() if p.suffix in (".so", ".o")]
    surplus = sorted(kernels, key=_modified)[: max(0, len(kernels) - KEEP_KERNELS)]
    leftovers = [p for p in folder.iterdir() if ".tmp" in p.name and now - _modified(p) > _LEFTOVER_SECONDS]
    for path in [*surplus, *leftovers]:
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            with contextlib.suppress(OSError):
                path.unlink()


def _used(folder: Path) -> float:
    about = folder / "about.txt"
    return _modified(about if about.exists() else folder)


def _modified(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
