"""`flexbwd doctor`: what is installed, what the machine has, and whether attention comes out right."""

from __future__ import annotations

import ctypes
import json
import math
import os
import platform
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path

OK, NOTE, BROKEN = "ok", "note", "broken"
DSL_RANGE = ((4, 8, 1), (4, 9))  # first version served, first one not


@dataclass(frozen=True)
class Finding:
    """One line of the report; `broken` makes the exit code 1, `note` does not."""

    name: str
    value: str
    state: str = OK
    remedy: str = ""


def run(*, as_json: bool) -> int:
    """Print the findings; 1 when one of them is broken."""
    from flexbwd.cli.console import console, table, working

    with working("checking"):
        findings = examine()
    broken = any(f.state == BROKEN for f in findings)
    if as_json:
        print(json.dumps({"ok": not broken, "findings": [asdict(f) for f in findings]}, indent=2))
        return int(broken)
    colour = {OK: "green", NOTE: "yellow", BROKEN: "bold red"}
    report = table("", ("", "what", "found", "remedy"))
    for f in findings:
        report.add_row(f"[{colour[f.state]}]{f.state}[/]", f.name, f.value, f.remedy)
    console().print(report)
    return int(broken)


def examine() -> list[Finding]:
    """Every check, in the order in which a reader wants them. A check that raises is itself a finding."""
    checks: dict[str, Callable[[], Finding]] = {
        "flexbwd": lambda: Finding("flexbwd", f"{_version('flexbwd') or 'source tree'} in {Path(__file__).parents[1]}"),
        "python": lambda: Finding("python", f"{platform.python_version()} on {platform.platform()}"),
        "torch": _torch,
        "CuTe DSL": _dsl,
        "apache-tvm-ffi": lambda: _package("apache-tvm-ffi", "pip install apache-tvm-ffi"),
        "cuda-python": lambda: _package("cuda-python", "pip install cuda-python"),
        "CPU": lambda: Finding("CPU", f"{cpu_name()}, {os.cpu_count()} cores, {_torch_threads()} torch threads"),
        "GPU": _gpu,
        "driver": _driver,
        "cache": _cache,
        "self-check": _self_check,
    }
    return [_guarded(name, check) for name, check in checks.items()]


def _guarded(name: str, check: Callable[[], Finding]) -> Finding:
    try:
        return check()
    except Exception as error:
        return Finding(name, f"{type(error).__name__}: {' '.join(str(error).split())}", BROKEN, "see the message")


# -- versions --------------------------------------------------------------------------------------
def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _numbers(version: str) -> tuple[int, ...]:
    """The leading numeric parts of a version: "2.13.0+cpu" -> (2, 13, 0)."""
    numbers: list[int] = []
    for part in version.split("+")[0].split("."):
        if not part.isdigit():
            break
        numbers.append(int(part))
    return tuple(numbers)


def _package(name: str, remedy: str) -> Finding:
    version = _version(name)
    return Finding(name, version) if version else Finding(name, "absent: no GPU kernels", NOTE, remedy)


def _torch() -> Finding:
    import torch

    found = f"{torch.__version__}, CUDA {torch.version.cuda or 'none'}"
    if _numbers(torch.__version__) < (2, 11):
        return Finding("torch", found, BROKEN, "pip install 'torch>=2.11'")
    return Finding("torch", found)


def _dsl() -> Finding:
    """The DSL's version, from its metadata: importing it takes a second."""
    remedy = "pip install 'nvidia-cutlass-dsl>=4.8.1,<4.9'"
    version = _version("nvidia-cutlass-dsl")
    if not version:
        return Finding("CuTe DSL", "absent: no GPU kernels", NOTE, remedy)
    flavours = [f for f in ("cu12", "cu13") if _version(f"nvidia-cutlass-dsl-libs-{f}")]
    found = f"{version} ({', '.join(flavours) or 'no compiler libraries'})"
    served = DSL_RANGE[0] <= _numbers(version) < DSL_RANGE[1]
    return Finding("CuTe DSL", found) if served else Finding("CuTe DSL", found, BROKEN, remedy)


# -- the machine -----------------------------------------------------------------------------------
def cpu_name() -> str:
    """The processor, as the system names it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _torch_threads() -> int:
    import torch

    return torch.get_num_threads()


def _gpu() -> Finding:
    import torch

    if not torch.cuda.is_available():
        return Finding("GPU", "none usable: attention runs on the CPU", NOTE)
    names = []
    hopper = False
    for index in range(torch.cuda.device_count()):
        major, minor = torch.cuda.get_device_capability(index)
        hopper = hopper or (major, minor) == (9, 0)
        names.append(f"{torch.cuda.get_device_name(index)} (compute capability {major}.{minor})")
    remedy = "" if hopper else "the kernels need compute capability 9.0; use CPU tensors here"
    return Finding("GPU", ", ".join(names), OK if hopper else NOTE, remedy)


def _driver() -> Finding:
    """The driver's own version and the newest CUDA that it serves, asked of libcuda without making a context."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return Finding("driver", "none", NOTE)
    number = ctypes.c_int()
    if library.cuDriverGetVersion(ctypes.byref(number)):
        return Finding("driver", "libcuda does not answer", NOTE, "reinstall the NVIDIA driver")
    cuda = f"CUDA {number.value // 1000}.{number.value % 1000 // 10}"
    proc = Path("/proc/driver/nvidia/version")
    release = next((w for w in proc.read_text().split() if w[:3].isdigit() and "." in w), "") if proc.exists() else ""
    return Finding("driver", f"{release}, {cuda}" if release else cuda)


def _cache() -> Finding:
    """The kernel cache: a kernel that cannot be kept is compiled again in every process."""
    import warnings

    from flexbwd.jit import cache

    if os.environ.get("FLEXBWD_CACHE", "1") == "0":
        return Finding("cache", "off (FLEXBWD_CACHE=0)", NOTE, "kernels are compiled in every process")
    cache.notice.cache_clear()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        store = cache.Cache.under(cache.root_folder())
    if said or store.store is None:
        reason = str(said[0].message).partition(";")[0] if said else f"{store.root} cannot be used"
        return Finding("cache", reason.removeprefix("flexbwd: "), BROKEN, "set FLEXBWD_CACHE_DIR to a folder of yours")
    kernels = [f for f in store.store.iterdir() if f.suffix in (".so", ".o")]
    size = sum(f.stat().st_size for f in kernels)
    return Finding("cache", f"{store.root}, {len(kernels)} kernels of this version, {size / 2**20:.1f} MiB")


# -- the self-check --------------------------------------------------------------------------------
def _self_check() -> Finding:
    """Forward and backward of a causal mask with a learned bias, fp64, against the dense reference."""
    begin = time.perf_counter()
    errors = self_check_errors()
    took = time.perf_counter() - begin
    worst = max(errors, key=lambda name: errors[name])
    found = f"largest relative error {errors[worst]:.1e} ({worst}), {took:.1f} s"
    if not errors[worst] <= 1e-10:
        return Finding("self-check", found, BROKEN, "attention is wrong on this machine: report it with this output")
    return Finding("self-check", found)


def self_check_errors() -> dict[str, float]:
    """Largest difference from the reference, by tensor, relative to its largest element."""
    import torch

    from flexbwd import flex_attention
    from flexbwd.reference import attention_reference

    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()

    leaves = {
        "dq": random(1, 4, 150, 16),
        "dk": random(1, 2, 170, 16),
        "dv": random(1, 2, 170, 24),
        "dslopes": random(4),
    }
    query, key, value, slopes = leaves.values()

    def biased(score, b, h, q_idx, kv_idx):  # type: ignore[no-untyped-def]
        return 5 * torch.tanh(score / 5) + slopes[h] * (kv_idx - q_idx)

    def causal(b, h, q_idx, kv_idx):  # type: ignore[no-untyped-def]
        return (q_idx >= kv_idx) & (q_idx >= 3)  # rows 0-2 keep nothing

    upstream = torch.randn((1, 4, 150, 24), generator=generator, dtype=torch.float64)

    def results(out: torch.Tensor, lse: torch.Tensor) -> dict[str, torch.Tensor]:
        loss = (out * upstream).sum() + lse[..., 3:].sum()
        grads = torch.autograd.grad(loss, list(leaves.values()))
        return {"out": out.detach(), "lse": lse.detach()[..., 3:], **dict(zip(leaves, grads, strict=True))}

    got = results(*flex_attention(query, key, value, biased, mask_mod=causal, return_lse=True, enable_gqa=True))
    want = results(*attention_reference(query, key, value, biased, causal))
    difference = {name: (got[name] - want[name]).abs().nan_to_num(math.inf) for name in want}
    return {name: float(difference[name].max() / want[name].abs().max()) for name in want}
