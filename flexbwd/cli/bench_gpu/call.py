"""One implementation on one workload: its first calls, checked against the oracle, and the two things to time."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from flexbwd.cli.bench_gpu import oracle
from flexbwd.cli.bench_gpu.operands import Operands
from flexbwd.cli.bench_gpu.peers import Impl
from flexbwd.cli.bench_gpu.workloads import Pass, Workload
from flexbwd.errors import FlexError


class WrongResult(FlexError):
    """An implementation differs from the oracle; the message says where and by how much."""


@dataclass(frozen=True, eq=False)
class Ready:
    """An implementation whose numbers are right.

    Attributes:
        forward: computes the output, keeping what the backward needs.
        backward: all gradients of one kept output; nothing is accumulated.
        first_s: seconds of the first call of each pass, compiling or loading included.
        errors: relative errors of out, dq, dk and dv.
    """

    forward: Callable[[], object]
    backward: Callable[[], object]
    first_s: Mapping[Pass, float]
    errors: Mapping[str, float]

    def work(self, which: Pass) -> Callable[[], object]:
        return self.forward if which == "fwd" else self.backward


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def ready(impl: Impl, w: Workload, given: Operands, want: Mapping[str, Tensor]) -> Ready:
    """Call it once in each direction and look at the numbers.

    Raises:
        WrongResult: an error above the tolerance, or something not finite.
        Whatever the implementation raises.
    """
    made = impl.prepare(w, given)
    synchronize()
    begin = time.perf_counter()
    out = made.forward()
    synchronize()
    middle = time.perf_counter()
    grads = torch.autograd.grad(out, made.leaves, made.grad_out, retain_graph=True)
    synchronize()
    first: dict[Pass, float] = {"fwd": middle - begin, "bwd": time.perf_counter() - middle}
    results = dict(zip(oracle.NAMES, map(made.heads_first, (out.detach(), *grads[:3])), strict=True))
    errors = oracle.errors(w, want, results)
    wrong = [f"{name} {e:.2g}" for name, e in errors.items() if not e <= oracle.TOLERANCE]
    if wrong:
        raise WrongResult(f"relative error against fp32: {', '.join(wrong)}")

    def backward() -> object:
        return torch.autograd.grad(out, made.leaves, made.grad_out, retain_graph=True)

    return Ready(made.forward, backward, first, errors)
