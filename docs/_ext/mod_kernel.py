"""A kernel with nothing in it but one mod, compiled for sm_90a: for the page that follows a mod into the kernel."""

from __future__ import annotations

import os
import re
import tempfile
from typing import Any

os.environ.setdefault("CUTE_DSL_ARCH", "sm_90a")  # read when the DSL is imported

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream

from flexbwd.sm90.mods import Axis
from flexbwd.sm90.numerics import column_of

COLUMNS = 2  # that a thread holds of each of its two rows: four elements


@cute.kernel
def tiles(
    scores: cute.Tensor,
    factors: cute.Tensor,
    config: cutlass.Constexpr[Any],
    arguments: tuple,
    scale_log2: Float32,
    count: Int32,
):
    """A thread's fragments [2, COLUMNS] of `count` key tiles: q·k becomes s' * log2(e), and J is written."""
    thread, head = cute.arch.thread_idx()[0], cute.arch.block_idx()[0]
    rows = config.head(arguments, Int32(0), head, scale_log2).rows(Axis(thread, (0, 8)), "q")
    for n in cutlass.range(count, unroll=1):
        fragment = cute.make_rmem_tensor((2, COLUMNS), Float32)
        factor = cute.make_rmem_tensor((2, COLUMNS), Float32)
        cute.autovec_copy(scores[n, thread, None, None], fragment)
        tile = rows.tile(Axis(n * 128, tuple(column_of(j) for j in range(COLUMNS))))
        tile.score_and_factor(fragment, factor)
        cute.autovec_copy(fragment, scores[n, thread, None, None])
        cute.autovec_copy(factor, factors[n, thread, None, None])


@cute.jit
def launch(
    scores: cute.Tensor,
    factors: cute.Tensor,
    config: cutlass.Constexpr[Any],
    arguments: tuple,
    scale_log2: Float32,
    count: Int32,
    stream: Any,
):
    tiles(scores, factors, config, arguments, scale_log2, count).launch(
        grid=(8, 1, 1), block=(128, 1, 1), stream=stream
    )


def body(config: Any) -> str:
    """The PTX of the kernel, from the first instruction on, without the names of parameters."""
    shape = (cute.sym_int32(), 128, 2, COLUMNS)
    scores, factors = (
        make_fake_compact_tensor(Float32, shape, stride_order=(3, 2, 1, 0), assumed_align=16) for _ in range(2)
    )
    with tempfile.TemporaryDirectory() as folder:
        options = f"--enable-tvm-ffi --keep-ptx --dump-dir {folder}"
        stream = make_fake_stream(use_tvm_ffi_env_stream=True)
        arguments = (scores, factors, config, config.fake_arguments(), Float32(1.0), Int32(1), stream)
        ptx: str = cute.compile(launch, *arguments, options=options).artifacts.PTX
    text = ptx[ptx.index("{") + 1 : ptx.rindex("}")]
    text = re.sub(r"\[\w+_param_(\d+)\]", r"[param_\1]", text)
    lines = [line.replace("\t", " ").strip() for line in text.splitlines()]
    kept = [line for line in lines if line and not line.startswith((".reg", "//", ".pragma"))]
    return "\n".join(line if line.startswith("$") else f"    {line}" for line in kept)
