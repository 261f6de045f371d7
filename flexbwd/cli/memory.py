"""Peak memory and time of one piece of work, measured in a process of its own.

`python -m flexbwd.cli.memory WORK LENGTH` prints one JSON object: seconds, and MiB beyond what was in use before.
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

    seconds: float
    extra_mib: float


class MeasurementError(FlexError):
    """The measuring process failed; the message is its last line."""


def measure(work: str, length: int) -> Cost:
    """Run WORK in a fresh process: "attention" (forward and backward of packed documents) or "block_mask"."""
    command = [sys.executable, "-m", "flexbwd.cli.memory", work, str(length)]
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


def _cost_of(work: Callable[[], object]) -> Cost:
    """Time of `work`, and how far the resident memory rose above its start (Linux; elsewhere the process's peak)."""
    reset = Path("/proc/self/clear_refs")
    if reset.exists():
        reset.write_text("5")  # the peak counts from here
        before = _status("VmRSS")
    else:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    begin = time.perf_counter()
    kept = work()
    seconds = time.perf_counter() - begin
    peak = _status("VmHWM") if reset.exists() else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    del kept
    return Cost(seconds, max(peak - before, 0.0))


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


WORKS = {"attention": _attention, "block_mask": _block_mask}

if __name__ == "__main__":
    print(json.dumps(_cost_of(WORKS[sys.argv[1]](int(sys.argv[2])))._asdict()))
