"""Where the compilers keep what they made during a run, and what first calls of earlier runs are known."""

from __future__ import annotations

import dataclasses
import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from flexbwd.cli.bench_gpu.probe import Probe

Probes = Mapping[tuple[str, str], Probe]

_KNOWN = "first-calls.json"


@contextmanager
def caches(kept: Path | None) -> Iterator[Path]:
    """Point all compilers to one folder: `kept`, or a temporary one, empty, so that first calls are cold.

    Their environment is as before afterwards.
    """
    if kept is not None:
        kept.mkdir(mode=0o700, parents=True, exist_ok=True)
        with _environment(kept.resolve()):
            yield kept.resolve()
        return
    temporary = tempfile.TemporaryDirectory(prefix="flexbwd-bench-", ignore_cleanup_errors=True)
    with temporary as folder, _environment(Path(folder)):
        yield Path(folder)


@contextmanager
def _environment(folder: Path) -> Iterator[None]:
    chosen = {
        "FLEXBWD_CACHE_DIR": f"{folder}/flexbwd",
        "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED": "1",
        "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR": f"{folder}/fa4",
        "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor",
        "TORCHINDUCTOR_COMPILE_THREADS": "1",  # probes compile side by side already
    }
    before = {name: os.environ.get(name) for name in chosen}
    os.environ.update(chosen)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def known_probes(folder: Path) -> dict[tuple[str, str], Probe]:
    """First calls that an earlier run into this folder has made: (workload, implementation) → what it ended with."""
    path = folder / _KNOWN
    if not path.exists():
        return {}
    return {(w, impl): Probe(**fields) for w, impl, fields in json.loads(path.read_text())}


def keep_probes(folder: Path, found: Probes) -> None:
    """Write what `known_probes` reads; successful ones only: a failure is tried anew."""
    good = [[*key, dataclasses.asdict(probe)] for key, probe in found.items() if not probe.reason]
    (folder / _KNOWN).write_text(json.dumps(good))
