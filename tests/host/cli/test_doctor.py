"""`flexbwd doctor` finds what is there, and says when something is broken."""

from __future__ import annotations

import json

import pytest
import torch

from flexbwd.cli import doctor


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("FLEXBWD_CACHE_DIR", str(tmp_path / "cache"))


def test_a_sound_machine_passes(command, tmp_path):
    ended = command("doctor", "--json")
    report = json.loads(ended.out)
    found = {f["name"]: f for f in report["findings"]}
    assert ended.code == 0
    assert report["ok"]
    assert found["torch"]["value"].startswith(torch.__version__)
    assert found["self-check"]["state"] == "ok"
    assert str(tmp_path / "cache") in found["cache"]["value"]


def test_table_lists_every_finding(command):
    ended = command("doctor")
    for name in (
        "python",
        "torch",
        "CuTe DSL",
        "apache-tvm-ffi",
        "cuda-python",
        "GPU",
        "driver",
        "cache",
        "self-check",
    ):
        assert name in ended.out


@pytest.mark.parametrize("wrong", [1e-3, float("inf")], ids=["inexact", "nan"])
def test_wrong_attention_is_broken(command, monkeypatch, wrong):
    monkeypatch.setattr(doctor, "self_check_errors", lambda: {"out": 1e-15, "dq": wrong})
    ended = command("doctor", "--json")
    findings = {f["name"]: f for f in json.loads(ended.out)["findings"]}
    assert ended.code == 1
    assert findings["self-check"]["state"] == "broken"
    assert "dq" in findings["self-check"]["value"]


def test_a_check_that_raises_is_a_finding(command, monkeypatch):
    def fails():
        raise RuntimeError("two\nlines")

    monkeypatch.setattr(doctor, "self_check_errors", fails)
    ended = command("doctor", "--json")
    findings = {f["name"]: f for f in json.loads(ended.out)["findings"]}
    assert ended.code == 1
    assert findings["self-check"]["value"] == "RuntimeError: two lines"


def test_an_unwritable_cache_is_broken(command, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FLEXBWD_CACHE_DIR", str(tmp_path / "file" / "cache"))
    ended = command("doctor", "--json")
    findings = {f["name"]: f for f in json.loads(ended.out)["findings"]}
    assert ended.code == 1
    assert findings["cache"]["state"] == "broken"
    assert "FLEXBWD_CACHE_DIR" in findings["cache"]["remedy"]


@pytest.mark.parametrize(
    ("version", "state"), [("", "note"), ("4.8.1", "ok"), ("4.8.7", "ok"), ("4.8.0", "broken"), ("4.9.0", "broken")]
)
def test_dsl_version_is_judged(monkeypatch, version, state):
    monkeypatch.setattr(doctor, "_version", lambda package: version)
    assert doctor._dsl().state == state


@pytest.mark.parametrize(
    ("version", "numbers"), [("2.13.0+cpu", (2, 13, 0)), ("0.1.15.post2", (0, 1, 15)), ("2.11.0a0", (2, 11))]
)
def test_version_numbers(version, numbers):
    assert doctor._numbers(version) == numbers
