"""The facts without which a number means nothing."""

from __future__ import annotations

import datetime
import platform
import shutil
import subprocess
from importlib import metadata
from typing import Any

_PACKAGES = ("flexbwd", "nvidia-cutlass-dsl", "flash-attn-4", "triton")


def facts() -> dict[str, Any]:
    """date, GPU, driver and versions."""
    import torch

    found = {
        "date": datetime.date.today().isoformat(),
        "gpu": torch.cuda.get_device_name(),
        "driver": driver(),
        "CUDA": torch.version.cuda,
        "cuDNN": torch.backends.cudnn.version(),
        "torch": torch.__version__,
        **{package: version(package) for package in _PACKAGES},
        "Python": platform.python_version(),
    }
    return {k: v for k, v in found.items() if v}


def driver() -> str:
    """The driver's version, or "" where nvidia-smi does not tell."""
    if shutil.which("nvidia-smi") is None:
        return ""
    ask = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    answer = subprocess.run(ask, capture_output=True, text=True).stdout.split()
    return answer[0] if answer else ""


def version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def stem(found: dict[str, Any]) -> str:
    """ "h200-2026-12-01" of an NVIDIA H200."""
    name = str(found["gpu"]).removeprefix("NVIDIA ").split()[0].lower()
    return f"{name}-{found['date']}"
