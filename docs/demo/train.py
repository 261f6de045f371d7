"""Train a small byte-level transformer on Python's standard library, with attention that only computes live blocks.

    make demo                                       about a minute on 2 cores
    python docs/demo/train.py --steps 4 --out DIR   a few seconds

Reads on: data.py (documents), model.py (masks, mod, layers), dense.py (the same in plain torch), measure.py, report.py.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import data
import report
import torch
from measure import KINDS, measure
from model import ByteModel, Config, block_masks
from torch import Tensor

CHECKED_LENGTH = 2048  # bytes of the step that is compared with dense attention in fp64


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("demo-output"), help="folder for the pictures")
    parser.add_argument("--steps", type=int, default=100, help="training steps")
    parser.add_argument("--length", type=int, default=4096, help="bytes of a packed sequence")
    parser.add_argument("--batch", type=int, default=1, help="sequences of a step")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if options.steps < 2 or options.length < 1 or options.batch < 1:
        parser.error("--steps must be at least 2, --length and --batch at least 1")
    return options


def learning_rate(step: int, steps: int, peak: float = 4e-3) -> float:
    """A tenth of the steps up, the rest down to a tenth of the peak."""
    warm = max(steps // 10, 1)
    return peak * min((step + 1) / warm, 1 - 0.9 * max(step - warm, 0) / steps)


def train_step(model: ByteModel, optimizer: torch.optim.Optimizer, batch: data.Batch) -> float:
    """One step; returns its loss in nats a byte."""
    masks = block_masks(batch.documents, model.config.window)
    loss = model(batch.tokens, batch.targets, masks)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return float(loss.detach())


def train(
    model: ByteModel, batches: Callable[[], data.Batch], steps: int, show: Callable[[int, float, float], None]
) -> list[float]:
    """Losses of all steps; `show(step, loss, seconds)` is told of each."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, betas=(0.9, 0.95), weight_decay=0.0)
    losses = []
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, steps)
        begin = time.perf_counter()
        losses.append(train_step(model, optimizer, batches()))
        show(step, losses[-1], time.perf_counter() - begin)
    return losses


def check_falling(losses: list[float]) -> None:
    """The last quarter of the losses lies below the first quarter, and all are finite."""
    quarter = max(len(losses) // 4, 1)
    first, last = (Tensor.mean(torch.tensor(part)) for part in (losses[:quarter], losses[-quarter:]))
    if not (torch.tensor(losses).isfinite().all() and last < first):
        raise SystemExit(f"the loss does not fall: {first:.3f} at first, {last:.3f} at last")


def main() -> None:
    options = arguments()
    options.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(options.seed)
    documents = data.load_documents(options.seed)
    stream = data.batches(documents, options.length, options.batch)
    model = ByteModel(Config())
    first = next(stream)
    report.describe(documents, first, model)

    with report.progress(options.steps) as show:
        losses = train(model, lambda: next(stream), options.steps, show)
    check_falling(losses)
    report.losses(losses)
    report.agreement(model, next(stream), CHECKED_LENGTH)
    report.skipped(block_masks(first.documents, model.config.window))
    repeats = 1 if options.steps < 10 else 3
    report.costs(*(measure(kind, options.length, options.batch, repeats) for kind in KINDS))
    report.pictures(options.out, first, model, losses)


if __name__ == "__main__":
    main()
