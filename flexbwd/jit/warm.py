"""Make many kernels ready at once: from disk where they are there, else compiled, in parallel, by worker processes.

    warm([(config, build), ...])            now; returns what was done
    with gathering() as jobs: ...           calls of `warm` inside only note their jobs
    ahead([(config, build), ...])           in the background: a first use that comes earlier waits for it

The DSL compiles one kernel at a time in a process, so workers (worker.py) compile into the disk cache and this process
loads from it. It takes jobs itself while they start, which takes about as long as compiling one kernel: below
`FEW` kernels no worker is started. FLEXBWD_COMPILE_WORKERS sets how many there are; 0 is none.
"""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from flexbwd.errors import OptionError
from flexbwd.jit import alarm, cache, codec
from flexbwd.jit.compile import Build, Kernel, kernel_of, name_of

FEW = 3
MOST_WORKERS = 8  # each takes up to 0.9 GiB
ENVIRONMENT = "FLEXBWD_COMPILE_WORKERS"


class Done(NamedTuple):
    """How one kernel came."""

    name: str
    how: str  # "memory", "loaded", "compiled", "worker"
    seconds: float


Job = tuple[Any, Build]
Report = Callable[[Done], None]

_gathered: list[list[Job]] = []


def warm(jobs: Iterable[Job], workers: int | None = None, report: Report | None = None) -> list[Done]:
    """Make the kernels of `jobs` ready in this process; costly ones first in the list come off best.

    Args:
        workers: processes that compile beside this one; None lets the number of jobs and cores decide.
        report: told of each kernel as it becomes ready.
    Raises:
        CompileError, UnsupportedError: from the first kernel that cannot be compiled.
    """
    jobs = list(dict(jobs).items())  # one of each configuration
    if _gathered:
        _gathered[-1] += jobs
        return []
    with alarm.warming():
        round_ = _Round(report)
        missing = [k for k in (kernel_of(*job) for job in jobs) if not round_.bring(k)]
        count = min(_workers(len(missing)) if workers is None else workers, max(0, len(missing) - 1))
        round_.make(missing, count)
    return round_.done


@contextmanager
def gathering() -> Iterator[list[Job]]:
    """Inside the block `warm` adds its jobs to the list instead of doing them. For one thread."""
    jobs: list[Job] = []
    _gathered.append(jobs)
    try:
        yield jobs
    finally:
        _gathered[:] = [g for g in _gathered if g is not jobs]


def ahead(jobs: Iterable[Job]) -> None:
    """Start compiling what is not on disk, in a worker of its own, and return at once. Needs the disk cache."""
    store = cache.default()
    if store.store is None or _gathered or not _workers(FEW):
        return
    lines = [_request(k) for k in (kernel_of(*job) for job in jobs) if not k.load(store)]
    wanted = [line for line in lines if line is not None]
    if wanted:
        threading.Thread(target=_serve_ahead, args=(wanted,), daemon=True, name="flexbwd-ahead").start()


def _serve_ahead(lines: list[str]) -> None:
    with suppress(OSError), _Worker({}) as worker:
        for line in lines:
            worker.ask(line)


class _Round:
    """One call of `warm`."""

    def __init__(self, report: Report | None) -> None:
        self.done: list[Done] = []
        self._report = report
        self._lock = threading.Lock()

    def say(self, kernel: Kernel, how: str, seconds: float) -> None:
        with self._lock:
            self.done.append(Done(name_of(kernel.config), how, seconds))
            if self._report is not None:
                self._report(self.done[-1])

    def bring(self, kernel: Kernel) -> bool:
        """From memory or disk, if it is there."""
        if kernel.is_ready:
            self.say(kernel, "memory", 0.0)
        elif kernel.load():
            assert kernel.event is not None
            self.say(kernel, "loaded", kernel.event.seconds)
        return kernel.is_ready

    def make(self, missing: list[Kernel], workers: int) -> None:
        """Compile, here and in `workers` processes."""
        waiting = deque(missing)
        with ExitStack() as stack:
            store = _shared_store(stack) if workers else None
            threads = [threading.Thread(target=self.feed, args=(waiting, store), daemon=True) for _ in range(workers)]
            kernel = _take(waiting)  # the first is ours: workers need as long to start as it takes
            for thread in threads:
                thread.start()
            try:
                while kernel is not None:
                    self._here(kernel)
                    kernel = _take(waiting)
            except BaseException:
                waiting.clear()  # a kernel that fails here ends the round; workers finish what they hold
                raise
            for thread in threads:
                thread.join()
        for kernel in missing:  # where a worker failed: here the error shows
            if not kernel.is_ready:
                self._here(kernel)

    def _here(self, kernel: Kernel) -> None:
        kernel.ready()
        assert kernel.event is not None
        self.say(kernel, kernel.event.how, kernel.event.seconds)

    def feed(self, waiting: deque[Kernel], store: cache.Cache | None) -> None:
        """One worker's thread: hand it jobs and load what it made, until there are none left, or it fails."""
        environment = {} if store is None else {"FLEXBWD_CACHE": "1", "FLEXBWD_CACHE_DIR": str(store.root)}
        with suppress(OSError, ValueError), _Worker(environment) as worker:
            while (kernel := _take(waiting)) is not None:
                line = _request(kernel)
                answer = None if line is None else worker.ask(line)
                if answer is None or not answer["ok"]:
                    if line is None:
                        continue  # only this process can make it, at the end
                    return
                if kernel.load(store):
                    self.say(kernel, "worker", answer["seconds"])


class _Worker:
    """A worker process; OSError when it cannot be started."""

    def __init__(self, environment: dict[str, str]) -> None:
        if not sys.executable:
            raise OSError("no interpreter to start")
        # this process's module path, so that the same flexbwd is found; its own GPU memory is not worth a context
        code = f"import sys; sys.path[:] = {sys.path!r}; from flexbwd.jit.worker import main; main()"
        hidden = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "FLEXBWD_COMPILE_ALARM": "off"}
        self._process = subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, **hidden, **environment},
        )
        atexit.register(self._process.kill)

    def __enter__(self) -> _Worker:
        return self

    def __exit__(self, *error: object) -> None:
        atexit.unregister(self._process.kill)
        with suppress(OSError):
            try:
                self._process.communicate(timeout=60)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()

    def ask(self, line: str) -> dict[str, Any] | None:
        """The answer to a request, or None if the process is gone."""
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
        except OSError:
            return None
        return json.loads(answer) if answer else None  # type: ignore[no-any-return]


def _request(kernel: Kernel) -> str | None:
    """The line that tells a worker to make `kernel`; None if it cannot be said."""
    try:
        build = kernel.build if isinstance(kernel.build, str) else codec.path_of(kernel.build)
        if not isinstance(kernel.build, str) and codec.find(build) is not kernel.build:
            return None
        return json.dumps({"build": build, "config": codec.to_wire(kernel.config)})
    except (AttributeError, ImportError, ValueError):
        return None


def _shared_store(stack: ExitStack) -> cache.Cache:
    """Where workers put their kernels: the disk cache, or, when there is none to write to, a folder for this once."""
    store = cache.default()
    if store.store is not None:
        return store
    return cache.Cache.under(Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="flexbwd-"))) / "kernels")


def _take(waiting: deque[Kernel]) -> Kernel | None:
    try:
        return waiting.popleft()
    except IndexError:
        return None


def _workers(missing: int) -> int:
    """How many processes to start for so many kernels."""
    named = os.environ.get(ENVIRONMENT)
    if named:
        if not named.isdigit():
            raise OptionError(f"{ENVIRONMENT}={named!r} must be a number of processes, 0 for none")
        return int(named)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    idle = cores - 1 - round(os.getloadavg()[0])  # one is ours; a worker on a busy core only costs
    return 0 if missing < FEW else max(0, min(idle, MOST_WORKERS))
