"""Rows, ratios to the best peer, and how they are shown and written."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from flexbwd.cli.bench_gpu.peers import IMPLS, OURS
from flexbwd.cli.bench_gpu.workloads import PASSES, Pass, Workload
from flexbwd.errors import OptionError


@dataclass(frozen=True)
class Row:
    """One implementation, workload and pass.

    Attributes:
        ms: median device time; None when it failed, and `reason` says why.
        tflops: over live score elements.
        ratio: `ms` over that of `against`: the fastest peer, or ours for a variant of ours.
        host_us: median wall time of the Python call while the device is busy.
        round_trip_ms: wall time of call and result on an idle device, for short workloads.
        first_s: cold first call of this pass, compiling included; cached_s: with the disk caches filled.
        error: largest relative error of the pass's results against fp32.
        spread: interquartile range of the samples over their median.
    """

    workload: str
    impl: str
    which: Pass
    ms: float | None = None
    tflops: float | None = None
    ratio: float | None = None
    against: str = ""
    host_us: float | None = None
    round_trip_ms: float | None = None
    first_s: float | None = None
    cached_s: float | None = None
    error: float | None = None
    spread: float | None = None
    reason: str = ""

    def record(self) -> dict[str, Any]:
        """The row as in the JSON file: `pass` instead of `which`, and no empty fields but ms, tflops and ratio."""
        fields = {("pass" if k == "which" else k): v for k, v in asdict(self).items()}
        always = ("workload", "impl", "pass", "ms", "tflops", "ratio")
        return {k: _rounded(v) for k, v in fields.items() if k in always or v not in (None, "")}


def _rounded(value: Any) -> Any:
    return float(f"{value:.5g}") if isinstance(value, float) else value


def with_ratios(rows: Iterable[Row]) -> list[Row]:
    """Each row's ratio to the fastest peer of its workload and pass; of a variant of ours, to ours."""
    rows = list(rows)
    best: dict[tuple[str, Pass], Row] = {}
    ours: dict[tuple[str, Pass], Row] = {}
    for row in rows:
        key = row.workload, row.which
        if row.ms is None:
            continue
        if row.impl == OURS:
            ours[key] = row
        elif IMPLS[row.impl].is_peer and IMPLS[row.impl].counts and (key not in best or row.ms < (best[key].ms or 0)):
            best[key] = row
    done = []
    for row in rows:
        variant = not IMPLS[row.impl].is_peer and row.impl != OURS
        other = (ours if variant else best).get((row.workload, row.which))
        if row.ms is not None and other is not None and other.ms:
            row = replace(row, ratio=row.ms / other.ms, against=other.impl)
        done.append(row)
    return done


# -- tables ----------------------------------------------------------------------------------------------------
Table = tuple[tuple[str, ...], list[tuple[str, ...]]]


def times(rows: Sequence[Row], workloads: Sequence[Workload], titles: bool = True) -> Table:
    """Milliseconds of everybody, our TFLOP/s and the ratio to the best peer; `titles` says what a workload is."""
    peers = [i for i in IMPLS.values() if i.is_peer and any(r.impl == i.name for r in rows)]
    columns = (
        "workload",
        "pass",
        "flexbwd ms",
        "TFLOP/s",
        *(f"{p.label} ms" for p in peers),
        "best peer TFLOP/s",
        "ratio",
    )
    at = {(r.workload, r.which, r.impl): r for r in rows}
    lines = []
    for w in workloads:
        for which in PASSES:
            here = [r for r in rows if (r.workload, r.which) == (w.name, which)]
            if not here:
                continue
            mine = at.get((w.name, which, OURS))
            theirs = [at.get((w.name, which, p.name)) for p in peers]
            rates = [r.tflops for r in theirs if r is not None and r.tflops and IMPLS[r.impl].counts]
            ratio = "" if mine is None or mine.ratio is None else f"{mine.ratio:.2f}"
            named = f"{w.name}: {w.title}" if titles else w.name
            ours = named, which, _ms(mine), _rate(None if mine is None else mine.tflops)
            lines.append((*ours, *map(_ms, theirs), _rate(max(rates, default=None)), ratio))
    return columns, lines


def variants(rows: Sequence[Row]) -> Table:
    """Other ways of ours, over ours."""
    columns = ("workload", "pass", "variant", "ms", "over flexbwd")
    lines: list[tuple[str, ...]] = [
        (r.workload, r.which, IMPLS[r.impl].label, _ms(r), "" if r.ratio is None else f"{r.ratio:.2f}")
        for r in rows
        if not IMPLS[r.impl].is_peer and r.impl != OURS
    ]
    return columns, lines


def calls(rows: Sequence[Row]) -> Table:
    """Host time, round trips and first calls."""
    columns = ("workload", "pass", "impl", "host µs", "round trip ms", "first call s", "from disk s", "error", "spread")
    lines: list[tuple[str, ...]] = []
    for r in rows:
        if r.ms is None and r.first_s is None:
            continue
        cells = (_plain(r.host_us, ".0f"), _plain(r.round_trip_ms, ".3f"), _plain(r.first_s, ".2f"))
        rest = (_plain(r.cached_s, ".2f"), _plain(r.error, ".1e"), _plain(r.spread, ".1%"))
        lines.append((r.workload, r.which, IMPLS[r.impl].label, *cells, *rest))
    return columns, lines


def against_goals(rows: Sequence[Row]) -> Table:
    """The goals and what was found."""
    from flexbwd.cli.bench_gpu.goals import goals

    return ("goal", "limit", "found", "result"), [goal.cells() for goal in goals(rows)]


def failures(rows: Sequence[Row]) -> list[str]:
    """ "workload, implementation: reason", each once."""
    seen = {f"{r.workload}, {IMPLS[r.impl].label}: {r.reason}": None for r in rows if r.reason}
    return list(seen)


def _ms(row: Row | None) -> str:
    if row is None:
        return ""
    return "failed" if row.ms is None else f"{row.ms:.3f}"


def _rate(tflops: float | None) -> str:
    return "" if tflops is None else f"{tflops:.0f}"


def _plain(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


# -- files -----------------------------------------------------------------------------------------------------
def write(
    folder: Path, stem: str, facts: dict[str, Any], rows: Sequence[Row], workloads: Sequence[Workload]
) -> tuple[Path, Path]:
    """`<stem>.json` and `<stem>.md` in `folder`."""
    paths = folder / f"{stem}.json", folder / f"{stem}.md"
    record = {"machine": facts, "rows": [row.record() for row in rows]}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        paths[0].write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n")
        paths[1].write_text(markdown(facts, rows, workloads))
    except OSError as error:
        raise OptionError(f"--out {folder} cannot be written: {error.strerror}") from error
    return paths


_ABOUT_CALLS = (
    "Host: wall time of the Python call while the device is busy. First call: in a fresh process with empty caches, as",
    "many at a time as the machine has cores; from disk: the same, once the caches are filled. Error: the largest",
    "relative error of a result against fp32. Spread: interquartile range over the median.",
)


def markdown(facts: dict[str, Any], rows: Sequence[Row], workloads: Sequence[Workload]) -> str:
    """The page of one run."""
    name = str(facts.get("gpu", "GPU"))
    head = [
        f"# {name}, {facts['date']}",
        "",
        ", ".join(f"{k} {v}" for k, v in facts.items() if k not in ("gpu", "date")) + ".",
        "",
        "Made by `flexbwd bench`: bf16, random q, k, v, dO; all implementations in one process, taking turns; medians",
        "of CUDA events. TFLOP/s count live score elements only: 4·D each forward, 2.5 times that backward. Ratio: our",
        "time over that of the fastest peer (below 1: ours is faster). FA4 varlen takes documents as sequences of",
        "their own, with no mask; it is shown, but does not count as a peer.",
        "",
    ]
    parts = [*head, *_table(times(rows, workloads))]
    held = against_goals(rows)
    if held[1]:
        parts += ["", "Goals:", "", *_table(held)]
    extra = variants(rows)
    if extra[1]:
        parts += ["", "Other ways of calling flexbwd:", "", *_table(extra)]
    parts += ["", *_ABOUT_CALLS, "", *_table(calls(rows))]
    failed = failures(rows)
    if failed:
        parts += ["", "Failed, and therefore not timed:", "", *(f"- {line}" for line in failed)]
    return "\n".join(parts) + "\n"


def _table(made: Table) -> list[str]:
    columns, lines = made
    body = ["| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines]
    return ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns), *body]
