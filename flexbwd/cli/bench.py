"""`flexbwd bench` on a CPU: speed and memory as ratios, beside the targets. bench_gpu/ is the other half."""

from __future__ import annotations

import datetime
import json
import os
import platform
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from flexbwd.cli.console import console, table, working
from flexbwd.errors import OptionError

COLUMNS = ("case", "flexbwd", "compared with", "ratio", "target", "")


@dataclass(frozen=True)
class Row:
    """One measurement.

    Attributes:
        value, baseline: in `unit`; baseline None where nothing is compared.
        target: least baseline / value ratio, or, without a baseline, the largest value.
    """

    case: str
    unit: str
    value: float
    baseline: float | None = None
    baseline_name: str = ""
    target: float | None = None
    note: str = ""

    @property
    def ratio(self) -> float | None:
        """How many times less than the baseline."""
        return None if self.baseline is None else self.baseline / self.value

    @property
    def met(self) -> bool | None:
        """Whether the target is met; None without one."""
        if self.target is None:
            return None
        return self.ratio >= self.target if self.ratio is not None else self.value <= self.target

    def cells(self) -> tuple[str, ...]:
        """The row as text, in the order of COLUMNS."""
        compared = "" if self.baseline is None else f"{self.baseline_name} {self.baseline:.4g} {self.unit}"
        ratio = "" if self.ratio is None else f"{self.ratio:.2f}×"
        target = ""
        if self.target is not None:
            target = f"≥ {self.target:g}×" if self.ratio is not None else f"≤ {self.target:g} {self.unit}"
        verdict = {None: "", True: "met", False: "missed"}[self.met]
        return (
            self.case + (f" ({self.note})" if self.note else ""),
            f"{self.value:.4g} {self.unit}",
            compared,
            ratio,
            target,
            verdict,
        )


@dataclass(frozen=True)
class Plan:
    """What to measure: lengths, repeats, and whether the targets (meant for the full lengths) count."""

    length: int = 4096
    long: int = 16384
    mask: int = 131072
    repeats: int = 7
    targets: bool = True
    peers: bool = True

    def target(self, value: float) -> float | None:
        return value if self.targets else None


def run(device: str, *, out: Path | None, quick: bool, peers: bool, repeats: int) -> None:
    """Measure, print the table, and write it to `out` as JSON and Markdown."""
    if device != "cpu":
        raise OptionError(f"--device {device} must be cpu, cuda or auto")
    if out is not None and out.exists() and not out.is_dir():
        raise OptionError(f"--out {out} must be a folder")
    plan = Plan(256, 512, 2048, repeats, targets=False, peers=peers) if quick else Plan(repeats=repeats, peers=peers)
    rows = []
    for case, measure in _cases(plan):
        with working(case):
            rows += measure()
    facts = machine()
    shown = table(" · ".join(str(v) for v in facts.values()), COLUMNS, numbers=("flexbwd", "ratio", "target"))
    for row in rows:
        shown.add_row(*row.cells())
    console().print(shown)
    if out is not None:
        for path in write(out, device, facts, rows):
            print(path)


def machine() -> dict[str, Any]:
    """The facts without which a number means nothing."""
    import torch

    from flexbwd.cli.doctor import cpu_name

    return {
        "date": datetime.date.today().isoformat(),
        "cpu": cpu_name(),
        "cores": f"{os.cpu_count()} cores",
        "threads": f"{torch.get_num_threads()} threads",
        "torch": f"torch {torch.__version__}",
        "python": f"Python {platform.python_version()}",
    }


def write(folder: Path, device: str, facts: dict[str, Any], rows: list[Row]) -> tuple[Path, Path]:
    """`<device>-<date>.json` and `.md` in `folder`."""
    stem = f"{device}-{facts['date']}"
    record = [{**asdict(row), "ratio": row.ratio, "met": row.met} for row in rows]
    lines = [
        f"# Benchmarks on {device}, {facts['date']}",
        "",
        ", ".join(str(value) for name, value in facts.items() if name != "date") + ".",
        "Made by `flexbwd bench`. The best of several runs counts; ours and dense take turns in one process, compiled",
        "code runs in its own.",
        "",
        "| " + " | ".join((*COLUMNS[:-1], "result")) + " |",
        "|" + "---|" * len(COLUMNS),
        *("| " + " | ".join(row.cells()) + " |" for row in rows),
        "",
    ]
    paths = folder / f"{stem}.json", folder / f"{stem}.md"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        paths[0].write_text(json.dumps({"machine": facts, "rows": record}, indent=2) + "\n")
        paths[1].write_text("\n".join(lines))
    except OSError as error:
        raise OptionError(f"--out {folder} cannot be written: {error.strerror}") from error
    return paths


# -- cases -------------------------------------------------------------------------------------------------------------
def _cases(plan: Plan) -> Iterator[tuple[str, Callable[[], list[Row]]]]:
    for name, ratio in (("documents", 4.0), ("causal", 1.3)):
        yield f"{name}, forward + backward", lambda name=name, ratio=ratio: _training_step(name, ratio, plan)  # type: ignore[misc]
    yield "memory of long documents", lambda: _memory(plan)
    yield "create_block_mask", lambda: _block_mask(plan)
    yield "host time", _host_time
    if plan.peers:
        yield "torch's compiled flex_attention", lambda: _peer(plan)


def _training_step(name: str, ratio: float, plan: Plan) -> list[Row]:
    from flexbwd.cli.workloads import fastest, masks, training_step_rivals

    rivals, skipped = training_step_rivals(masks(plan.length)[name], plan.length)
    found = fastest(rivals, plan.repeats)
    case = f"{name} S {plan.length}, forward + backward"
    note = f"{skipped:.0f} % of tiles skipped"
    times = 1e3 * found["ours"], 1e3 * found["dense"]
    return [Row(case, "ms", *times, "dense SDPA, bool mask", plan.target(ratio), note)]


def _memory(plan: Plan) -> list[Row]:
    from flexbwd.cli.apart import measure

    cost = measure("attention", plan.long)
    case = f"documents S {plan.long}, forward + backward, peak extra memory"
    note = f"dense scores alone: {8 * plan.long**2 * 4 / 2**20:.0f} MiB; {cost.seconds:.1f} s"
    return [Row(case, "MiB", cost.extra_mib, target=plan.target(300), note=note)]


def _block_mask(plan: Plan) -> list[Row]:
    from flexbwd.cli.apart import measure

    cost = measure("block_mask", plan.mask)
    case = f"create_block_mask, documents S {plan.mask}"
    return [
        Row(f"{case}, time", "s", cost.seconds, target=plan.target(1)),
        Row(f"{case}, peak extra memory", "MiB", cost.extra_mib, target=plan.target(200)),
    ]


def _host_time() -> list[Row]:
    """Once where the maths is next to nothing, and once where it has emptied the processor's caches; best of seven."""
    from flexbwd.cli.workloads import host_overhead

    case = "host time of a call seen before, beside the maths, S {}"
    note = "score mod with a capture, mask_mod"
    best = {n: min(host_overhead(n, 100) for _ in range(7)) for n in (16, 256)}
    return [Row(case.format(n), "µs", 1e6 * seconds, target=200, note=note) for n, seconds in best.items()]


def _peer(plan: Plan) -> list[Row]:
    from flexbwd.cli.apart import MeasurementError, measure
    from flexbwd.cli.workloads import masks

    if not any(shutil.which(c) for c in ("c++", "g++", "clang++", os.environ.get("CXX") or "c++")):
        console(stderr=True).print("no C++ compiler: torch's compiled flex_attention is not measured")
        return []
    rows = []
    for name in masks(plan.length):
        try:
            costs = [measure(f"{who}-{name}", plan.length, plan.repeats) for who in ("forward", "peer")]
        except MeasurementError as error:  # the peer's own failure must not lose the other rows
            console(stderr=True).print(str(error), markup=False)
            continue
        times = [1e3 * cost.seconds for cost in costs]
        rows.append(Row(f"{name} S {plan.length}, forward", "ms", times[0], times[1], "torch compiled flex"))
    return rows
