"""`flexbwd warmup`: fill the kernel cache for known shapes, with or without a GPU."""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from flexbwd.errors import OptionError

if TYPE_CHECKING:
    from flexbwd.jit.warm import Done, Job, Report

DTYPES = {"bf16": "bfloat16", "fp16": "float16"}
MASKS = ("dense", "causal", "window")


@dataclass(frozen=True)
class Shape:
    """What kernels are static about; lengths, batch and the width of a window are run-time values."""

    head_dim: int
    value_dim: int
    heads: tuple[int, int]  # query, key
    mask: str = "causal"
    softcap: float = 0.0

    def __str__(self) -> str:
        dims = f"D{self.head_dim}" + (f"/{self.value_dim}" if self.value_dim != self.head_dim else "")
        cap = f" softcap {self.softcap:g}" if self.softcap else ""
        return f"{dims} H{self.heads[0]}/{self.heads[1]} {self.mask}{cap}"


#: Attention layers of well-known models.
NAMED: dict[str, tuple[Shape, ...]] = {
    "bert-base": (Shape(64, 64, (12, 12), "dense"),),
    "gpt2": (Shape(64, 64, (12, 12)),),
    "llama3-8b": (Shape(128, 128, (32, 8)),),
    "llama3-70b": (Shape(128, 128, (64, 8)),),
    "mistral-7b": (Shape(128, 128, (32, 8), "window"),),
    "gemma2-9b": (Shape(256, 256, (16, 8), softcap=50.0), Shape(256, 256, (16, 8), "window", softcap=50.0)),
    "deepseek-v3": (Shape(192, 128, (128, 128)),),
    "vit-l": (Shape(64, 64, (16, 16), "dense"),),
}
STANDARD = ("64", "128")


@dataclass(frozen=True)
class Request:
    """What is asked for; an empty `masks` or `heads` keeps the shape's own."""

    shapes: Sequence[str]
    dtypes: Sequence[str] = ("bf16",)
    masks: Sequence[str] = ()
    heads: str = ""
    length: int = 4096
    backward: bool = True
    jobs: int | None = None


def run(request: Request) -> int:
    """Compile, print what was done; 1 when something could not be compiled."""
    from flexbwd.cli.console import console, table, working
    from flexbwd.jit import cache, warm

    with working("planning"):
        jobs = gather(request)
    begin = time.perf_counter()
    with _progress(len(jobs)) as report:
        done = warm.warm(jobs, request.jobs, report)
    took = time.perf_counter() - begin
    shown = table("", ("kernel", "how", "seconds"), numbers=("seconds",))
    for one in sorted(done):
        shown.add_row(one.name, one.how, f"{one.seconds:.2f}")
    console().print(shown)
    print(_summary(done, took, cache.default()))
    return 0


def gather(request: Request) -> list[Job]:
    """The kernels of every wanted combination, each once. Tensors are fake: nothing is allocated."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    from flexbwd import warmup
    from flexbwd.jit import warm

    unknown = [d for d in request.dtypes if d not in DTYPES]
    if unknown:
        raise OptionError(f"--dtype {unknown[0]} must be one of {', '.join(DTYPES)}")
    with warm.gathering() as jobs, FakeTensorMode():
        for shape, dtype in itertools.product(shapes_of(request), request.dtypes):
            query, key, value = _operands(shape, getattr(torch, DTYPES[dtype]), request)
            warmup(query, key, value, **_mods(shape, request.length), backend="sm90")
    return list(dict(jobs).items())


def shapes_of(request: Request) -> list[Shape]:
    """Names and head dims ("128", "192/128") as shapes, with the masks and heads that were asked for."""
    found: list[Shape] = []
    for text in request.shapes or STANDARD:
        found += _named(text)
    if request.heads:
        found = [replace(s, heads=_heads(request.heads)) for s in found]
    unknown = [m for m in request.masks if m not in MASKS]
    if unknown:
        raise OptionError(f"--mask {unknown[0]} must be one of {', '.join(MASKS)}")
    if request.masks:
        found = [replace(s, mask=m) for s in found for m in request.masks]
    return list(dict.fromkeys(found))


def _named(text: str) -> Sequence[Shape]:
    if text in NAMED:
        return NAMED[text]
    match = re.fullmatch(r"(\d+)(?:/(\d+))?", text)
    if match is None:
        raise OptionError(f"{text} must be a head dim (128 or 192/128) or one of {', '.join(NAMED)}")
    dim = int(match[1])
    return (Shape(dim, int(match[2] or dim), (8, 8), "dense"), Shape(dim, int(match[2] or dim), (8, 8), "causal"))


def _heads(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d+)(?:/(\d+))?", text)
    if match is None or int(match[1]) == 0 or int(match[2] or 1) == 0:
        raise OptionError(f"--heads {text} must be query/key heads: 32/8, or one number")
    return int(match[1]), int(match[2] or match[1])


def _operands(shape: Shape, dtype: Any, request: Request) -> tuple[Any, Any, Any]:
    import torch

    def fake(heads: int, dim: int) -> torch.Tensor:
        size = (1, heads, request.length, dim)
        return torch.empty(size, dtype=dtype, device="cuda", requires_grad=request.backward)

    q_heads, kv_heads = shape.heads
    return fake(q_heads, shape.head_dim), fake(kv_heads, shape.head_dim), fake(kv_heads, shape.value_dim)


def _mods(shape: Shape, length: int) -> dict[str, Any]:
    from flexbwd import mods

    found: dict[str, Any] = {}
    if shape.mask == "causal":
        found["mask_mod"] = mods.causal
    elif shape.mask == "window":
        found["mask_mod"] = mods.sliding_window(max(1, length // 4))
    if shape.softcap:
        found["score_mod"] = mods.softcap(shape.softcap)
    return found


@contextmanager
def _progress(total: int) -> Iterator[Report | None]:
    """A bar on stderr, on a terminal only."""
    from flexbwd.cli.console import console

    err = console(stderr=True)
    if not err.is_terminal or not total:
        yield None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("compiling"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, console=err, transient=True) as bar:
        task = bar.add_task("", total=total)

        def report(done: Done) -> None:
            bar.update(task, advance=1, description=done.name)

        yield report


def _summary(done: Sequence[Done], took: float, store: Any) -> str:
    ways = {"compiled": 0, "worker": 0, "loaded": 0, "memory": 0}
    for one in done:
        ways[one.how] += 1
    made = ways["compiled"] + ways["worker"]
    where = f"kept in {store.store}" if store.store is not None else "not kept: the kernel cache is off or not writable"
    return (
        f"{len(done)} kernels: {made} compiled ({ways['worker']} by workers), {ways['loaded'] + ways['memory']} found; "
        f"{took:.1f} s; {where}"
    )
