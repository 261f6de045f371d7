"""Time and peak memory of the model's attention, forward and backward, each in a process of its own.

`python measure.py sparse LENGTH BATCH REPEATS` prints one JSON object; `measure("sparse", ...)` runs that.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import data
import dense
import model
import torch
from torch import Tensor

KINDS = ("sparse", "dense")
PEAK_RESET = Path("/proc/self/clear_refs")  # Linux


class Cost(NamedTuple):
    """What one document layer and one window layer cost, masks included."""

    seconds: float  # fastest of the repeats
    peak_bytes: int  # resident memory at its highest, beyond what lay there before


def measure(kind: str, length: int, batch: int, repeats: int = 3) -> Cost:
    """The cost of `kind` ("sparse" or "dense"), measured in a fresh process."""
    command = [sys.executable, __file__, kind, str(length), str(batch), str(repeats)]
    run = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return Cost(**json.loads(run.stdout))


def attention_work(kind: str, batch: data.Batch) -> Callable[[], None]:
    """A function that runs attention of both kinds of layer, forward and backward, on the documents of `batch`."""
    config = model.Config()
    generator = torch.Generator().manual_seed(0)

    def leaf(heads: int) -> Tensor:
        size = (*batch.tokens.shape[:1], heads, batch.tokens.shape[1], config.width // config.heads)
        return torch.randn(size, generator=generator).requires_grad_()

    query, key, value = leaf(config.heads), leaf(config.kv_heads), leaf(config.kv_heads)
    slopes = torch.full((config.heads,), 0.1, requires_grad=True)
    build, attend = {
        "sparse": (model.block_masks, model.sparse_attention),
        "dense": (dense.dense_masks, dense.dense_attention),
    }[kind]

    def work() -> None:
        for mask in build(batch.documents, config.window):
            out = attend(query, key, value, slopes, config.cap, mask)
            torch.autograd.grad(out, (query, key, value, slopes), torch.ones_like(out))

    return work


def resident_bytes(field: str) -> int:
    """VmRSS (now) or VmHWM (the highest yet) of this process."""
    found = re.search(rf"^{field}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    if found is None:
        raise RuntimeError(f"/proc/self/status has no {field}")
    return int(found[1]) * 1024


def cost_of(work: Callable[[], None], repeats: int) -> Cost:
    """Peak of the first run, time of the fastest."""
    linux = PEAK_RESET.exists()
    if linux:
        PEAK_RESET.write_text("5")  # the peak counts from here
    before = resident_bytes("VmRSS") if linux else 0
    times, peak = [], 0
    for _ in range(repeats):
        begin = time.perf_counter()
        work()
        times.append(time.perf_counter() - begin)
        peak = peak or (resident_bytes("VmHWM") - before if linux else 0)
    return Cost(min(times), peak)


def main(kind: str, length: int, batch: int, repeats: int) -> None:
    """Print the cost of `kind` as JSON."""
    documents = data.load_documents()
    attention_work(kind, next(data.batches(documents, 256)))()  # loads and traces what is needed only once
    print(json.dumps(cost_of(attention_work(kind, next(data.batches(documents, length, batch))), repeats)._asdict()))


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
