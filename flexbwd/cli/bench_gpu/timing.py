"""Implementations take turns: medians of device time (CUDA events) and of host time (wall clock of the Python call)."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

Work = Callable[[], object]


@dataclass(frozen=True)
class Sample:
    """One call."""

    device_ms: float
    host_us: float


@dataclass
class Timing:
    """All samples of one piece of work, or why there are none."""

    samples: list[Sample] = field(default_factory=list)
    reason: str = ""

    @property
    def ms(self) -> float | None:
        return statistics.median(s.device_ms for s in self.samples) if self.samples and not self.reason else None

    @property
    def host_us(self) -> float | None:
        return statistics.median(s.host_us for s in self.samples) if self.samples and not self.reason else None

    @property
    def spread(self) -> float | None:
        """Interquartile range over the median: how far to trust the third digit."""
        if self.ms is None or len(self.samples) < 4:
            return None
        low, _, high = statistics.quantiles((s.device_ms for s in self.samples), n=4)
        return (high - low) / self.ms


class Clock(Protocol):
    """Measures calls on one device."""

    def burst(self, work: Work, calls: int) -> list[Sample]:
        """Time `calls` calls in a row, after one that is not timed."""

    def round_trip_ms(self, work: Work) -> float:
        """Wall time of one call on an idle device until its result is there."""


class CudaClock:
    """A burst begins behind a delay kernel and one call that is not timed, all queued without waiting.

    So the device never waits for the host between the events, the host never waits for the device inside a call, and
    each timed call finds L2, clocks and the allocator as the same call left them.
    """

    DELAY_CYCLES = 4_000_000  # about 2 ms: longer than the host needs to queue a burst

    def burst(self, work: Work, calls: int) -> list[Sample]:
        import torch

        events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(calls)]
        hosts = []
        torch.cuda.synchronize()
        torch.cuda._sleep(self.DELAY_CYCLES)
        work()
        for start, end in events:
            start.record()
            begin = time.perf_counter()
            result = work()
            hosts.append(1e6 * (time.perf_counter() - begin))
            end.record()
            del result
        torch.cuda.synchronize()
        return [Sample(a.elapsed_time(b), us) for (a, b), us in zip(events, hosts, strict=True)]

    def round_trip_ms(self, work: Work) -> float:
        import torch

        torch.cuda.synchronize()
        begin = time.perf_counter()
        work()
        torch.cuda.synchronize()
        return 1e3 * (time.perf_counter() - begin)


def take_turns(clock: Clock, works: Mapping[str, Work], rounds: int, calls: int = 3) -> dict[str, Timing]:
    """Every round runs one burst of each, in an order that rotates; work that raises drops out with its reason."""
    found = {name: Timing() for name in works}
    names = list(works)
    for n in range(rounds):
        shift = n % max(len(names), 1)
        for name in names[shift:] + names[:shift]:
            if found[name].reason:
                continue
            try:
                found[name].samples += clock.burst(works[name], calls)
            except Exception as error:
                found[name].reason = one_line(error)
    return found


def round_trips(clock: Clock, works: Mapping[str, Work], rounds: int) -> dict[str, float]:
    """Median wall milliseconds of a call and its result, in turns; works that raise are left out."""
    found: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(rounds):
        for name in list(found):
            try:
                found[name].append(clock.round_trip_ms(works[name]))
            except Exception:
                del found[name]
    return {name: statistics.median(times) for name, times in found.items() if times}


def one_line(error: BaseException, limit: int = 160) -> str:
    """ "ValueError: what it says", cut to `limit` characters."""
    text = " ".join(str(error).split())
    shown = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return shown if len(shown) <= limit else shown[: limit - 1] + "…"
