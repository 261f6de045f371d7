"""Level 6: the warp-specialised kernel itself.

The idea: give each job to a warp of its own, and let them meet only at barriers.

    level 5                                       here
    one warpgroup copies, then multiplies         a loader warp runs ahead through a ring of buffers
    dV only                                       dV, dK, dQ; dQ leaves through a writer warp, as a bulk reduction
    128 threads, equal registers                  loader and writers hand their registers to the MMA warpgroups
    every tile alike                              runs of partial, edge and full tiles, each with its own body (level 3)

This compiles flexbwd's backward kernel for sm_90a, which needs no GPU, and takes the result apart. With NVIDIA's
disassembler (`pip install nvidia-cuda-nvdisasm`, or $NVDISASM, or on PATH) it also counts machine instructions.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from collections import Counter
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

os.environ.setdefault("CUTE_DSL_ARCH", "sm_90a")  # read when the DSL is imported

from flexbwd.jit.compile import compile_now
from flexbwd.sm90.backward.call import build_backward
from flexbwd.sm90.backward.config import BwdConfig
from flexbwd.sm90.backward.tile import BwdTile

TILE = BwdTile(dim=128, value_dim=128)


def compiled(folder: str) -> Any:
    """The kernel without mods for bf16, D 128, with PTX and machine code kept."""
    config = BwdConfig(TILE, torch.bfloat16)
    options = f"--enable-tvm-ffi --keep-ptx --keep-cubin --dump-dir {folder}"
    return compile_now(lambda: build_backward(config), options=options).artifacts


def roles() -> str:
    """Who runs what, as the kernel's own constants say."""
    from flexbwd.sm90.backward.kernel import MMA_REGISTERS, PRODUCER_REGISTERS, Warp
    from flexbwd.sm90.backward.tile import WGS

    last = Warp.MMA + 4 * WGS - 1
    lines = [
        ("role", "warps", "registers", "loop"),
        ("LOADER", f"{Warp.LOADER:d}", str(PRODUCER_REGISTERS), "K, V once; Q, LSE and dO, delta of each query tile"),
        ("DQ WRITER", f"{Warp.DQ_WRITER:d}-{Warp.DQ_WRITER + WGS - 1}", str(PRODUCER_REGISTERS), "adds dQ in memory"),
        ("MMA", f"{Warp.MMA:d}-{last}", str(MMA_REGISTERS), "S, dP -> P, dS -> dV, dQ, dK; then the epilogue"),
    ]
    return "\n".join(f"  {role:<10} {warps:<6} {registers:<10} {loop}" for role, warps, registers, loop in lines)


def intermediate(ptx: str) -> dict[str, int]:
    """Instructions of the virtual machine language, by kind."""
    shapes = Counter(re.findall(r"wgmma\.mma_async\.sync\.aligned\.(m64n\d+k16)", ptx))
    kinds = {
        "TMA tile loads": r"cp\.async\.bulk\.tensor\.\dd\.shared",
        "TMA tile stores": r"cp\.async\.bulk\.tensor\.\dd\.global",
        "bulk reductions": r"cp\.reduce\.async\.bulk\.global",
        "setmaxnreg": r"setmaxnreg",
        "local memory": r"\b(?:ld|st)\.local",
    }
    return {f"wgmma {k}": n for k, n in sorted(shapes.items())} | {k: len(re.findall(p, ptx)) for k, p in kinds.items()}


def machine(cubin: bytes) -> dict[str, int] | None:
    """Machine instructions by opcode; None without a disassembler."""
    tool = disassembler()
    if tool is None:
        return None
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        text = subprocess.run([tool, "-c", str(path)], capture_output=True, text=True, check=True).stdout
    opcodes = Counter(re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z0-9]+)", text))
    wanted = ("HGMMA", "UTMALDG", "UTMASTG", "UBLKRED", "USETMAXREG", "MUFU", "LDL", "STL")
    return {name: opcodes[name] for name in wanted} | {"all": sum(opcodes.values())}


def disassembler() -> str | None:
    named = os.environ.get("NVDISASM") or shutil.which("nvdisasm")
    if named:
        return named
    try:
        files = metadata.files("nvidia-cuda-nvdisasm") or []
    except metadata.PackageNotFoundError:
        return None
    return next((str(f.locate()) for f in files if f.name == "nvdisasm"), None)


def main() -> None:
    print(roles())
    print(
        f"  a CTA owns {TILE.tile_n} keys, walks {TILE.tile_m} queries at a time; shared memory {TILE.smem_bytes} bytes"
    )
    with tempfile.TemporaryDirectory() as folder:
        made = compiled(folder)
    counts = intermediate(made.PTX)
    print("  PTX: " + ", ".join(f"{n} {kind}" for kind, n in counts.items()))
    opcodes = machine(made.CUBIN)
    if opcodes is None:
        print("  no nvdisasm here: machine instructions are not counted")
    else:
        print("  SASS: " + ", ".join(f"{name} {n}" for name, n in opcodes.items()))
        assert opcodes["HGMMA"] and opcodes["UTMALDG"] and not opcodes["LDL"] + opcodes["STL"]
    assert counts["TMA tile loads"] and counts["bulk reductions"] and not counts["local memory"]


if __name__ == "__main__":
    main()
