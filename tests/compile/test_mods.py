"""Instructions per score element of every mod of the zoo, as ptxas makes them: recorded, and not to grow.

One warpgroup applies a mod to a 64 x 128 tile; what loading, scaling and storing the tile takes is subtracted. Record
anew, after a change for the better:   python -m tests.compile.test_mods
"""

from __future__ import annotations

import functools
import json
import os
import re
import tempfile
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

if find_spec("cutlass") is None:
    pytest.skip("the CuTe DSL has wheels for Linux only", allow_module_level=True)

os.environ.setdefault("CUTE_DSL_ARCH", "sm_90a")

import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.base_dsl import version_info

from flexbwd import mods
from flexbwd.jit.compile import compile_now
from flexbwd.jit.launch import fake_stream
from flexbwd.modgraph.extents import Extents
from flexbwd.sm90.mods import NO_MODS, Axis, ModConfig, ModUse
from flexbwd.sm90.numerics import column_of, first_column, first_row
from tests.compile.sass import instructions
from tests.host.to_cute.fragments import plan_of

TILE = (64, 128)
PER_THREAD = TILE[0] * TILE[1] // 128
TABLE = Path(__file__).with_name("mod_instructions.json")
QUICK = ("alibi", "causal", "document", "document_causal", "prefix_lm", "sliding_window", "softcap", "relative_table")
SLACK = 0.1  # instructions per element: another ptxas schedules a little differently


@dataclass(frozen=True)
class MadeTile:
    """raw [tiles, 128 threads, 64] -> the same, with mods applied."""

    config: ModConfig
    kind: str  # "copy", "scale", or what to apply: "score", "mask", "backward"
    rows_are: str
    columns: int = PER_THREAD // 2  # of a thread that mods are applied to

    @cute.jit
    def __call__(self, raw: cute.Tensor, arguments: tuple, scale_log2: Float32, n: Int32, stream):
        self.kernel(raw, arguments, scale_log2, n).launch(grid=(n, 1, 1), block=(128, 1, 1), stream=stream)

    @cute.kernel
    def kernel(self, raw: cute.Tensor, arguments: tuple, scale_log2: Float32, n: Int32):
        thread, _, _ = cute.arch.thread_idx()
        tile_index, b, h = cute.arch.block_idx()
        frag = cute.make_rmem_tensor((2, PER_THREAD // 2), Float32)
        flat = cute.make_tensor(frag.iterator, cute.make_layout(PER_THREAD))
        mine = raw[tile_index, thread, None]
        cute.autovec_copy(mine, flat)
        self.apply(frag, arguments, b, h, scale_log2, tile_index, n, thread)
        cute.autovec_copy(flat, mine)

    def apply(
        self, frag: Any, arguments: tuple, b: Any, h: Any, scale_log2: Any, row_tile: Any, col_tile: Any, thread: Any
    ) -> None:
        places = range(PER_THREAD // 2)
        if self.kind == "scale":
            for j in places:
                for r in range(2):
                    frag[r, j] = frag[r, j] * scale_log2
        if self.kind in ("copy", "scale"):
            return
        head = self.config.head(arguments, b, h, scale_log2)
        rows = head.rows(Axis(row_tile * TILE[0] + first_row(thread), (0, 8)), self.rows_are)
        columns = tuple(column_of(j) for j in range(self.columns))
        tile = rows.tile(Axis(col_tile * TILE[1] + first_column(thread), columns))
        if self.kind == "score":
            tile.score(frag)
        else:
            tile.mask(frag, True)


def build(config: ModConfig, kind: str, rows_are: str, held: int = PER_THREAD) -> tuple[Any, tuple[Any, ...]]:
    from cutlass.cute.runtime import make_fake_tensor

    raw = make_fake_tensor(
        Float32, (cute.sym_int32(), 128, PER_THREAD), (128 * PER_THREAD, PER_THREAD, 1), assumed_align=16
    )
    return MadeTile(config, kind, rows_are, held // 2), (
        raw,
        config.fake_arguments(),
        Float32(1),
        Int32(1),
        fake_stream(),
    )


def counted(config: ModConfig, kind: str, rows_are: str = "q") -> int:
    with tempfile.TemporaryDirectory() as folder:
        return instructions(functools.partial(build, config, kind, rows_are), Path(folder))


@functools.cache
def without(kind: str) -> int:
    """What a kernel takes that scales (before a score mod) or does nothing; the plain copy is optimised away."""
    scaled = counted(NO_MODS, "scale")
    return scaled if kind == "score" else scaled - PER_THREAD


def per_element(name: str, rows_are: str) -> float:
    """Instructions per element that the mod adds."""
    entry, extents = mods.get(name), Extents(2, 8, 4096, 4096)
    plan, captures = plan_of(**{entry.kind: entry.example(*extents)})
    config, _ = ModConfig.of(plan, captures, ModUse(extents, TILE))
    return round((counted(config, entry.kind, rows_are) - without(entry.kind)) / PER_THREAD, 2)


def recorded() -> dict[str, dict[str, float]]:
    return json.loads(TABLE.read_text())["instructions per element"]


def test_the_table_is_complete():
    assert sorted(recorded()) == mods.names()


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in QUICK else pytest.mark.nightly)
                                  for n in mods.names()])  # fmt: skip
@pytest.mark.parametrize("rows_are", ["q", pytest.param("kv", marks=pytest.mark.nightly)])
def test_no_mod_takes_more_instructions_than_recorded(name, rows_are):
    assert per_element(name, rows_are) <= recorded()[name][rows_are] + SLACK


@pytest.mark.parametrize(
    ("name", "most"),
    [("alibi", 1.31), ("relative_bias", 0.75), ("causal", 1.69), ("sliding_window", 1.98), ("prefix_lm", 2.11),
     ("softcap", 3.0), ("document", 2.95)],
)  # fmt: skip
def test_the_design_figures_are_met(name, most):
    assert recorded()[name]["q"] <= most


def every_function(s, b, h, q, kv):
    x = s.abs() + 1
    total = torch.sin(s) + torch.cos(s) + torch.tan(s) + torch.erf(s) + torch.exp(-x) + torch.exp2(-x)
    total = total + torch.log(x) + torch.log2(x) + torch.log1p(x) + torch.expm1(-x) + torch.sqrt(x) + torch.rsqrt(x)
    total = total + torch.tanh(s) + torch.sigmoid(s) + x**1.3 + x**s + 1 / x + torch.sign(s) * torch.relu(s)
    total = total + torch.floor(s) + torch.ceil(s) + torch.trunc(s) + torch.round(s) + s % 3 + torch.fmod(s, x)
    total = total + torch.maximum(s, x) + torch.minimum(s, x) + s // x + (q**kv) + (q // (kv + 1)) + (kv % (q + 1))
    total = total + (q << (kv % 3)) + (kv >> (q % 5)) + torch.div(q - kv, 7, rounding_mode="trunc") + (q ^ kv)
    return torch.where(s.to(torch.int32) > q.long() * 2**33 + kv, total, s)


@pytest.mark.parametrize("precision", ["fast", "accurate"])
def test_every_function_compiles_without_local_memory(precision, tmp_path):
    extents = Extents(1, 1, 4096, 4096)
    plan, captures = plan_of(every_function)
    config, _ = ModConfig.of(plan, captures, ModUse(extents, TILE, backward=True, precision=precision))
    kernel = compile_now(
        functools.partial(build, config, "score", "q", 4), options=f"--enable-tvm-ffi --keep-ptx --dump-dir {tmp_path}"
    )
    ptx = kernel.artifacts.PTX
    assert not re.search(r"\b(ld|st)\.local", ptx)
    approximate = {f for f in ("ex2", "lg2", "rcp", "sqrt", "rsqrt", "sin", "cos") if f"{f}.approx.ftz" in ptx}
    assert ("tanh.approx" in ptx) == (precision == "fast")
    if precision == "fast":
        assert approximate == {"ex2", "lg2", "rcp", "sqrt", "rsqrt", "sin", "cos"}


def record() -> None:
    table = {n: {rows: per_element(n, rows) for rows in ("q", "kv")} for n in mods.names()}
    document = {"CUDA of the DSL": str(version_info.CUDA_VERSION), "instructions per element": table}
    TABLE.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    record()
