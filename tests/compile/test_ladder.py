"""The levels of docs/ladder that are kernels compile for sm_90a here, and run where there is a Hopper GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("cutlass", reason="the CuTe DSL is not installed")
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the DSL has wheels for Linux only")

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("level", "says"),
    [("level_5_wgmma", "compiled for sm_90a"), ("level_6_kernel", "TMA tile loads")],
    ids=["level-5", "level-6"],
)
def test_a_level_compiles(level: str, says: str) -> None:
    environment = {**os.environ, "CUTE_DSL_ARCH": "sm_90a", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(ROOT / "docs" / "ladder" / f"{level}.py")]
    run = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert run.returncode == 0, run.stderr[-3000:]
    assert says in run.stdout
