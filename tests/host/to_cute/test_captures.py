"""Captured tensors as kernel code reads them: every dtype, any strides, numbers, nothing at all; and their keys."""

from __future__ import annotations

import dataclasses
from importlib.util import find_spec

import pytest
import torch

from flexbwd import mods
from flexbwd.jit.codec import canonical
from flexbwd.modgraph.extents import Extents
from flexbwd.modgraph.modplan import JClass
from flexbwd.sm90.mods import NO_MODS, ModConfig, ModUse

if find_spec("cutlass") is None:
    pytest.skip("the CuTe DSL has wheels for Linux only", allow_module_level=True)

from tests.host.to_cute.fragments import assert_same, expected, on_host, plan_of, raw_scores

EXTENTS = Extents(2, 3, 22, 27)
G = torch.Generator().manual_seed(0)
INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)


def check(score, mask=None, extents=EXTENTS):
    plan, captures = plan_of(score, mask)
    raw = raw_scores(extents)
    want, rough = (expected(plan, captures, extents, raw, t) for t in (torch.float64, torch.float32))
    for got in on_host(plan, captures, extents, raw):
        assert_same(got, want, rough, sum(s.jacobian is not None for s in plan.loads))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_floats_of_every_width(dtype):
    rows, table = torch.randn(22, generator=G).to(dtype), torch.randn(3, 27, generator=G).to(dtype)
    check(lambda s, b, h, q, kv: s * rows[q] + table[h, kv])


def test_integers_of_every_width():
    tables = [torch.randint(0, 100, (27,), generator=G).to(t) for t in INTEGERS]
    tables[0], tables[2] = tables[0] - 60, tables[2] - 30000
    flags = torch.rand(22, generator=G) < 0.5

    def mask(b, h, q, kv):
        found = flags[q] | (kv < 3)
        for t in tables:
            found = found & (t[kv] != t[(kv * 7) % 27])
        return found

    check(None, mask)


def test_strides_of_every_kind():
    wide = torch.randn(3, 40, 60, generator=G)
    views = [
        wide.transpose(1, 2)[:, :27, :22],  # no unit stride where it is wanted
        wide[:, 3:25, 5:59:2],
        wide[:1, :22, :1].expand(3, 22, 27),
        wide[:, 0, :27].unsqueeze(1).expand(3, 22, 27),
        wide[:, :, 7].unsqueeze(-1).expand(3, 40, 27),
    ]

    def score(s, b, h, q, kv):
        total = s + views[0][h, kv, q]
        for view in views[1:]:
            total = total + view[h, q, kv]
        return total

    check(score)


def test_numbers_and_one_element_tensors():
    cap, slope, on, shift = (
        torch.tensor(3.0),
        torch.tensor(0.25, dtype=torch.bfloat16),
        torch.tensor(True),
        torch.tensor(4),
    )
    one = torch.tensor([0.5], dtype=torch.float64)

    def score(s, b, h, q, kv):
        return torch.where(on, cap * torch.tanh(s / cap), s) + slope * (q - kv) + one[0]

    check(score, lambda b, h, q, kv: kv <= q + shift)
    plan, captures = plan_of(score)
    config, arguments = ModConfig.of(plan, captures, ModUse(EXTENTS, (64, 64)))
    assert [type(a) for k, a in zip(config.captures, arguments, strict=True) if k.number] == [bool, float, float]


def test_indices_loaded_from_tensors():
    buckets = torch.randint(0, 5, (60,), generator=G)
    values = torch.randn(3, 5, generator=G, dtype=torch.float64).requires_grad_(True)
    check(lambda s, b, h, q, kv: s + values[h, buckets[q - kv + 30]])


def test_a_tensor_without_elements():
    empty = torch.zeros(0)
    check(lambda s, b, h, q, kv: torch.where(kv < 99, s, s + empty[kv]))


def test_nothing_outside_a_tensor_is_read():
    """Whole tiles run: lanes past the lengths index past the ends, and NaN lies there."""
    around = torch.full((3, 64 * 64), torch.nan)
    table = around[1, 1000 : 1000 + 22 * 27].view(22, 27)
    table.copy_(torch.randn(22, 27, generator=G))
    bias = around[2, 50:98]
    bias.copy_(torch.randn(48, generator=G))
    plan, captures = plan_of(lambda s, b, h, q, kv: s + table[q, kv] + bias[q - kv + 26])
    for got in on_host(plan, captures, EXTENTS, raw_scores(EXTENTS), whole=True):
        assert torch.isfinite(got.score).all()


# -- keys --------------------------------------------------------------------------------------------------------------
def config_of(score=None, mask=None, extents=EXTENTS, **use) -> ModConfig:
    plan, captures = plan_of(score, mask)
    return ModConfig.of(plan, captures, ModUse(extents, (64, 128), **use))[0]


def biased(dtype=torch.float32, n=128, stride=1):
    bias = torch.randn(n * stride, generator=G).to(dtype)[::stride]
    return lambda s, b, h, q, kv: s + bias[kv]


def test_no_mods_have_no_key():
    assert config_of() == NO_MODS
    assert not (NO_MODS.has_score or NO_MODS.has_mask or NO_MODS.has_keep)
    plan, captures = plan_of()
    assert ModConfig.of(plan, captures, ModUse(EXTENTS, (64, 128)))[1] == (0,)


def test_equal_mods_with_other_values_share_a_key():
    a, b = config_of(biased()), config_of(biased())
    assert a == b and hash(a) == hash(b) and a.graph is not b.graph
    assert canonical(a) == canonical(b)
    assert len(canonical(a)) < 1000


@pytest.mark.parametrize(
    "other",
    [
        config_of(biased(torch.bfloat16)),
        config_of(biased(stride=2)),
        config_of(biased(n=100)),  # lanes past the keys need a guard
        config_of(biased(), precision="accurate"),
        config_of(lambda s, b, h, q, kv: s + 1.0),
        config_of(mask=mods.causal),
    ],
)
def test_what_changes_the_code_changes_the_key(other):
    assert config_of(biased()) != other


def test_a_key_is_found_again_without_work(monkeypatch):
    plan, captures = plan_of(biased())
    first, arguments = ModConfig.of(plan, captures, ModUse(EXTENTS, (64, 128)))
    monkeypatch.setattr("flexbwd.sm90.mods.prepare", None)
    again, _ = ModConfig.of(plan, captures, ModUse(EXTENTS, (64, 128)))
    assert again is first
    assert arguments[0].data_ptr() == captures[0].data_ptr()


def test_lengths_that_do_not_matter_are_no_part_of_a_key():
    plan, captures = plan_of(mods.alibi(3), mods.sliding_window(20))
    shorter, longer = (ModConfig.of(plan, captures, ModUse(Extents(2, 3, n, n), (64, 128)))[0] for n in (99, 4000))
    assert shorter is longer
    assert config_of(biased(n=4096)) == config_of(biased(n=4096), extents=Extents(2, 3, 4000, 4001))


def test_parts_of_a_key():
    config = config_of(mods.softcap(20.0), mods.causal, backward=True)
    assert config.has_score and config.has_mask and not config.has_keep
    assert config.j_class is JClass.NONLINEAR
    assert not config_of(mods.softcap(20.0), mods.causal, partial=False).has_mask
    assert config_of(lambda s, b, h, q, kv: torch.where(kv < 9, s, -torch.inf)).has_keep
    assert {f.name for f in dataclasses.fields(ModConfig) if not f.compare} == {"graph"}
