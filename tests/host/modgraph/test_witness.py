"""A witness holds exactly as long as nothing its function can read has changed."""

import gc
import weakref

import pytest
import torch

from flexbwd.modgraph import frontend
from flexbwd.modgraph.frontend import ModKind, trace
from flexbwd.modgraph.witness import Witness

SCALE = 2.0


def helper(s):
    return s * SCALE


def made(table, gain=1.0):
    inner = gain

    def mod(score, b, h, q_idx, kv_idx, offset=3):
        return helper(score) * inner + table[h] + offset

    return mod


def change_cell(mod, table):
    mod.__closure__[0].cell_contents = 5.0


def change_default(mod, table):
    mod.__defaults__ = (4,)


def change_code(mod, table):
    mod.__code__ = made(table).__code__.replace(co_name="other")


def need_gradient(mod, table):
    table.requires_grad_()


def reshape(mod, table):
    table.resize_(2, 2)


def add_attribute(mod, table):
    mod.extra = 1


def set_keyword_default(mod, table):
    mod.__kwdefaults__ = {"x": 1}


CHANGES = [change_cell, change_default, change_code, need_gradient, reshape, add_attribute, set_keyword_default]


@pytest.mark.parametrize("change", CHANGES, ids=lambda f: f.__name__)
def test_a_change_ends_it(change):
    table = torch.zeros(4)
    mod = made(table)
    witness = Witness.of(mod)
    assert witness.holds()
    assert witness.holds()
    change(mod, table)
    assert not witness.holds()


@pytest.mark.parametrize("name", ["SCALE", "helper", "float"])
def test_a_changed_global_ends_it(name, monkeypatch):
    def mod(score, b, h, q_idx, kv_idx):
        return helper(score) * float(2)

    witness = Witness.of(mod)
    assert witness.holds()
    monkeypatch.setitem(globals(), name, (lambda s: s) if name != "SCALE" else 3.0)
    assert not witness.holds()


@pytest.mark.parametrize("held", [[1.0], {"a": 1}, torch.nn.Linear(2, 2), object()], ids=lambda v: type(v).__name__)
def test_what_can_change_inside_has_none(held):
    def mod(score, b, h, q_idx, kv_idx):
        return score * held

    assert Witness.of(mod) is None


def test_other_callables_have_none():
    assert Witness.of(torch.nn.ReLU()) is None


def test_a_vouched_trace_is_not_fingerprinted(monkeypatch):
    mod = made(torch.zeros(4))
    first, tensors = trace(mod, ModKind.SCORE, device="cpu")
    monkeypatch.setattr(frontend, "Fingerprint", None)
    second, again = trace(mod, ModKind.SCORE, device="cpu")
    assert second is first
    assert again[0] is tensors[0]


def test_it_keeps_no_function_and_no_tensor_alive():
    table = torch.zeros(4)
    mod = made(table)
    trace(mod, ModKind.SCORE, device="cpu")
    trace(mod, ModKind.SCORE, device="cpu")
    gone = [weakref.ref(mod), weakref.ref(table)]
    del mod, table
    gc.collect()
    assert [g() for g in gone] == [None, None]
