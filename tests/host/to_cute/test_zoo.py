"""Every mod of the zoo as kernel code, run on the CPU: scores, masks, Jacobians, captured gradients."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch

from flexbwd import mods
from flexbwd.modgraph.extents import Extents

if find_spec("cutlass") is None:
    pytest.skip("the CuTe DSL has wheels for Linux only", allow_module_level=True)

from tests.host.to_cute.fragments import assert_same, expected, on_host, plan_of, raw_scores


@pytest.mark.parametrize("name", mods.names())
def test_kernel_code_matches_torch(name):
    extents = Extents(2, 4, 37, 41)
    entry = mods.get(name)
    mod = entry.example(*extents)
    plan, captures = plan_of(**{entry.kind: mod})
    raw = raw_scores(extents)
    want, rough = (expected(plan, captures, extents, raw, t) for t in (torch.float64, torch.float32))
    sites = sum(s.jacobian is not None for s in plan.loads)
    for got in on_host(plan, captures, extents, raw):
        assert_same(got, want, rough, sites)
