"""The run: probe, then workload by workload check, take turns, and report."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from flexbwd.cli.bench_gpu import peers, report, workloads
from flexbwd.cli.bench_gpu.caches import Probes, caches, keep_probes, known_probes
from flexbwd.cli.bench_gpu.machine import facts, stem
from flexbwd.cli.bench_gpu.peers import Impl
from flexbwd.cli.bench_gpu.probe import Probe, Task, probe_all
from flexbwd.cli.bench_gpu.report import Row
from flexbwd.cli.bench_gpu.timing import Clock, CudaClock, Timing, one_line, round_trips, take_turns
from flexbwd.cli.bench_gpu.workloads import PASSES, Pass, Workload
from flexbwd.cli.console import console, table
from flexbwd.errors import DeviceError, OptionError


@dataclass(frozen=True)
class Request:
    """What to measure.

    Attributes:
        workloads, impls: globs; none are all.
        passes: fwd, bwd; none are both.
        rounds: turns of each implementation; 0 makes first calls only.
        quick: small workloads: a smoke test, not a measurement.
        probe: first calls in processes of their own, which also tells the cold compile time.
        caches: folder in which compiled code and the times of first calls are kept; None: cold, and thrown away.
    """

    workloads: Sequence[str] = ()
    impls: Sequence[str] = ()
    passes: Sequence[str] = ()
    rounds: int = 5
    quick: bool = False
    probe: bool = True
    out: Path | None = None
    caches: Path | None = None


def run(request: Request) -> None:
    """Measure on the current CUDA device, print, and write to `out`, after each workload what there is so far."""
    chosen = workloads.select(request.workloads)
    if request.quick:
        chosen = [w.smaller() for w in chosen]
    passes = select_passes(request.passes)
    if request.out is not None and request.out.exists() and not request.out.is_dir():
        raise OptionError(f"--out {request.out} must be a folder")
    impls, absent = peers.select(request.impls)
    require_cuda()
    for line in absent:
        console(stderr=True).print(f"not measured: {line}", markup=False)
    with warnings.catch_warnings(), caches(request.caches) as folder:
        warnings.simplefilter("ignore")  # peers warn about themselves
        found, probing = first_calls(request, [(w, i) for w in chosen for i in impls if i.serves(w)], folder)
        machine = facts()
        begin = time.perf_counter()
        rows: list[Row] = []
        for w in chosen if request.rounds else ():
            rows += measure(w, [i for i in impls if i.serves(w)], found, passes, request.rounds)
            rows = report.with_ratios(rows)
            spent = f"{probing}, measuring {time.perf_counter() - begin:.0f} s"
            known = {**machine, "run": f"{request.rounds} rounds ({spent})"}
            if request.out is not None:
                paths = report.write(request.out, stem(known), known, rows, chosen)
    if not rows:
        print(probing)
        return
    show(known, rows, chosen)
    if request.out is not None:
        print(*paths, sep="\n")


def first_calls(request: Request, tasks: Sequence[Task], folder: Path) -> tuple[Probes, str]:
    """What first calls end with, those known from `folder` and those made now; and how long it took, in words."""
    known = known_probes(folder)
    if not request.probe:
        return known, "no first calls"
    begin = time.perf_counter()
    new = probe_all([(w, i) for w, i in tasks if (w.name, i.name) not in known], processes(), done=_progress)
    found = {**known, **new}
    keep_probes(folder, found)
    return found, f"{len(new)} first calls {time.perf_counter() - begin:.0f} s"


def select_passes(names: Sequence[str]) -> list[Pass]:
    """fwd before bwd."""
    unknown = [name for name in names if name not in PASSES]
    if unknown:
        raise OptionError(f"--pass {' '.join(unknown)} must be fwd or bwd")
    return [which for which in PASSES if not names or which in names]


def require_cuda() -> None:
    import torch

    if not torch.cuda.is_available():
        raise DeviceError("--device cuda: torch sees no CUDA device; run on a GPU machine, or measure --device cpu")


def processes() -> int:
    return max(1, os.cpu_count() or 1)


def _progress(task: Task, found: Probe) -> None:
    w, impl = task
    seconds = " + ".join(f"{s:.1f}" for s in found.first_s.values())
    console(stderr=True).print(f"  {w.name} {impl.name}: {found.reason or seconds + ' s'}", markup=False)


def measure(w: Workload, impls: Sequence[Impl], found: Probes, passes: Sequence[Pass], rounds: int) -> list[Row]:
    """Rows of one workload on the CUDA device, without ratios."""
    import torch

    from flexbwd.cli.bench_gpu.operands import operands
    from flexbwd.cli.bench_gpu.oracle import expected

    try:
        given = operands(w, torch.device("cuda"))
        want = expected(w, given)
    except Exception as error:  # out of memory, or a device lost to an earlier kernel
        reason = one_line(error)
        return [Row(w.name, impl.name, which, reason=reason) for impl in impls for which in passes]
    rows = compare(w, impls, found, passes, Turns(CudaClock(), rounds), (given, want))
    torch.cuda.empty_cache()
    return rows


@dataclass(frozen=True)
class Turns:
    clock: Clock
    rounds: int


def compare(
    w: Workload, impls: Sequence[Impl], found: Probes, passes: Sequence[Pass], turns: Turns, data: tuple[Any, Any]
) -> list[Row]:
    """Check every implementation on `data` = (operands, expected), then let the right ones take turns."""
    from flexbwd.cli.bench_gpu.call import Ready, ready

    sound: dict[str, Ready] = {}
    reasons: dict[str, str] = {}
    for impl in impls:
        probe = found.get((w.name, impl.name), Probe())
        if probe.reason:  # it failed in its own process: not worth the risk here
            reasons[impl.name] = probe.reason
            continue
        try:
            sound[impl.name] = ready(impl, w, *data)
        except Exception as error:
            reasons[impl.name] = one_line(error)
    rows = [Row(w.name, impl, which, reason=reason) for impl, reason in reasons.items() for which in passes]
    for which in passes:
        works = {name: r.work(which) for name, r in sound.items()}
        taken = take_turns(turns.clock, works, turns.rounds)
        whole = round_trips(turns.clock, works, 4 * turns.rounds) if w.host_bound else {}
        for name, r in sound.items():
            cold = found.get((w.name, name), Probe()).first_s.get(which)
            row = timed(w, which, taken[name], name)
            largest = max(e for key, e in r.errors.items() if (key == "out") == (which == "fwd"))
            first, cached = (r.first_s[which], None) if cold is None else (cold, r.first_s[which])
            rows.append(replace(row, round_trip_ms=whole.get(name), first_s=first, cached_s=cached, error=largest))
    return rows


def timed(w: Workload, which: Pass, t: Timing, impl: str) -> Row:
    """What the clock says of one implementation."""
    rate = None if t.ms is None else w.flops(which) / t.ms / 1e9  # FLOP per ms are 1e9 of them in TFLOP/s
    return Row(w.name, impl, which, t.ms, rate, host_us=t.host_us, spread=t.spread, reason=t.reason)


def show(known: Mapping[str, Any], rows: Sequence[Row], chosen: Sequence[Workload]) -> None:
    """The tables on stdout."""
    title = " · ".join(f"{k} {v}" if k not in ("gpu", "date") else str(v) for k, v in known.items())
    out = console()
    tables = {
        title: report.times(rows, chosen, titles=False),
        "other ways of ours": report.variants(rows),
        "calls": report.calls(rows),
        "goals": report.against_goals(rows),
    }
    for name, made in tables.items():
        columns, lines = made
        if lines:
            shown = table(
                name,
                columns,
                numbers=[c for c in columns if c not in ("workload", "pass", "impl", "variant", "goal", "result")],
            )
            for cells in lines:
                shown.add_row(*cells)
            out.print(shown)
    for line in report.failures(rows):
        out.print(f"failed: {line}", markup=False)
