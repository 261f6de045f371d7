"""The arithmetic of `flexbwd bench` on a GPU: live elements, FLOPs, medians, ratios, and what is written."""

from __future__ import annotations

import json

import pytest
import torch

from flexbwd.cli.bench_gpu import peers, report, timing, workloads
from flexbwd.cli.bench_gpu.operands import operands
from flexbwd.cli.bench_gpu.report import Row
from flexbwd.cli.bench_gpu.timing import Sample
from flexbwd.cli.bench_gpu.workloads import WORKLOADS, Workload
from flexbwd.errors import OptionError

CPU = torch.device("cpu")


# -- workloads ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("w", [w.smaller() for w in WORKLOADS.values()], ids=lambda w: w.name)
def test_live_elements_are_those_that_the_mask_keeps(w: Workload) -> None:
    q_idx, kv_idx = torch.arange(w.length)[:, None], torch.arange(w.length)[None]
    mask = operands(w, CPU).mask
    b = h = torch.tensor(0)
    kept = w.length**2 if mask is None else int(mask(b, h, q_idx, kv_idx).sum())
    assert w.live_elements() == kept * w.batch * w.heads


def test_flops_are_two_products_forward_and_five_backward() -> None:
    w = Workload("w", "dense", 2, 16, 3, 8)
    product = 2 * 16 * 16 * 8  # multiply and add
    assert w.flops("fwd") == 2 * product * 2 * 3
    assert w.flops("bwd") == 5 * product * 2 * 3


def test_documents_are_those_of_the_peers_table() -> None:
    lengths = workloads.document_lengths(32768)
    assert (len(lengths), sum(lengths), max(lengths)) == (23, 32768, 8192)
    assert sum(map(workloads.triangle, lengths)) / 32768**2 == pytest.approx(0.0534, abs=5e-5)


def test_small_workloads_keep_mods_and_group() -> None:
    w = WORKLOADS["documents-gqa-d128"].smaller()
    assert (w.group, w.mask, w.length) == (4, "documents", 4096)


def test_unknown_names_are_refused_with_the_known_ones() -> None:
    assert [w.name for w in workloads.select(["dense-*", "small-d128"])][-1] == "small-d128"
    with pytest.raises(OptionError, match="matches none of dense-d64"):
        workloads.select(["dense-d65"])
    with pytest.raises(OptionError, match="matches none of flexbwd, fa4"):
        peers.select(["fa5"])


def test_implementations_are_put_only_what_they_have() -> None:
    served = {i.name: [w.name for w in WORKLOADS.values() if i.serves(w)] for i in peers.IMPLS.values()}
    assert len(served["flexbwd"]) == len(WORKLOADS)
    assert "documents-d128" not in served["fa4"] and "documents-d128" in served["fa4-mods"]
    assert "softcap-d128" not in served["cudnn"] and "causal-gqa-d128" in served["cudnn"]
    assert served["flexbwd-learned"] == ["slopes-d128", "table-d128", "key-bias-d128"]


@pytest.mark.parametrize("w", [w.smaller() for w in WORKLOADS.values()], ids=lambda w: w.name)
def test_every_workload_has_kernels(w: Workload, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planned with CPU tensors in place of CUDA ones, and not compiled."""
    from flexbwd import backends, warmup
    from flexbwd.jit import warm

    monkeypatch.setattr(backends, "choose", lambda name, device: "sm90")
    monkeypatch.setattr(backends, "capability", lambda index: (9, 0))
    given = operands(w, CPU)
    with warm.gathering() as jobs:
        warmup(*given.leaves(), score_mod=given.score(given.capture), mask_mod=given.mask)
    names = {type(config).__name__ for config, _ in jobs}
    assert "FwdConfig" in names and "DeltaConfig" in names
    assert names & {"BwdConfig", "DkvConfig"}
    assert ("DqConfig" in names) == (w.dim > 128)


# -- timing ----------------------------------------------------------------------------------------------------
class FakeClock:
    """A call takes as many milliseconds as its work returns."""

    def __init__(self) -> None:
        self.order: list[float] = []

    def burst(self, work: timing.Work, calls: int) -> list[Sample]:
        ms = float(work())  # type: ignore[arg-type]
        self.order.append(ms)
        return [Sample(ms + n, 10 * ms) for n in range(calls)]

    def round_trip_ms(self, work: timing.Work) -> float:
        return float(work())  # type: ignore[arg-type]


def test_medians_and_turns_that_rotate() -> None:
    clock = FakeClock()
    found = timing.take_turns(clock, {"a": lambda: 1.0, "b": lambda: 2.0}, rounds=3, calls=3)
    assert clock.order == [1.0, 2.0, 2.0, 1.0, 1.0, 2.0]
    assert (found["a"].ms, found["a"].host_us, len(found["a"].samples)) == (2.0, 10.0, 9)
    assert found["b"].spread == pytest.approx(2 / 3)


def test_work_that_raises_drops_out_and_the_others_go_on() -> None:
    def broken() -> object:
        raise ValueError("no\n luck")

    works = {"broken": broken, "a": lambda: 1.0}
    found = timing.take_turns(FakeClock(), works, rounds=2)
    assert (found["broken"].ms, found["broken"].reason) == (None, "ValueError: no luck")
    assert found["a"].ms == 2.0
    assert timing.round_trips(FakeClock(), works, rounds=2) == {"a": 1.0}


# -- report ----------------------------------------------------------------------------------------------------
ROWS = [
    Row("causal-d64", "flexbwd", "fwd", 1.0, 500.0, host_us=30.0, first_s=2.0, error=2e-3),
    Row("causal-d64", "fa4", "fwd", 1.25, 400.0),
    Row("causal-d64", "cudnn", "fwd", 2.0, 250.0),
    Row("causal-d64", "flex", "fwd", reason="RuntimeError: too big"),
    Row("causal-d64", "flexbwd", "bwd", 3.0, 450.0),
    Row("causal-d64", "flexbwd-deterministic", "bwd", 4.5, 300.0),
]


def test_ratios_are_to_the_fastest_peer_and_of_variants_to_ours() -> None:
    got = {(r.impl, r.which): (r.ratio, r.against) for r in report.with_ratios(ROWS)}
    assert got["flexbwd", "fwd"] == (0.8, "fa4")
    assert got["fa4", "fwd"] == (1.0, "fa4")
    assert got["cudnn", "fwd"] == (1.6, "fa4")
    assert got["flex", "fwd"] == (None, "")
    assert got["flexbwd", "bwd"] == (None, "")
    assert got["flexbwd-deterministic", "bwd"] == (1.5, "flexbwd")


def test_files_hold_every_row_and_the_table(tmp_path) -> None:
    facts = {"date": "2026-12-01", "gpu": "NVIDIA H200", "driver": "580"}
    rows = report.with_ratios(ROWS)
    paths = report.write(tmp_path / "new", "h200-2026-12-01", facts, rows, list(WORKLOADS.values()))
    record = json.loads(paths[0].read_text())
    assert record["machine"] == facts
    assert [set(row) >= {"workload", "impl", "pass", "ms", "tflops", "ratio"} for row in record["rows"]] == [True] * 6
    assert record["rows"][3] == {"workload": "causal-d64", "impl": "flex", "pass": "fwd", "ms": None, "tflops": None,
                                 "ratio": None, "reason": "RuntimeError: too big"}  # fmt: skip
    page = paths[1].read_text()
    line = "| causal-d64: causal, D64 B2 S8192 H32 | fwd | 1.000 | 500 | 1.250 | failed | 2.000 | 400 | 0.80 |"
    assert line in page.splitlines()
    assert "| causal-d64 | bwd | flexbwd, deterministic | 4.500 | 1.50 |" in page
    assert "- causal-d64, torch flex: RuntimeError: too big" in page


def test_a_folder_that_cannot_be_made_is_an_option_error(tmp_path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OptionError, match="cannot be written"):
        report.write(tmp_path / "file", "x", {"date": "d"}, [], [])


def test_goals_speak_of_what_was_measured() -> None:
    from flexbwd.cli.bench_gpu.goals import goals

    rows = report.with_ratios([
        *ROWS,
        Row("softcap-d128", "flexbwd", "fwd", 1.0), Row("softcap-d128", "fa4", "fwd", 2.0),
        Row("small-d128", "flexbwd", "bwd", 1.0, host_us=90.0, round_trip_ms=0.3, first_s=5.0),
        Row("small-d128", "cudnn", "bwd", 1.0, round_trip_ms=0.2),
        Row("small-d128", "flexbwd", "fwd", 1.0, host_us=50.0, first_s=2.5),
    ])  # fmt: skip
    found = {goal.what: (goal.limit, goal.found, goal.met) for goal in goals(rows)}
    assert found.pop("small-d128 bwd, host + device, over cudnn") == (1.0, pytest.approx(1.5), False)
    assert found == {
        "causal-d64 fwd over the best peer": (1.05, 0.8, True),
        "causal-d64 bwd over the best peer": (1.05, None, None),
        "softcap-d128 fwd, flexbwd over fa4": (0.57, 0.5, True),
        "host µs of a fwd call, median of 2 workloads": (40.0, 40.0, True),
        "host µs of a bwd call, median of 1 workloads": (80.0, 90.0, False),
        "first call fwd + bwd cold, s, slowest: small-d128": (8.0, 7.5, True),
    }
