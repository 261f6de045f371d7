"""The torch levels of docs/ladder run, and agree with fp64; the kernels' levels are in tests/compile."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[3]
LADDER = ROOT / "docs" / "ladder"
LEVELS = sorted(LADDER.glob("level_*.py"))


@pytest.fixture(autouse=True)
def ladder_importable() -> Iterator[None]:
    sys.path.insert(0, str(LADDER))
    yield
    sys.path.remove(str(LADDER))


@pytest.mark.parametrize("level", LEVELS[:4], ids=lambda path: path.stem)
def test_a_level_agrees_with_fp64(level: Path, capsys: pytest.CaptureFixture[str]) -> None:
    importlib.import_module(level.stem).main()
    assert "relative error against fp64: " in capsys.readouterr().out


def test_a_wrong_gradient_does_not_pass() -> None:
    common = importlib.import_module("common")
    want = {"dq": torch.ones(4, dtype=torch.float64)}
    for wrong in (1.001 * want["dq"], torch.full((4,), torch.nan)):
        with pytest.raises(AssertionError):
            common.check({"dq": wrong}, want, at_most=1e-4)


def test_level_3_uses_every_body() -> None:
    level = importlib.import_module("level_3_lists")
    walk = [w for w in level.walks(1250, 1000) if w.partial and w.edge]
    assert walk and any(w.full for w in level.walks(1250, 1000))


def test_the_page_has_every_level() -> None:
    included = re.findall(r"literalinclude\} ladder/(\w+)\.py", (ROOT / "docs" / "ladder.md").read_text())
    assert included == [*(level.stem for level in LEVELS), "common"]
    assert len(LEVELS) >= 5
