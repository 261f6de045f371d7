"""One real kernel, compiled once per test process, and stand-ins that export it again under any configuration."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from flexbwd.jit import alarm, cache, compile, tidy

BUILD = "flexbwd.sm90.delta:build_delta"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if find_spec("cutlass") is not None:
        return
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.skip(reason="the CuTe DSL has wheels for Linux only"))


def small(tile_m: int = 64, *, grad_lse: bool = False) -> Any:
    """A configuration that compiles in less than a second."""
    from flexbwd.sm90.row_configs import DeltaConfig

    return DeltaConfig(torch.bfloat16, 16, tile_m, 0, grad_lse)


class Exported:
    """Stands for a compiled function of the DSL: exports a kernel that was compiled before, and counts."""

    def __init__(self, object_file: bytes) -> None:
        self.object_file, self.exports = object_file, 0

    def export_to_c(self, path: str, function_name: str, *, export_only_tvm_ffi_symbols: bool) -> None:
        assert function_name == "flexbwd_kernel" and export_only_tvm_ffi_symbols
        self.exports += 1
        Path(path).write_bytes(self.object_file)


@pytest.fixture(scope="session")
def object_file(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    from flexbwd.sm90.delta import build_delta

    path = tmp_path_factory.mktemp("object") / "kernel.o"
    kernel = compile.compile_now(lambda: build_delta(small()))
    kernel.export_to_c(str(path), function_name="flexbwd_kernel", export_only_tvm_ffi_symbols=True)
    return path.read_bytes()


@pytest.fixture
def made(object_file: bytes) -> Exported:
    return Exported(object_file)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A cache of the test's own, nothing in memory, and no warm-up before."""
    for name in ("FLEXBWD_CACHE", "FLEXBWD_COMPILE_ALARM", "FLEXBWD_COMPILE_WORKERS"):
        monkeypatch.delenv(name, raising=False)
    root = tmp_path / "cache"
    monkeypatch.setenv("FLEXBWD_CACHE_DIR", str(root))
    monkeypatch.setattr(alarm, "_warmed", False)
    monkeypatch.setattr(compile, "_kernels", {})
    monkeypatch.setattr(tidy, "_tidied", set())
    monkeypatch.setattr(cache, "edited", lambda: False)  # somebody may be editing while tests run
    cache.notice.cache_clear()
    yield root
    cache._default.cache_clear()
