"""What decides the code that a configuration compiles to, beside the configuration; read without importing the DSL.

Importing the DSL takes a second, and a process that finds its kernels on disk never needs it. So versions come from
package metadata, and the flavour (the CUDA toolkit that the DSL's compiler was built with) from the rule by which the
DSL itself chooses: the newest installed one that the driver serves.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import re
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import metadata, util
from pathlib import Path

ARCH = "sm_90a"
OPTIONS = "--enable-tvm-ffi"
DSL = "nvidia-cutlass-dsl"
REMEDY = "pip install 'nvidia-cutlass-dsl>=4.8.1,<4.9' apache-tvm-ffi"
NO_DRIVER = "none"

_BEGAN = time.time()
_LIBRARY = "libcute_dsl_runtime.so"
_SOURCES = ("sm90/**/*.py", "jit/*.py", "modgraph/**/*.py")
# environment of the DSL that cannot change the code: where it looks, what it prints and keeps
_HARMLESS = re.compile(
    r"CUTE_DSL_(LIBS|LOG\w*|\w*DUMP_DIR|KEEP\w*|\w*CACHE\w*|JIT_\w*|PRINT\w*|SHOW\w*|FILTER\w*|ARCH)"
)


@dataclass(frozen=True)
class Toolchain:
    """Attributes:
    facts: "name=value" lines: versions, architecture, options, environment, a hash of our sources.
    driver: newest CUDA that the driver serves, "13.0", or "none".
    flavour: major CUDA version of the DSL's compiler; None without one.
    runtime: the library that compiled kernels call.
    """

    facts: tuple[str, ...]
    driver: str
    flavour: int | None
    runtime: Path | None

    def fingerprint(self, driver: str | None = None) -> str:
        """32 hex digits; two toolchains that could give different code have different ones."""
        lines = [*self.facts, f"driver={self.driver if driver is None else driver}"]
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:32]


@functools.cache
def toolchain() -> Toolchain:
    """This process's."""
    driver = driver_version()
    found, runtime = flavour(_flavours(), driver)
    named = [Path(p) for p in os.environ.get("CUTE_DSL_LIBS", "").split(":") if p.endswith(_LIBRARY)]
    runtime = named[0] if named else runtime
    facts = [
        f"platform={sys.platform} {platform.machine()}",
        f"arch={ARCH}",
        f"options={OPTIONS}",
        f"flavour={found}",
        *(f"{name}={_identity(name)}" for name in _packages()),
        *(f"{name}={os.environ[name]}" for name in sorted(os.environ) if _matters(name)),
        f"sources={source_hash()}",
    ]
    return Toolchain(tuple(facts), driver, found, runtime)


def driver_version() -> str:
    """Asked of libcuda, which needs no context for it."""
    number = ctypes.c_int()
    try:
        if ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(number)):
            return NO_DRIVER
    except (OSError, AttributeError):
        return NO_DRIVER
    return f"{number.value // 1000}.{number.value % 1000 // 10}"


def flavour(installed: Iterable[tuple[int, Path]], driver: str) -> tuple[int | None, Path | None]:
    """The flavour that the DSL will choose, and its runtime library."""
    limit = sys.maxsize if driver == NO_DRIVER else int(driver.partition(".")[0])
    served = [(major, library) for major, library in installed if major <= limit]
    return max(served, default=(None, None))


def _flavours() -> list[tuple[int, Path]]:
    try:
        spec = util.find_spec("nvidia_cutlass_dsl")
    except (ImportError, ValueError):
        return []
    roots = [Path(p) for p in (spec.submodule_search_locations or ())] if spec else []
    found = [p for root in roots for p in root.glob(f"cu*/lib/{_LIBRARY}")]
    return [(int(p.parts[-3][2:]), p) for p in found if p.parts[-3][2:].isdigit()]


def _matters(name: str) -> bool:
    return name.startswith("CUTE_DSL_") and not _HARMLESS.fullmatch(name)


def _packages() -> list[str]:
    return [DSL, *(f"{DSL}-libs-{part}" for part in ("base", "core", "cu12", "cu13")), "apache-tvm-ffi"]


def _identity(package: str) -> str:
    """Version, and a hash of the installed files' hashes: a rebuilt wheel of the same version is another one."""
    try:
        distribution = metadata.distribution(package)
    except metadata.PackageNotFoundError:
        return "absent"
    lines = (distribution.read_text("RECORD") or "").splitlines()
    # installers add lines of their own for what they wrote and compiled
    files = sorted(line for line in lines if ",sha256=" in line and ".dist-info/" not in line and ".pyc," not in line)
    return f"{distribution.version} {hashlib.sha256(chr(10).join(files).encode()).hexdigest()[:16]}"


def source_hash() -> str:
    """Of the files that take part in making kernels."""
    digest = hashlib.sha256()
    for source in _sources():
        digest.update(f"{source.relative_to(_root()).as_posix()}\0".encode())
        digest.update(source.read_bytes() + b"\0")
    return digest.hexdigest()[:32]


def edited() -> bool:
    """Has a source changed since this process began? Then its hash may not be that of the code that runs here."""
    return any(source.stat().st_mtime > _BEGAN for source in _sources())


def _sources() -> list[Path]:
    return sorted(path for pattern in _SOURCES for path in _root().glob(pattern))


def _root() -> Path:
    return Path(__file__).resolve().parents[1]
