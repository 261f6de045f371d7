"""`flexbwd bench` measures, judges and records."""

from __future__ import annotations

import json

import pytest
import torch

from flexbwd.cli import bench, workloads
from flexbwd.cli.bench import Row


@pytest.mark.parametrize(
    ("row", "ratio", "met"),
    [
        (Row("a", "ms", 2.0, 10.0, "dense", 4.0), 5.0, True),
        (Row("a", "ms", 2.0, 6.0, "dense", 4.0), 3.0, False),
        (Row("a", "ms", 2.0, 6.0, "dense"), 3.0, None),
        (Row("a", "MiB", 250.0, target=300.0), None, True),
        (Row("a", "MiB", 301.0, target=300.0), None, False),
    ],
    ids=["faster", "too slow", "no target", "small", "too big"],
)
def test_rows_are_judged(row, ratio, met):
    assert row.ratio == ratio
    assert row.met is met
    assert len(row.cells()) == len(bench.COLUMNS)


def test_documents_skip_about_88_percent_of_the_tiles():
    from flexbwd import create_block_mask

    block_mask = create_block_mask(workloads.document_causal(4096), None, None, 4096, 4096)
    assert 87.5 <= block_mask.sparsity() <= 88.5


@pytest.mark.parametrize("length", [512, 4096, 131072])
def test_documents_fill_the_sequence(length):
    offsets = workloads.document_offsets(length)
    assert (int(offsets[0]), int(offsets[-1])) == (0, length)
    assert bool((offsets.diff() > 0).all())


def test_rivals_take_turns():
    calls = []
    found = workloads.fastest({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, repeats=2)
    assert calls == ["a", "b"] * 3
    assert set(found) == {"a", "b"}


def test_rivals_compute_the_same():
    rivals, _ = workloads.training_step_rivals(workloads.document_causal(256), 256)
    ours, dense = rivals["ours"](), rivals["dense"]()
    for got, want in zip(ours, dense, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_quick_run_prints_and_records_every_case(command, tmp_path):
    ended = command("bench", "--quick", "--no-peers", "--repeats", "1", "--out", str(tmp_path / "benchmarks"))
    assert ended.code == 0, ended.err
    (record,) = (tmp_path / "benchmarks").glob("cpu-*.json")
    rows = json.loads(record.read_text())["rows"]
    assert [row["unit"] for row in rows] == ["ms", "ms", "MiB", "s", "MiB", "µs", "µs"]
    assert all(row["value"] >= 0 for row in rows)
    assert all(row["target"] is None for row in rows[:-2])
    table = record.with_suffix(".md").read_text()
    for row in rows:
        assert row["case"] in ended.out
        assert row["case"] in table


def test_a_folder_that_cannot_be_made_is_one_line(command, tmp_path):
    (tmp_path / "file").write_text("")
    ended = command("bench", "--quick", "--out", str(tmp_path / "file"))
    assert ended.code == 2
    assert "must be a folder" in ended.err
