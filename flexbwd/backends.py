"""Which backend computes a call: "cpu", "sm90" (the Hopper kernels) or "torch" (torch's own flex_attention).

"auto" is the CPU backend for CPU tensors, the Hopper kernels on compute capability 9.0, torch elsewhere on CUDA. A call
that the Hopper kernels cannot do goes to torch as well, with a notice, unless `backend="sm90"` forbids it.
"""

from __future__ import annotations

import functools
import importlib
import warnings
from collections.abc import Sequence
from types import ModuleType

import torch
from torch import Tensor

from flexbwd.errors import BackendNotice, DeviceError, UnsupportedError
from flexbwd.plan import Plan
from flexbwd.problem import Problem
from flexbwd.sparsity.tensors import IndexBase

NAMES = ("auto", "cpu", "sm90", "torch")
OPERATOR = ("cpu", "sm90")  # those that run inside the operators flexbwd::forward and flexbwd::backward
HOPPER = (9, 0)


def choose(name: str, device: torch.device) -> str:
    """The backend for tensors on `device`; `name` is one of NAMES."""
    kind = device.type
    if name == "torch":
        return name
    if kind in ("cpu", "meta"):
        if name == "sm90":
            raise DeviceError(
                f"backend='sm90' but query is on {device}; the Hopper kernels take CUDA tensors: move query, key and "
                "value with .cuda(), or use backend='auto'"
            )
        return "cpu"
    if name == "cpu":
        raise DeviceError(f"backend='cpu' but query is on {device}; move it with .cpu() or use backend='auto'")
    if kind != "cuda":
        raise UnsupportedError(
            f"query is on {device}; flexbwd computes on CPU and CUDA tensors: move it, or pass backend='torch' for "
            "torch's own flex_attention"
        )
    found = capability(device.index)
    if found == HOPPER:
        return "sm90"
    if name == "sm90":
        raise DeviceError(
            f"backend='sm90' but {device} has compute capability {found[0]}.{found[1]}; the kernels are built for 9.0 "
            "(Hopper): use backend='auto'"
        )
    return "torch"


_capabilities: dict[int | None, tuple[int, int]] = {}  # no functools.cache: Dynamo traces through here


def capability(index: int | None) -> tuple[int, int]:
    """Compute capability of a CUDA device; Hopper's where there is none to ask: fake tensors, warm-up."""
    if not torch.cuda.is_available():
        return HOPPER
    found = _capabilities.get(index)
    if found is None:
        found = _capabilities[index] = torch.cuda.get_device_capability(index)
    return found


_modules: dict[str, ModuleType] = {}


def module(name: str) -> ModuleType:
    """The code of a backend that runs inside the operators: `forward(op, want_max)` and `backward(...)`."""
    found = _modules.get(name)
    if found is None:
        found = _modules[name] = importlib.import_module("flexbwd.cpu" if name == "cpu" else "flexbwd.sm90.backend")
    return found


def refusal(problem: Problem, plan: Plan, captures: Sequence[Tensor], base: IndexBase | None) -> str | None:
    """Why the Hopper kernels cannot do a call, or None."""
    return module("sm90").refusal(problem, plan, captures, base)  # type: ignore[no-any-return]


def check(problem: Problem, plan: Plan, captures: Sequence[Tensor], base: IndexBase | None) -> None:
    """Raise where the plan's backend cannot do the call, and no other may be taken any more."""
    if plan.backend == "sm90":
        reason = refusal(problem, plan, captures, base)
        if reason is not None:
            raise UnsupportedError(
                f"{reason}; inside torch.compile pass backend='torch' to take torch's flex_attention"
            )


@functools.cache
def notice(reason: str) -> None:
    """Say once that a call goes to torch, and why."""
    warnings.warn(
        f"flexbwd: {reason}; this call runs on torch's flex_attention instead (backend='torch' silences this)",
        BackendNotice,
        stacklevel=4,
    )
