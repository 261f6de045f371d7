"""Time and peak memory of one piece of work, measured in a process of its own.

Memory needs that, and so do rivals that bring another OpenMP runtime: compiled code and torch's own operators disturb
each other's threads. `python -m flexbwd.cli.apart WORK LENGTH REPEATS` prints one JSON object.
"""

from __future__ import annotations

import json
import re
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from flexbwd.errors import FlexError


class Cost(NamedTuple):
    """What a piece of work took."""

    seconds: float  # best of the repeats
    extra_mib: float  # of the first, beyond what was in use before


class MeasurementError(FlexError):
    """The measuring process failed; the message is its last line."""


def measure(work: str, length: int, repeats: int = 1) -> Cost:
    """Run one of WORKS in a fresh process."""
    command = [sys.executable, "-m", "flexbwd.cli.apart", work, str(length), str(repeats)]
    run = subprocess.run(command, capture_output=True, text=True)
    if run.returncode:
        lines = run.stderr.strip().splitlines() or [f"exit code {run.returncode}"]
        raise MeasurementError(f"measuring {work} at {length} failed: {lines[-1]}")
    return Cost(**json.loads(run.stdout.splitlines()[-1]))


def _status(field: str) -> float:
    """A field of /proc/self/status in MiB."""
    match = re.search(rf"^{field}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert match is not None
    return int(match.group(1)) / 1024


def _cost_of(work: Callable[[], object], repeats: int) -> Cost:
    """Time of `work`, and how far the resident memory rose above its start (Linux; elsewhere the process's peak)."""
    reset = Path("/proc/self/clear_refs")
    if reset.exists():
        reset.write_text("5")  # the peak counts from here
        before = _status("VmRSS")
    else:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    seconds, kept = _timed(work)
    peak = _status("VmHWM") if reset.exists() else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    del kept
    times = [seconds, *(_timed(work)[0] for _ in range(repeats - 1))]
    return Cost(min(times), max(peak - before, 0.0))


def _timed(work: Callable[[], object]) -> tuple[float, object]:
    begin = time.perf_counter()
    result = work()
    return time.perf_counter() - begin, result


def _attention(length: int) -> Callable[[], object]:
    """Forward and backward of packed documents, H 8, D 64, fp32; a short run first, so that only this length counts."""
    import torch

    from flexbwd import create_block_mask, flex_attention
    from flexbwd.cli.workloads import document_causal, operands

    def prepare(n: int) -> Callable[[], object]:
        query, key, value, upstream = operands(n)
        block_mask = create_block_mask(document_causal(n), None, None, n, n)

        def work() -> object:
            out = flex_attention(query, key, value, block_mask=block_mask)
            assert isinstance(out, torch.Tensor)
            return torch.autograd.grad(out, (query, key, value), upstream)

        return work

    prepare(512)()
    return prepare(length)


def _block_mask(length: int) -> Callable[[], object]:
    """create_block_mask of about a hundred packed documents, document-causal."""
    from flexbwd import create_block_mask
    from flexbwd.cli.workloads import document_causal

    create_block_mask(document_causal(1024), None, None, 1024, 1024)
    mask = document_causal(length, mean=1300)
    return lambda: create_block_mask(mask, None, None, length, length)


def _forward(mask: str, *, peer: bool) -> Callable[[int], Callable[[], object]]:
    """The forward alone: ours, or torch's compiled flex_attention, after a first call that compiles."""

    def prepare(length: int) -> Callable[[], object]:
        from flexbwd.cli.workloads import forward, masks, peer_forward

        work = (peer_forward if peer else forward)(masks(length)[mask], length)
        work()
        return work

    return prepare


WORKS = {
    "attention": _attention,
    "block_mask": _block_mask,
    "forward-documents": _forward("documents", peer=False),
    "forward-causal": _forward("causal", peer=False),
    "peer-documents": _forward("documents", peer=True),
    "peer-causal": _forward("causal", peer=True),
}

if __name__ == "__main__":
    print(json.dumps(_cost_of(WORKS[sys.argv[1]](int(sys.argv[2])), int(sys.argv[3]))._asdict()))
