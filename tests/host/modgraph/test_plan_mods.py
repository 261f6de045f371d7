"""Mods traced apart become one plan: shifted slots, split masks, the right Jacobians, and a hash that means content."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from flexbwd.errors import ModBackwardError
from flexbwd.modgraph.frontend import ModKind, TracedMod
from flexbwd.modgraph.ir import BOOL, I32, Builder, F, Node, topological
from flexbwd.modgraph.modplan import CaptureSpec, JClass, Keep, LoadClass
from flexbwd.modgraph.plan_mods import build_mod_plan
from flexbwd.modgraph.prologue import Prologue


def spec(name: str, *shape: int, dtype: torch.dtype = torch.float32, grad: bool = True) -> CaptureSpec:
    return CaptureSpec(name, dtype, shape, grad)


def traced(kind: ModKind, make, *captures: CaptureSpec, prelude: int = 0) -> TracedMod:
    """A mod built by hand; `prelude` nodes are made first, so that serials differ."""
    b = Builder()
    for i in range(prelude):
        b.arith("add", b.input("kv_idx"), b.const(i + 50))
    return TracedMod(kind, "my_mod", "mine.py:3", b, make(b), captures, Prologue(0, (), ()))


def distance(b: Builder) -> Node:
    return b.cast(b.arith("sub", b.input("q_idx"), b.input("kv_idx")), F)


def causal(b: Builder) -> Node:
    return b.compare("ge", b.input("q_idx"), b.input("kv_idx"))


def alibi(b: Builder) -> Node:
    return b.arith("add", b.input("score"), b.arith("mul", b.load(0, F, [b.input("h")]), distance(b)))


def score_of(make, *captures: CaptureSpec, prelude: int = 0) -> TracedMod:
    return traced(ModKind.SCORE, make, *captures, prelude=prelude)


def test_no_mods_at_all_is_the_identity():
    plan = build_mod_plan(None, None, None)
    assert plan.is_identity
    assert plan.j_class is JClass.ONE
    assert plan.keep is Keep.P
    assert plan.mask is plan.score_keep is None
    assert plan.loads == plan.captures == ()


def test_learned_alibi():
    plan = build_mod_plan(score_of(alibi, spec("slopes", 8)), None, None)
    assert plan.j_class is JClass.ONE
    assert plan.keep is Keep.P
    (site,) = plan.loads
    assert site.kind is LoadClass.UNIFORM
    assert site.jacobian is distance(plan.builder)
    assert plan.names == ("my_mod", "")


def test_slots_are_score_mods_then_score_mod_bwds_then_mask_mods():
    def bwd(b):
        return b.arith("mul", b.input("grad"), b.load(0, F))

    def document(b):
        return b.compare("eq", b.load(1, I32, [b.input("q_idx")]), b.load(0, I32, [b.input("kv_idx")]))

    plan = build_mod_plan(
        score_of(alibi, spec("slopes", 8, grad=False)),
        traced(ModKind.SCORE_BWD, bwd, spec("gain")),
        traced(ModKind.MASK, document, spec("k_doc", 9, dtype=torch.int32), spec("q_doc", 9, dtype=torch.int32)),
    )
    assert [c.name for c in plan.captures] == ["slopes", "gain", "k_doc", "q_doc"]
    assert {s.slot for s in plan.loads} == {0, 1}
    assert {n.attr for n in topological([plan.mask]) if n.op == "load"} == {2, 3}
    assert all(s.jacobian is None for s in plan.loads)
    assert plan.j_score is plan.builder.load(1, F)


def test_a_mask_inside_the_score_is_split_off_before_differentiation():
    def masked(b):
        return b.where(causal(b), alibi(b), b.const(-math.inf))

    plan = build_mod_plan(score_of(masked, spec("slopes", 8)), None, None)
    assert plan.score_keep is causal(plan.builder)
    assert plan.forward is alibi(plan.builder)
    assert plan.j_class is JClass.ONE


def test_only_float_captures_that_require_grad_get_jacobians():
    def mod(b):
        bucket = b.load(0, I32, [b.arith("sub", b.input("q_idx"), b.input("kv_idx"))])
        bias = b.arith("add", b.load(1, F, [bucket]), b.load(2, F, [b.input("h")]))
        return b.arith("add", b.input("score"), bias)

    captures = (spec("bucket", 9, dtype=torch.int32, grad=False), spec("table", 32), spec("frozen", 8, grad=False))
    plan = build_mod_plan(score_of(mod, *captures), None, None)
    with_gradient = {s.slot: s.jacobian is not None for s in plan.loads}
    assert with_gradient == {0: False, 1: True, 2: False}
    assert {s.slot: s.kind for s in plan.loads} == {
        0: LoadClass.TOEPLITZ,
        1: LoadClass.TOEPLITZ,
        2: LoadClass.UNIFORM,
    }


def test_a_detached_capture_gets_no_jacobian():
    def mod(b):
        return b.arith("add", b.input("score"), b.emit("detach", b.load(0, F)))

    plan = build_mod_plan(score_of(mod, spec("bias")), None, None)
    assert plan.loads[0].jacobian is None


def test_one_capture_read_twice_is_two_sites():
    def mod(b):
        row, col = b.load(0, F, [b.input("q_idx")]), b.load(0, F, [b.input("kv_idx")])
        return b.arith("add", b.input("score"), b.arith("mul", row, col))

    plan = build_mod_plan(score_of(mod, spec("gate", 64)), None, None)
    assert [s.slot for s in plan.loads] == [0, 0]
    assert {s.kind for s in plan.loads} == {LoadClass.ROW, LoadClass.COL}
    row, col = plan.loads
    assert row.jacobian is col.node
    assert col.jacobian is row.node


def test_a_mod_that_ignores_the_score():
    def mod(b):
        return b.load(0, F, [b.input("q_idx"), b.input("kv_idx")])

    plan = build_mod_plan(score_of(mod, spec("table", 8, 8)), None, None)
    assert plan.j_score.is_value(0)
    assert plan.loads[0].jacobian.is_value(1)
    assert not plan.is_identity


def softcap(b: Builder) -> Node:
    biased = b.arith("add", b.input("score"), b.load(0, F, [b.input("h")]))
    return b.arith("mul", b.const(30.0), b.unary("tanh", b.arith("div", biased, b.const(30.0))))


def test_softcap_of_a_biased_score_keeps_only_the_product():
    plan = build_mod_plan(score_of(softcap, spec("bias", 8)), None, None)
    assert plan.j_class is JClass.NONLINEAR
    assert plan.loads[0].jacobian is plan.j_score
    assert plan.keep is Keep.P_J


# -- hand-written backward --------------------------------------------------------------------------------------------
def square(b: Builder) -> Node:
    return b.emit("mul", b.input("score"), b.input("score"))


def square_bwd(b: Builder) -> Node:
    return b.arith("mul", b.arith("mul", b.input("grad"), b.const(2)), b.input("score"))


def test_the_hand_written_backward_is_preferred():
    def thrice(b):
        return b.arith("mul", b.input("grad"), b.const(3.0))

    plan = build_mod_plan(score_of(square), traced(ModKind.SCORE_BWD, thrice), None)
    assert plan.j_score.is_value(3)
    assert plan.j_class is JClass.CONST
    written = build_mod_plan(score_of(square), traced(ModKind.SCORE_BWD, square_bwd), None)
    assert written.j_class is JClass.NONLINEAR
    assert written.keep is Keep.P_J


def test_a_hand_written_backward_beside_a_trained_capture_is_refused():
    bwd = traced(ModKind.SCORE_BWD, lambda b: b.input("grad"))
    with pytest.raises(ModBackwardError, match=r"slopes.*detach\(\)"):
        build_mod_plan(score_of(alibi, spec("slopes", 8)), bwd, None)
    build_mod_plan(score_of(alibi, spec("slopes", 8, grad=False)), bwd, None)


def test_a_hand_written_backward_alone_or_not_linear_is_refused():
    with pytest.raises(ModBackwardError, match="without a score_mod"):
        build_mod_plan(None, traced(ModKind.SCORE_BWD, square_bwd), None)
    with pytest.raises(ModBackwardError, match=r"my_mod \(mine\.py:3\): .*not linear"):
        build_mod_plan(score_of(square), traced(ModKind.SCORE_BWD, lambda b: b.unary("exp", b.input("grad"))), None)


# -- hash -------------------------------------------------------------------------------------------------------------
def mask(make=causal, *captures: CaptureSpec) -> TracedMod:
    return traced(ModKind.MASK, make, *captures)


def test_hash_ignores_construction_order_and_names():
    plain = build_mod_plan(score_of(softcap, spec("bias", 8)), None, mask())
    again = build_mod_plan(score_of(softcap, spec("other", 8), prelude=7), None, mask())
    longer = build_mod_plan(score_of(softcap, spec("bias", 16)), None, mask())
    assert plain.hash == again.hash == longer.hash


def test_hash_tells_plans_apart():
    slopes = spec("slopes", 8)

    def masked(b):
        return b.where(causal(b), b.input("score"), b.const(-math.inf))

    def detached(b):
        return b.arith("add", b.input("score"), b.emit("detach", b.load(0, F)))

    def kept(b):
        return b.load(0, BOOL, [b.input("kv_idx")])

    plans = [
        build_mod_plan(None, None, None),
        build_mod_plan(None, None, mask()),
        build_mod_plan(score_of(masked), None, None),
        build_mod_plan(score_of(masked), None, mask()),
        build_mod_plan(score_of(alibi, slopes), None, None),
        build_mod_plan(score_of(alibi, replace(slopes, requires_grad=False)), None, None),
        build_mod_plan(score_of(alibi, replace(slopes, dtype=torch.bfloat16)), None, None),
        build_mod_plan(score_of(alibi, replace(slopes, shape=(8, 1))), None, None),
        build_mod_plan(score_of(alibi, slopes), None, mask()),
        build_mod_plan(score_of(softcap, slopes), None, None),
        build_mod_plan(score_of(detached, spec("bias")), None, None),
        build_mod_plan(score_of(detached, spec("bias", grad=False)), None, None),
        build_mod_plan(None, None, mask(kept, spec("keep", 9, dtype=torch.bool, grad=False))),
        build_mod_plan(score_of(square), traced(ModKind.SCORE_BWD, lambda b: b.input("grad")), None),
        build_mod_plan(score_of(square), None, None),
    ]
    assert len({p.hash for p in plans}) == len(plans)
