"""Which kernels the backward of a call takes; needs neither a GPU nor the DSL."""

from __future__ import annotations

import sys

import pytest
import torch

from flexbwd.jit.warm import gathering
from flexbwd.modgraph.plan_mods import build_mod_plan
from flexbwd.plan import Needs, Operands, Plan
from flexbwd.sm90 import backend, two_pass
from flexbwd.sm90.operands import Operands as KernelOperands
from flexbwd.sm90.parts import NOTHING, Parts
from flexbwd.sm90.walks import CAUSAL

ONE_PASS = {"BwdConfig", "ConvertConfig", "DeltaConfig"}


def problem(head_dim: int, deterministic: bool) -> Operands:
    q = torch.zeros(1, 2, 64, head_dim, dtype=torch.bfloat16)
    plan = Plan(build_mod_plan(None, None, None), deterministic=deterministic, backend="sm90")
    return Operands(q, q, q, (), None, None, 1.0, plan)


def kernels(head_dim: int, deterministic: bool) -> set[str]:
    with gathering() as jobs:
        backend.warm(problem(head_dim, deterministic), [True, True, True])
    return {type(config).__name__ for config, _ in jobs} - {"FwdConfig"}


@pytest.mark.parametrize("head_dim", [64, 128])
def test_narrow_heads_go_in_one_pass_unless_runs_must_be_equal(head_dim):
    assert kernels(head_dim, deterministic=False) == ONE_PASS
    assert kernels(head_dim, deterministic=True) == {"BwdConfig", "DqConfig", "DeltaConfig"}


@pytest.mark.parametrize("head_dim", [136, 192, 256])
@pytest.mark.parametrize("deterministic", [False, True])
def test_wide_heads_go_in_two_passes(head_dim, deterministic):
    assert kernels(head_dim, deterministic) == {"DkvConfig", "DqConfig", "DeltaConfig"}


@pytest.mark.parametrize(("needs", "expected"), [
    ((True, False, False), {"DqConfig", "DeltaConfig"}),
    ((False, True, True), {"DkvConfig", "DeltaConfig"}),
    ((False, False, False), set()),
])  # fmt: skip
def test_gradients_nobody_wants_need_no_kernel(needs, expected):
    q = torch.zeros(1, 2, 64, 256, dtype=torch.bfloat16)
    parts = Parts(CAUSAL, NOTHING)
    jobs = two_pass.jobs(KernelOperands.of(q, q, q, 1.0), Needs(*needs), parts, parts)
    assert {type(config).__name__ for config, _ in jobs} == expected


def test_deterministic_kernels_of_one_pass_leave_dq_out():
    with gathering() as jobs:
        backend.warm(problem(128, deterministic=True), [True, True, True])
    (main,) = (config for config, _ in jobs if type(config).__name__ == "BwdConfig")
    assert not main.want_dq


@pytest.mark.skipif("cutlass" in sys.modules, reason="another test imported the DSL")
def test_finding_the_kernels_of_a_call_imports_no_dsl():
    kernels(256, deterministic=True)
    assert "cutlass" not in sys.modules
