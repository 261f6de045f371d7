"""Layouts of the operands: expanded, far apart, many."""

from __future__ import annotations

import math

import pytest
import torch

from flexbwd.sm90 import Operands
from flexbwd.sm90.forward.call import launch
from flexbwd.sm90.walks import CAUSAL, Dense
from tests.gpu.forward_cases import band_of, check, operands, poisoned, raw_scores, run

pytestmark = pytest.mark.gpu


def normal(*shape):
    return torch.randn(shape, device="cuda").bfloat16()


@pytest.mark.parametrize("which", ["heads", "batch", "both", "rows"])
def test_expanded_keys_and_values(which):
    """Stride 0: nothing is copied, and the copy engine reads one row many times."""
    b, h, s = (
        1 if which in ("batch", "both") else 2,
        1 if which in ("heads", "both") else 4,
        1 if which == "rows" else 300,
    )
    key, value = (normal(b, h, s, 64).expand(2, 4, 300, 64) for _ in range(2))
    op = Operands.of(normal(2, 4, 200, 64), key, value, 0.125)
    check(op, run(op, CAUSAL), raw_scores(op).masked_fill(~band_of(op, CAUSAL), -math.inf))


def test_expanded_queries():
    op = Operands.of(normal(1, 1, 200, 64).expand(2, 4, 200, 64), normal(2, 4, 300, 64), normal(2, 4, 300, 64), 0.125)
    check(op, run(op, Dense()), raw_scores(op))


def test_a_slice_of_a_packed_projection():
    packed = normal(2, 300, 3, 4, 128)
    query, key, value = (packed[:, :, i].transpose(1, 2) for i in range(3))
    op = Operands.of(query, key, value, 0.1)
    assert op.query.data_ptr() == query.data_ptr()
    check(op, run(op, CAUSAL), raw_scores(op).masked_fill(~band_of(op, CAUSAL), -math.inf))


def test_more_heads_than_a_grid_dimension_holds():
    op = operands((64, 64), (64, 64), batch=32800)
    check(op, run(op, Dense()), raw_scores(op))


def test_offsets_beyond_32_bits():
    """Rows 2^31 elements and more apart, in the inputs and in the output."""
    far = (1 << 30) + 1024
    store = torch.empty(3 * far + 4096, dtype=torch.bfloat16, device="cuda")

    query, key, value = normal(1, 2, 40, 64), normal(1, 2, 50, 64), normal(1, 2, 50, 64)
    for offset, t in enumerate((query, key, value)):
        view = store[offset * 4096 :].as_strided((1, 2, t.shape[2], 64), (16, far * 2, 64, 1))
        view.copy_(t)
    views = [
        store[i * 4096 :].as_strided((1, 2, t.shape[2], 64), (16, far * 2, 64, 1))
        for i, t in enumerate((query, key, value))
    ]
    op = Operands.of(*views, 0.125)
    assert op.key.data_ptr() == views[1].data_ptr()
    got = poisoned(op)
    out = store[3 * 4096 :].as_strided((1, 2, 40, 64), (16, far * 2, 64, 1))
    out.fill_(math.nan)
    launch(op, Dense(), out, got.lse)
    check(op, got._replace(out=out), raw_scores(op))
