"""What the numbers are held against: limits on ratios of one run, and on host and compile times."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from flexbwd.cli.bench_gpu.peers import OURS
from flexbwd.cli.bench_gpu.report import Row
from flexbwd.cli.bench_gpu.workloads import PASSES, Pass


@dataclass(frozen=True)
class Goal:
    """A largest value, and what was found; None where it was not measured.

    Attributes:
        what: "causal-d128 fwd over the best peer".
        form: how the values are printed.
    """

    what: str
    limit: float
    found: float | None
    form: str = ".2f"

    @property
    def met(self) -> bool | None:
        return None if self.found is None else self.found <= self.limit

    def cells(self) -> tuple[str, str, str, str]:
        """(what, limit, found, verdict)."""
        found = "not measured" if self.found is None else format(self.found, self.form)
        return self.what, f"≤ {self.limit:{self.form}}", found, {None: "", True: "met", False: "missed"}[self.met]


# workload → (forward, backward) time of ours over that of the best peer
_RATIOS = {
    "dense-d64": (1.05, 1.05),
    "causal-d64": (1.05, 1.05),
    "dense-d128": (1.05, 1.05),
    "causal-d128": (1.05, 1.05),
    "dense-d256": (1.0, 0.95),
    "causal-d256": (1.0, 0.95),
    "causal-gqa-d128": (1.05, 1.05),
    "window-d128": (0.85, 0.85),
    "documents-d128": (0.80, 0.75),
    "documents-gqa-d128": (0.85, 0.85),
    "alibi-causal-d128": (0.95, 1.0),
    "alibi-d64": (0.95, 1.0),
}
# (workload, implementation, other) → (forward, backward) time over that of the other; None: no goal
_OVER: dict[tuple[str, str, str], tuple[float | None, float | None]] = {
    ("softcap-d128", OURS, "fa4"): (0.57, 0.75),
    ("documents-d128", "flexbwd-deterministic", OURS): (None, 1.4),
    ("causal-16k-d128", "flexbwd-deterministic", OURS): (None, 1.4),
    ("slopes-d128", "flexbwd-learned", OURS): (None, 1.15),
    ("table-d128", "flexbwd-learned", OURS): (None, 1.5),
    ("key-bias-d128", "flexbwd-learned", OURS): (None, 1.3),
}
_HOST_US = {"fwd": 40.0, "bwd": 80.0}
_ROUND_TRIP_OF = "cudnn"
_COLD_S, _CACHED_S = 8.0, 0.5


def goals(rows: Sequence[Row]) -> list[Goal]:
    """Every goal of a workload and implementation that rows speak of."""
    made = [*_ratios(rows), *_over(rows), *_round_trips(rows)]
    for which in PASSES:
        host = [r.host_us for r in rows if r.impl == OURS and r.which == which and r.host_us is not None]
        if host:
            what = f"host µs of a {which} call, median of {len(host)} workloads"
            made.append(Goal(what, _HOST_US[which], statistics.median(host), ".0f"))
    for name, limit, seconds in (
        ("cold", _COLD_S, lambda r: r.first_s),
        ("from disk", _CACHED_S, lambda r: r.cached_s),
    ):
        slowest = _slowest(rows, seconds)
        if slowest is not None:
            made.append(Goal(f"first call fwd + bwd {name}, s, slowest: {slowest[0]}", limit, slowest[1]))
    return made


def _of(rows: Sequence[Row], workload: str, impl: str, which: Pass) -> Row | None:
    return next((r for r in rows if (r.workload, r.impl, r.which) == (workload, impl, which)), None)


def _ratios(rows: Sequence[Row]) -> Iterator[Goal]:
    for workload, limits in _RATIOS.items():
        for which, limit in zip(PASSES, limits, strict=True):
            row = _of(rows, workload, OURS, which)
            if row is not None:
                yield Goal(f"{workload} {which} over the best peer", limit, row.ratio)


def _over(rows: Sequence[Row]) -> Iterator[Goal]:
    for (workload, impl, other), limits in _OVER.items():
        for which, limit in zip(PASSES, limits, strict=True):
            row, base = (_of(rows, workload, name, which) for name in (impl, other))
            if limit is None or row is None or base is None:
                continue
            found = row.ms / base.ms if row.ms and base.ms else None
            yield Goal(f"{workload} {which}, {impl} over {other}", limit, found)


def _round_trips(rows: Sequence[Row]) -> Iterator[Goal]:
    for row in rows:
        base = _of(rows, row.workload, _ROUND_TRIP_OF, row.which)
        if row.impl == OURS and row.round_trip_ms and base is not None and base.round_trip_ms:
            what = f"{row.workload} {row.which}, host + device, over {_ROUND_TRIP_OF}"
            yield Goal(what, 1.0, row.round_trip_ms / base.round_trip_ms)


def _slowest(rows: Sequence[Row], seconds: Callable[[Row], float | None]) -> tuple[str, float] | None:
    """(workload, seconds of both passes) of ours; None where a pass was not measured."""
    found: dict[str, dict[str, float]] = {}
    for r in rows:
        s = seconds(r)
        if r.impl == OURS and s is not None:
            found.setdefault(r.workload, {})[r.which] = s
    whole = {w: sum(both.values()) for w, both in found.items() if len(both) == len(PASSES)}
    return max(whole.items(), key=lambda item: item[1], default=None)
