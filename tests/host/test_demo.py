"""The demo: its data, its dense twin, and a run of a few steps as a user starts it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "docs" / "demo"
MODULES = ("data", "dense", "measure", "model", "report", "train")


@pytest.fixture(autouse=True)
def demo_importable() -> Iterator[None]:
    sys.path.insert(0, str(DEMO))
    yield
    sys.path.remove(str(DEMO))
    for name in MODULES:
        sys.modules.pop(name, None)


def test_documents_are_the_files_cut_before_definitions() -> None:
    import data

    source = b"import os\n" + b"# text\n" * 100 + b"def f():\n    pass\n" + b"x = 1\n" * 100 + b"class C:\n    pass\n"
    parts = data.split(source)
    assert b"".join(parts) == source
    assert [part.split(b"\n")[0] for part in parts] == [b"import os", b"def f():", b"class C:"]
    assert [len(part) for part in data.split(b"eight..\n" * 600)] == [2048, 2048, 704]


def test_batches_pack_documents_and_shift_targets_by_one() -> None:
    import data

    stream = data.batches([b"abcd", b"efgh", b"ij"], length=5, batch=2)
    batch = next(stream)
    assert bytes(batch.tokens.flatten().tolist()) == b"\0abcd\0efgh"
    assert bytes(batch.targets.flatten().tolist()) == b"abcd\0efgh\0"
    assert batch.documents.tolist() == [[1] * 5, [1] * 5]
    assert next(stream).tokens.shape == (2, 5)  # begins again


def test_a_step_agrees_with_dense_attention_to_rounding() -> None:
    import data
    import dense
    import model
    import report

    torch.manual_seed(0)
    made = model.ByteModel(model.Config(width=32, heads=4, kv_heads=2, layers=2, window=40)).double()
    torch.nn.init.normal_(made.head.weight, std=0.1)
    batch = next(data.batches([bytes(range(1, 90)), b"x" * 150, b"yz" * 70], length=300))
    loss, grads = report.step_gradients(made, batch, model.block_masks(batch.documents, 40), model.sparse_attention)
    want_loss, want = report.step_gradients(made, batch, dense.dense_masks(batch.documents, 40), dense.dense_attention)
    assert loss == pytest.approx(want_loss, rel=1e-12)
    for name, gradient in want.items():
        torch.testing.assert_close(grads[name], gradient, rtol=1e-9, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")
    assert min(float(grads[f"layers.{n}.log_slopes"].abs().min()) for n in range(2)) > 0


def test_a_loss_that_does_not_fall_stops_the_demo() -> None:
    import train

    train.check_falling([3.0, 2.5, 2.0, 1.5])
    for losses in ([1.0, 1.0, 1.0, 1.0], [3.0, 2.0, 1.0, float("nan")]):
        with pytest.raises(SystemExit, match="does not fall"):
            train.check_falling(losses)


def test_a_few_steps_run_as_a_user_starts_them(tmp_path: Path) -> None:
    command = [sys.executable, str(DEMO / "train.py"), "--steps", "4", "--length", "512", "--out", str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    run = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    assert "\x1b" not in run.stdout  # plain lines in a pipe
    assert re.search(r"step\s+4/4\s+loss \d\.\d{3}", run.stdout)
    assert "it falls" in run.stdout
    assert re.search(r"relative at most, the slopes' by \d", run.stdout)
    assert re.search(r"document layers \d+\.\d %, local layers \d+\.\d %", run.stdout)
    assert re.search(r"time .* times as fast", run.stdout)
    if sys.platform == "linux":
        assert re.search(r"memory .* times as small", run.stdout)
    pytest.importorskip("matplotlib")
    assert sorted(p.name for p in tmp_path.glob("*.png")) == ["loss.png", "mask-document.png", "mask-local.png"]
