"""compute-sanitizer over the kernels, on tiny shapes.

    python tests/gpu/sanitize.py                       memcheck and racecheck
    python tests/gpu/sanitize.py memcheck initcheck synccheck racecheck

Kernels are compiled first, outside the sanitizer. Memory comes straight from CUDA, one allocation per tensor, so that
memcheck sees an access one element past a tensor's end. Exit code 1 when a tool finds something.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

TOOLS = ("memcheck", "racecheck")
KERNELS = "kns=kernel_cutlass"  # the DSL's prefix: torch's kernels are not ours to check
RUN = "--run"


def cases() -> Iterator[dict[str, Any]]:
    """Ragged lengths, so that every copy has an edge; one case of each kind of kernel."""
    from flexbwd import create_block_mask, mods

    for dims in ((64, 64), (128, 128), (72, 104), (192, 128), (256, 256)):
        yield {"dims": dims, "lengths": (65, 130), "mask_mod": mods.causal}
        yield {"dims": dims, "lengths": (130, 65), "heads": (2, 1)}
    yield {"dims": (64, 64), "lengths": (200, 200), "mask_mod": mods.sliding_window(30), "score_mod": mods.softcap(5.0)}
    lists = create_block_mask(mods.prefix_lm(50), None, None, 300, 300, device="cuda", BLOCK_SIZE=64)
    yield {"dims": (64, 64), "lengths": (300, 300), "block_mask": lists}


def attend(dims: tuple[int, int], lengths: tuple[int, int], heads: tuple[int, int] = (2, 2), **options: Any) -> None:
    """Forward and backward of one case; its results are finite."""
    import torch

    from flexbwd import flex_attention

    def normal(h: int, s: int, d: int) -> torch.Tensor:
        return torch.randn((1, h, s, d), device="cuda").bfloat16()

    (q_len, kv_len), (dim, value_dim) = lengths, dims
    leaves = [normal(heads[0], q_len, dim), normal(heads[1], kv_len, dim), normal(heads[1], kv_len, value_dim)]
    leaves = [t.requires_grad_() for t in leaves]
    out = flex_attention(*leaves, backend="sm90", **options)
    grads = torch.autograd.grad(out, leaves, torch.randn_like(out))
    torch.cuda.synchronize()
    assert all(bool(t.isfinite().all()) for t in (out, *grads)), (dims, lengths, sorted(options))


def run_all() -> int:
    """Every case in this process; 1 when a result is not finite."""
    failed = 0
    for case in cases():
        try:
            attend(**case)
        except Exception as error:
            failed = 1
            print(f"FAILED {case['dims']} {case['lengths']}: {type(error).__name__}: {error}", flush=True)
    print(f"{'some' if failed else 'no'} case failed", flush=True)
    return failed


def sanitize(tool: str) -> int:
    """This script under one tool of compute-sanitizer."""
    sanitizer = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    if not Path(sanitizer).exists():
        print("compute-sanitizer is not installed: it comes with the CUDA toolkit")
        return 2
    flags = ["--tool", tool, "--kernel-regex", KERNELS, "--error-exitcode", "9", "--print-limit", "20"]
    alone = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    ran = subprocess.run([sanitizer, *flags, sys.executable, __file__, RUN], env={**os.environ, **alone})
    print(f"{tool}: {'nothing found' if ran.returncode == 0 else f'exit code {ran.returncode}'}", flush=True)
    return int(ran.returncode != 0)


def main(arguments: list[str]) -> int:
    if arguments == [RUN]:
        return run_all()
    if subprocess.run([sys.executable, __file__, RUN]).returncode:  # compiles, and shows that the cases run at all
        return 1
    return max(sanitize(tool) for tool in arguments or TOOLS)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
