"""What the demo shows: progress, agreement with dense attention, skipped blocks, costs, pictures."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import dense
import torch
from data import Batch
from measure import Cost
from model import Attention, ByteModel, Masks, block_masks, sparse_attention
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor

TOLERANCE = 1e-9  # relative, in fp64
console = Console(highlight=False, soft_wrap=True)
Show = Callable[[int, float, float], None]


def describe(documents: list[bytes], batch: Batch, model: ByteModel) -> None:
    """What is trained on what."""
    size = sum(map(len, documents)) / 1e6
    parameters = sum(p.numel() for p in model.parameters())
    shape = " × ".join(map(str, batch.tokens.shape))
    console.print(f"data    {len(documents)} documents, {size:.1f} MB: Python's standard library")
    console.print(f"batch   {shape} bytes; the first one packs {batch.document_count} documents")
    console.print(f"model   {parameters / 1e6:.2f} M parameters, {model.config}, {torch.get_num_threads()} threads")


@contextmanager
def progress(steps: int) -> Iterator[Show]:
    """Yields a function that is told (step, loss, seconds): a bar on a terminal, about twenty lines elsewhere."""
    if not console.is_terminal:
        every = max(steps // 20, 1)

        def line(step: int, loss: float, seconds: float) -> None:
            if step % every == 0 or step == steps - 1:
                console.print(f"step {step + 1:4d}/{steps}   loss {loss:.3f}   {seconds * 1e3:.0f} ms")

        yield line
        return
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
    with Progress(*columns, console=console) as bars:
        task = bars.add_task("", total=steps)

        def bar(step: int, loss: float, seconds: float) -> None:
            bars.update(task, advance=1, description=f"loss {loss:.3f}  {seconds * 1e3:.0f} ms")

        yield bar


def losses(values: list[float]) -> None:
    """Where the loss began and ended."""
    tail = values[-max(len(values) // 10, 1) :]
    last = sum(tail) / len(tail)
    bits = last / math.log(2)
    console.print(f"loss    {values[0]:.3f} → {last:.3f} nats a byte ({bits:.2f} bits): it falls")


def step_gradients(
    model: ByteModel, batch: Batch, masks: Masks, attention: Attention
) -> tuple[float, dict[str, Tensor]]:
    """Loss and the gradient of every parameter."""
    loss = model(batch.tokens, batch.targets, masks, attention)
    named = dict(model.named_parameters())
    grads = torch.autograd.grad(loss, list(named.values()))
    return float(loss.detach()), dict(zip(named, grads, strict=True))


def agreement(model: ByteModel, batch: Batch, length: int) -> None:
    """One step in fp64, through flexbwd and through dense attention: the same loss, the same gradients."""
    exact = copy.deepcopy(model).double()
    part = Batch(*(t[:1, :length] for t in (batch.tokens, batch.targets, batch.documents)))
    window = model.config.window
    loss, grads = step_gradients(exact, part, block_masks(part.documents, window), sparse_attention)
    want_loss, want = step_gradients(
        exact, part, dense.dense_masks(part.documents, window), dense.checkpointed_attention
    )
    error = {name: float((grads[name] - g).norm() / g.norm()) for name, g in want.items()}
    slopes = max(e for name, e in error.items() if "slopes" in name)
    worst = max(abs(loss - want_loss) / want_loss, *error.values())
    if not worst < TOLERANCE:
        raise SystemExit(f"flexbwd and dense attention differ by {worst:.1e}, more than {TOLERANCE}")
    console.print(
        f"check   one fp64 step of {part.tokens.shape[1]} bytes against dense attention: loss {loss:.9f} and "
        f"{want_loss:.9f}; gradients differ by {max(error.values()):.1e} relative at most, the slopes' by {slopes:.1e}"
    )


def skipped(masks: Masks) -> None:
    """Share of the blocks that attention never visits."""
    shares = ", ".join(f"{name} layers {mask.sparsity():.1f} %" for name, mask in masks._asdict().items())
    size = " × ".join(map(str, masks.document.block_size))
    console.print(f"skipped blocks of {size}: {shares}")


def costs(sparse: Cost, plain: Cost) -> None:
    """Attention of both kinds of layer, forward and backward, against the dense form."""
    console.print(
        f"time    {sparse.seconds * 1e3:.0f} ms against {plain.seconds * 1e3:.0f} ms dense: "
        f"{plain.seconds / sparse.seconds:.1f} times as fast (two attention layers, forward and backward, fp32)"
    )
    if sparse.peak_bytes and plain.peak_bytes:
        console.print(
            f"memory  {sparse.peak_bytes / 2**20:.0f} MiB against {plain.peak_bytes / 2**20:.0f} MiB dense: "
            f"{plain.peak_bytes / sparse.peak_bytes:.1f} times as small (peak of the process beyond its start)"
        )


def pictures(out: Path, batch: Batch, model: ByteModel, values: list[float]) -> None:
    """The packed masks with the learned bias, and the loss curve, as PNG."""
    from flexbwd import viz
    from flexbwd.errors import UnsupportedError

    masks, config = block_masks(batch.documents, model.config.window), model.config
    try:
        for index, (name, mask) in enumerate(masks._asdict().items()):
            slopes = model.layers[index].log_slopes.detach().exp()
            score = lambda s, b, h, i, j, slopes=slopes: s + slopes[h] * (j - i)  # noqa: E731
            shown = viz.picture(mask, score, heads=config.heads)
            viz.draw(shown, f"{name} layer: packed documents and the learned slope of head 0").savefig(
                out / f"mask-{name}.png"
            )
        viz.draw_loss(values, "bytes of the standard library").savefig(out / "loss.png")
    except UnsupportedError as missing:
        console.print(str(missing))
        return
    console.print(f"wrote   {out}/mask-document.png, {out}/mask-local.png, {out}/loss.png")
