"""The order of a GPU benchmark: probe, check, turns; with implementations that run on the CPU, fail or lie."""

from __future__ import annotations

import json
import os
import sys
from types import SimpleNamespace

import pytest
import torch

from flexbwd.cli.bench_gpu import oracle, report, run
from flexbwd.cli.bench_gpu.caches import caches
from flexbwd.cli.bench_gpu.operands import operands
from flexbwd.cli.bench_gpu.peers import IMPLS, Impl, Prepared
from flexbwd.cli.bench_gpu.probe import Probe, probe_all
from flexbwd.cli.bench_gpu.timing import Sample
from flexbwd.cli.bench_gpu.workloads import Workload
from flexbwd.errors import DeviceError, OptionError

CPU = torch.device("cpu")
SMALL = Workload("causal-d64", "causal", 2, 96, 4, 16, kv_heads=2, host_bound=True)


class StillClock:
    """Every call takes 2 ms."""

    def burst(self, work, calls):
        work()
        return [Sample(2.0, 5.0)] * calls

    def round_trip_ms(self, work):
        work()
        return 2.5


def dense(w, given, variant):
    """Attention by torch, causal; `variant` spoils it."""
    q, k, v = given.leaves()

    def forward():
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        if variant == "raises":
            raise RuntimeError("no kernel")
        return out * 1.1 if variant == "wrong" else out

    return Prepared(forward, (q, k, v), given.grad_out)


def fake(name: str, variant: str = "") -> Impl:
    made = type("Fake", (Impl,), {"_code": lambda self: SimpleNamespace(prepare=dense, serves=lambda *_: True)})
    return made(name, name, "fake", variant)


@pytest.fixture
def data():
    given = operands(SMALL, CPU)
    return given, oracle.expected(SMALL, given)


@pytest.mark.parametrize("mask", ["dense", "causal", "window", "documents"])
def test_the_oracle_is_attention_of_the_last_heads(mask: str) -> None:
    w = Workload("w", mask, 2, 300, 4, 16, kv_heads=2, window=33)
    given = operands(w, CPU, torch.float32)
    want = oracle.expected(w, given)
    keep = None
    if given.mask is not None:
        b = h = torch.tensor(0)
        keep = given.mask(b, h, torch.arange(300)[:, None], torch.arange(300)[None])
    q, k, v = given.leaves()
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, keep, enable_gqa=True)
    grads = torch.autograd.grad(out, (q, k, v), given.grad_out)
    got = dict(zip(oracle.NAMES, (out.detach(), *grads), strict=True))
    assert max(oracle.errors(w, want, got).values()) < 1e-5
    got["dq"][0, 0, 0, 0] = torch.nan  # anywhere, not only in the heads that are compared
    assert oracle.errors(w, want, got)["dq"] == float("inf")


def test_wrong_and_failing_implementations_are_rows_with_a_reason(data) -> None:
    impls = [fake("flexbwd"), fake("fa4", "wrong"), fake("cudnn", "raises"), fake("flex")]
    probes = {("causal-d64", "flex"): Probe(reason="no answer in 180 s"),
              ("causal-d64", "flexbwd"): Probe({"fwd": 3.0, "bwd": 4.0})}  # fmt: skip
    rows = run.compare(SMALL, impls, probes, ["fwd", "bwd"], run.Turns(StillClock(), 2), data)
    by = {(r.impl, r.which): r for r in rows}
    assert len(rows) == len(by) == 8
    assert by["fa4", "bwd"].reason.startswith("WrongResult: relative error against fp32: out 0.1")
    assert by["cudnn", "fwd"].reason == "RuntimeError: no kernel"
    assert by["flex", "fwd"].reason == "no answer in 180 s"
    ours = by["flexbwd", "bwd"]
    assert (ours.ms, ours.host_us, ours.round_trip_ms, ours.first_s) == (2.0, 5.0, 2.5, 4.0)
    assert ours.tflops == pytest.approx(2.5 * 4 * 16 * (96 * 97 // 2) * 8 / 2e-3 / 1e12)
    assert 0 < by["flexbwd", "fwd"].error < oracle.TOLERANCE
    assert ours.cached_s is not None


# -- probes ----------------------------------------------------------------------------------------------------
WORKER = """
import json, os, sys, time
for line in sys.stdin:
    task = json.loads(line)
    name = task["impl"]
    print("a library's chatter", flush=True)
    if name == "fa4": os._exit(3)
    if name == "cudnn": time.sleep(60)
    if name == "flex": print("probe: " + json.dumps({"reason": "lost it", "lost": True}), flush=True); continue
    print("probe: " + json.dumps({"first": {"fwd": task["workload"]["length"], "bwd": os.getpid()}}), flush=True)
"""


def test_probes_survive_crashes_and_hangs() -> None:
    names = ["flexbwd", "flexbwd-learned", "fa4", "cudnn", "flex", "flexbwd-deterministic"]
    tasks = [(SMALL, IMPLS[name]) for name in names]
    seen: list[str] = []
    found = probe_all(tasks, 1, [sys.executable, "-c", WORKER], 3.0, lambda task, _: seen.append(task[1].name))
    assert sorted(seen) == sorted(names)
    reasons = {name: probe.reason for (_, name), probe in found.items()}
    assert reasons["fa4"] == "the process ended with code 3"
    assert reasons["cudnn"] == "no answer in 3 s"
    assert reasons["flex"] == "lost it"
    assert found["causal-d64", "flexbwd"].first_s["fwd"] == 96
    processes = {p.first_s["bwd"] for p in found.values() if p.first_s}
    assert len(processes) == 2  # begun anew after the crash and the hang, else kept: flexbwd, then the two variants


# -- options ----------------------------------------------------------------------------------------------------
def test_caches_are_cold_and_the_environment_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLEXBWD_CACHE_DIR", "/mine")
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    with caches(None) as folder:
        assert os.environ["FLEXBWD_CACHE_DIR"] == f"{folder}/flexbwd"
        assert list(folder.iterdir()) == []
    assert os.environ["FLEXBWD_CACHE_DIR"] == "/mine"
    assert "TORCHINDUCTOR_CACHE_DIR" not in os.environ
    assert not folder.exists()


def test_kept_first_calls_are_not_made_again(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []

    def probes(tasks, processes, **rest):
        asked.append([impl.name for _, impl in tasks])
        return {(w.name, i.name): Probe(reason="no") if i.name == "flex" else Probe({"fwd": 1.0}) for w, i in tasks}

    monkeypatch.setattr(run, "probe_all", probes)
    tasks = [(SMALL, IMPLS[name]) for name in ("flexbwd", "flex")]
    request = run.Request(caches=tmp_path / "kept")
    for _ in range(2):
        with caches(request.caches) as folder:
            found, words = run.first_calls(request, tasks, folder)
    assert asked == [["flexbwd", "flex"], ["flex"]]  # what failed is tried again
    assert found["causal-d64", "flexbwd"] == Probe({"fwd": 1.0})
    assert words.startswith("1 first calls")


def test_files_are_written_after_each_workload(tmp_path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    def measure(w, impls, found, passes, rounds):
        if w.name == "causal-d64":
            raise KeyboardInterrupt  # as a time limit would
        return [report.Row(w.name, "flexbwd", "fwd", 1.0, 2.0)]

    monkeypatch.setattr(run, "measure", measure)
    monkeypatch.setattr(run, "require_cuda", lambda: None)
    monkeypatch.setattr(run, "facts", lambda: {"date": "2026-12-01", "gpu": "NVIDIA H200"})
    with pytest.raises(KeyboardInterrupt):
        run.run(run.Request(["*-d64"], ["flexbwd"], probe=False, out=tmp_path))
    record = json.loads((tmp_path / "h200-2026-12-01.json").read_text())
    assert [row["workload"] for row in record["rows"]] == ["dense-d64"]
    run.run(run.Request(["dense-d64"], ["flexbwd"], rounds=0, probe=False))
    assert capsys.readouterr().out == "no first calls\n"


def test_passes_are_in_order_and_known() -> None:
    assert run.select_passes(["bwd", "fwd"]) == ["fwd", "bwd"]
    with pytest.raises(OptionError, match="must be fwd or bwd"):
        run.select_passes(["both"])


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU")
def test_without_a_gpu_it_is_one_line(command) -> None:
    ended = command("bench", "--device", "cuda", "--quick")
    assert ended.code == 2
    assert "torch sees no CUDA device" in ended.err
    with pytest.raises(DeviceError):
        run.require_cuda()
