"""`flexbwd bench` on the GPU: right results, sane times, and a level of the ladder that needs one."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import pytest

from flexbwd.cli.bench_gpu.run import Request, run

pytestmark = pytest.mark.gpu
LADDER = Path(__file__).resolve().parents[2] / "docs" / "ladder"


def test_every_quick_workload_is_right_and_timed(tmp_path):
    run(Request(impls=["flexbwd*", "cudnn"], rounds=1, quick=True, probe=False, out=tmp_path))
    (record,) = tmp_path.glob("*.json")
    rows = json.loads(record.read_text())["rows"]
    assert {row["impl"] for row in rows} >= {"flexbwd", "cudnn"}
    assert [f"{row['workload']}: {row['reason']}" for row in rows if row.get("reason")] == []
    assert all(row["ms"] > 0 and row["host_us"] > 0 and row["error"] < 1e-2 for row in rows)


def test_level_5_of_the_ladder_runs(monkeypatch, capsys):
    pytest.importorskip("cutlass")
    monkeypatch.setattr(sys, "path", [str(LADDER), *sys.path])
    importlib.import_module("level_5_wgmma").main()
    assert "relative error of dV against fp64" in capsys.readouterr().out
