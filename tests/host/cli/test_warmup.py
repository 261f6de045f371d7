"""`flexbwd warmup`: which kernels a request means, and what is printed."""

from __future__ import annotations

import pytest

from flexbwd.cli.warmup import NAMED, Request, Shape, shapes_of
from flexbwd.jit.warm import Done


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("FLEXBWD_CACHE_DIR", str(tmp_path / "cache"))


def test_head_dims_mean_dense_and_causal():
    assert [str(s) for s in shapes_of(Request(["64", "192/128"]))] == [
        "D64 H8/8 dense",
        "D64 H8/8 causal",
        "D192/128 H8/8 dense",
        "D192/128 H8/8 causal",
    ]
    assert shapes_of(Request([])) == shapes_of(Request(["64", "128"]))


def test_models_have_shapes_and_options_replace_parts_of_them():
    assert shapes_of(Request(["llama3-8b"])) == [Shape(128, 128, (32, 8))]
    assert {s.softcap for s in shapes_of(Request(["gemma2-9b"]))} == {50.0}
    masked = shapes_of(Request(["llama3-8b", "128"], masks=["window"], heads="6/2"))
    assert masked == [Shape(128, 128, (6, 2), "window")]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["gpt5"], "must be a head dim"),
        (["64", "--heads", "8:2"], "--heads 8:2"),
        (["64", "--heads", "0"], "--heads 0"),
        (["64", "--mask", "full"], "--mask full must be one of dense, causal, window"),
        (["64", "--dtype", "fp8"], "--dtype fp8 must be one of bf16, fp16"),
    ],
    ids=lambda x: x[-1] if isinstance(x, list) else "",
)
def test_a_mistake_is_one_line(command, arguments, message):
    ended = command("warmup", *arguments)
    assert ended.code == 2 and message in ended.err and ended.err.count("\n") == 1


def test_every_kernel_of_every_combination_is_asked_for_once(command, monkeypatch):
    """Compiling itself is tested in tests/host/jit and tests/compile."""
    from flexbwd.jit import warm

    seen = []

    def pretend(jobs, workers, report):
        seen.extend(jobs)
        assert workers == 3
        return [Done(str(i), "worker" if i % 2 else "loaded", 1.0) for i in range(len(jobs))]

    real = warm.warm
    monkeypatch.setattr(warm, "warm", lambda *a, **k: pretend(*a, **k) if len(a) == 3 else real(*a, **k))
    ended = command("warmup", "64", "64", "--dtype", "bf16", "--dtype", "fp16", "--jobs", "3")
    assert ended.code == 0
    assert len({config for config, _ in seen}) == len(seen)
    assert f"{len(seen)} kernels" in ended.out


def test_all_models_are_shapes():
    assert all(isinstance(s, Shape) for shapes in NAMED.values() for s in shapes)
