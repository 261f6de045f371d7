"""First calls in processes of their own, many at a time.

They tell how long a cold first call takes, fill the disk caches for the run that measures, and meet crashes and hangs
that would otherwise end it. `python -m flexbwd.cli.bench_gpu.probe` reads tasks from stdin, one JSON object a line, and
answers each with one line: {"first": {"fwd": s, "bwd": s}} or {"reason": "..."}.
"""

from __future__ import annotations

import dataclasses
import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from flexbwd.cli.bench_gpu.peers import IMPLS, Impl
from flexbwd.cli.bench_gpu.timing import one_line
from flexbwd.cli.bench_gpu.workloads import Pass, Workload

COMMAND = (sys.executable, "-m", "flexbwd.cli.bench_gpu.probe")
LIMIT_S = 180.0  # for one task; beyond it the process hangs
_SLOW = ("fa4-mods", "flex", "fa4", "flexbwd")  # those that compile longest are begun first
_ANSWER = "probe: "  # what an answer's line begins with: libraries print too

Task = tuple[Workload, Impl]


@dataclass(frozen=True)
class Probe:
    """What a task ended with: cold seconds of the first calls, or why it failed."""

    first_s: dict[Pass, float] = field(default_factory=dict)
    reason: str = ""


def probe_all(
    tasks: Sequence[Task], processes: int, command: Sequence[str] = COMMAND, limit_s: float = LIMIT_S,
    done: Callable[[Task, Probe], None] = lambda task, found: None,
) -> dict[tuple[str, str], Probe]:  # fmt: skip
    """Run the tasks over `processes` workers; (workload, implementation) → what it ended with. A task never raises."""
    rank = {name: n for n, name in enumerate(_SLOW)}
    todo: queue.Queue[Task] = queue.Queue()
    for task in sorted(tasks, key=lambda t: rank.get(t[1].name, len(rank))):
        todo.put(task)
    found: dict[tuple[str, str], Probe] = {}

    def serve() -> None:
        with _Worker(command, limit_s) as worker:
            while True:
                try:
                    w, impl = todo.get_nowait()
                except queue.Empty:
                    return
                found[w.name, impl.name] = answer = worker.ask(w, impl)
                done((w, impl), answer)

    threads = [threading.Thread(target=serve) for _ in range(min(processes, len(tasks)))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


class _Worker:
    """A probing process, replaced by a new one when it dies, hangs or has lost its device."""

    def __init__(self, command: Sequence[str], limit_s: float) -> None:
        self.command, self.limit_s = command, limit_s
        self.process: subprocess.Popen[str] | None = None

    def __enter__(self) -> _Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def ask(self, w: Workload, impl: Impl) -> Probe:
        if self.process is None:
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            self.process = subprocess.Popen(
                self.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
                env=environment,
            )  # fmt: skip
        alarm = threading.Timer(self.limit_s, self.process.kill)
        alarm.start()
        try:
            answer = self._exchange(json.dumps({"workload": dataclasses.asdict(w), "impl": impl.name}))
        finally:
            alarm.cancel()
        if answer is None:
            code = self.process.wait()
            self._end()
            late = code == -9 and not alarm.is_alive()
            return Probe(reason=f"no answer in {self.limit_s:.0f} s" if late else f"the process ended with code {code}")
        if answer.pop("lost", False):
            self._end()
        return Probe(answer.get("first", {}), answer.get("reason", ""))

    def _exchange(self, line: str) -> dict[str, Any] | None:
        assert self.process is not None and self.process.stdin is not None and self.process.stdout is not None
        try:
            self.process.stdin.write(line + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            return None
        for text in self.process.stdout:
            if text.startswith(_ANSWER):
                found: dict[str, Any] = json.loads(text[len(_ANSWER) :])
                return found
        return None

    def _end(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.communicate()
            self.process = None


def main() -> None:
    """The probing process."""
    for line in sys.stdin:
        task = json.loads(line)
        answer = _attempt(
            Workload(**{**task["workload"], "variants": tuple(task["workload"]["variants"])}), task["impl"]
        )
        print(_ANSWER + json.dumps(answer), flush=True)


def _attempt(w: Workload, name: str) -> dict[str, Any]:
    import torch

    from flexbwd.cli.bench_gpu.call import ready
    from flexbwd.cli.bench_gpu.operands import operands
    from flexbwd.cli.bench_gpu.oracle import expected

    device = torch.device("cuda")
    try:
        given = operands(w, device)
        found = ready(IMPLS[name], w, given, expected(w, given))
        return {"first": dict(found.first_s)}
    except Exception as error:
        return {"reason": one_line(error), "lost": _lost()}


def _lost() -> bool:
    """Whether the device refuses everything after an error in a kernel."""
    import torch

    try:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    except RuntimeError:
        return True
    return False


if __name__ == "__main__":
    main()
