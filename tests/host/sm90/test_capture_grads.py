"""How the backward kernel sums gradients of captured tensors, run on the CPU: a value is one per lane of a warp."""

from __future__ import annotations

import os
from types import SimpleNamespace

import numpy as np
import pytest

os.environ.setdefault("CUTE_DSL_ARCH", "sm_90a")  # read when the DSL is imported
pytest.importorskip("cutlass", reason="the CuTe DSL is not installed")

from flexbwd.modgraph.modplan import LoadClass
from flexbwd.sm90.backward import capture_grads
from flexbwd.sm90.backward.capture_grads import CaptureGrads
from flexbwd.sm90.numerics import column_of

LANES = np.arange(32)
X, Y = LANES % 4, LANES // 4
COLUMNS = 16  # of a thread: 64 queries
KEYS, QUERIES = 16, 64  # of a warp


class Registers(list):
    def fill(self, value):
        self[:] = [np.full(32, value) for _ in self]


class Fragment:
    """dS' of a warp, [keys, queries], as lanes hold it."""

    def __init__(self, values):
        self.values = values

    def __getitem__(self, at):
        r, j = at
        return self.values[Y + 8 * r, 2 * X + column_of(j)]


class Site:
    """A load at `index(q, kv)` with the Jacobian 1 + q, or 1."""

    slot = 0

    def __init__(self, kind, index, plain):
        jacobian = SimpleNamespace(is_value=lambda value: plain)
        self.site, self.find = SimpleNamespace(kind=kind, jacobian=jacobian), index

    def index(self, r, j):
        return (self.find(2 * X + column_of(j), Y + 8 * r),)

    def jacobian(self, r, j):
        return 1.0 + 2 * X + column_of(j)


@pytest.fixture
def on_lanes(monkeypatch):
    """The DSL's operations over arrays of 32 lanes; returns what was added to memory, by index."""
    added = {}

    def add_if(wanted, target, index, value):
        for at, x, yes in zip(*np.broadcast_arrays(index[0], value, wanted), strict=True):
            if yes:
                added[int(at)] = added.get(int(at), 0.0) + float(x)

    def down(x, offset):
        return x[np.minimum(LANES + offset, 31)]

    arch = SimpleNamespace(shuffle_sync_bfly=lambda x, offset: x[LANES ^ offset], shuffle_sync_down=down)
    size = lambda t, mode=None: COLUMNS if mode else len(t)  # noqa: E731
    monkeypatch.setattr(capture_grads, "cute", SimpleNamespace(arch=arch, size=size))
    monkeypatch.setattr(capture_grads, "cutlass", SimpleNamespace(select_=np.where))
    monkeypatch.setattr(capture_grads, "Float32", float)
    monkeypatch.setattr(capture_grads, "rows_and_columns", lambda t: t)
    monkeypatch.setattr(capture_grads, "quad_sum", lambda x: x.reshape(8, 4).sum(1).repeat(4))
    monkeypatch.setattr(capture_grads, "Int32", int)
    monkeypatch.setattr(capture_grads, "add_if", add_if)
    return added


KINDS = {
    LoadClass.UNIFORM: lambda q, kv: 0 * q + 3,
    LoadClass.ROW: lambda q, kv: q + 5,
    LoadClass.COL: lambda q, kv: kv + 7,
    LoadClass.TOEPLITZ: lambda q, kv: q - kv + 100,
    LoadClass.TILE: lambda q, kv: q * KEYS + kv,
    LoadClass.GATHER: lambda q, kv: (3 * q + 5 * kv) % 11,
}


@pytest.mark.parametrize("plain", [True, False], ids=["factor 1", "factor"])
@pytest.mark.parametrize("kind", KINDS, ids=lambda k: k.value)
def test_every_element_is_added_once(on_lanes, kind, plain):
    generator = np.random.default_rng(0)
    held = {LoadClass.UNIFORM: Registers([0]), LoadClass.COL: Registers([0, 0])}.get(kind)
    site = Site(kind, KINDS[kind], plain)
    rows = SimpleNamespace(tile=lambda axis: SimpleNamespace(sites=[site]))
    grads = CaptureGrads((None,), (0,), (held,), LANES)
    grads.start()
    want = {}
    for _ in range(2):  # steps
        values = generator.standard_normal((KEYS, QUERIES)) * (generator.random((KEYS, QUERIES)) < 0.7)
        grads.add(rows, Fragment(values), 0)
        for kv, q in np.ndindex(KEYS, QUERIES):
            at = int(KINDS[kind](q, kv))
            want[at] = want.get(at, 0.0) + values[kv, q] * (1.0 if plain else 1.0 + q)
    grads.finish(rows)
    assert on_lanes.keys() <= want.keys()
    for at, value in want.items():
        assert on_lanes.get(at, 0.0) == pytest.approx(value, abs=1e-9)
