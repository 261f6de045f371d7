"""Nodes are typed and shared; hashes mean expressions; printing is bounded."""

from __future__ import annotations

import math
import random
import time

import pytest
from hypothesis import given, settings

from flexbwd.errors import ModDtypeError
from flexbwd.modgraph.ir import BOOL, I32, I64, Builder, F, Node, canonical_hash, promote, to_text, topological
from tests.host.modgraph.programs import build, float_programs


@pytest.fixture
def b() -> Builder:
    return Builder()


def test_equal_expressions_are_one_node(b):
    x, y = b.input("q_idx"), b.input("kv_idx")
    assert b.arith("add", x, y) is b.arith("add", y, x)
    assert b.arith("sub", x, y) is not b.arith("sub", y, x)
    assert b.load(0, F, [x]) is b.load(0, F, [x])
    assert b.load(0, F, [x]) is not b.load(1, F, [x])


@pytest.mark.parametrize(
    ("x", "y", "want"), [(BOOL, I32, I32), (I32, I64, I64), (I64, F, F), (BOOL, BOOL, BOOL)], ids=str
)
def test_promotion(x, y, want):
    assert promote(x, y) is promote(y, x) is want


def test_operands_get_the_casts_that_torch_inserts(b):
    q, s, c = b.input("q_idx"), b.input("score"), b.compare("lt", b.input("q_idx"), b.const(3))
    assert b.arith("add", q, s).dtype is F
    assert b.arith("div", q, b.const(2)).dtype is F
    assert b.arith("add", c, c).dtype is I32
    assert b.arith("and", c, c).dtype is BOOL
    assert b.where(c, q, s).dtype is F
    assert b.where(q, s, s) is s
    assert b.unary("exp", q).args[0].op == "cast"
    assert b.unary("abs", q).dtype is I32


def test_numbers_get_the_smallest_type(b):
    assert b.const(True).dtype is BOOL
    assert b.const(1).dtype is I32
    assert b.const(2**31).dtype is I64
    assert b.const(1.0).dtype is F
    with pytest.raises(ModDtypeError, match="64 bits"):
        b.const(2**70)


def test_wrong_arity_is_refused(b):
    with pytest.raises(ValueError, match="add takes 2"):
        b.emit("add", b.input("score"))


def test_substitute_copies_between_builders_and_shifts_slots(b):
    root = b.arith("add", b.input("score"), b.load(1, F, [b.input("h")]))
    other = Builder()
    (copy,) = other.substitute([root], {}, slot_shift=3)
    assert copy is other.arith("add", other.input("score"), other.load(4, F, [other.input("h")]))


def test_substitute_simplifies_again(b):
    root = b.emit("mul", b.input("grad"), b.input("score"))
    (copy,) = b.substitute([root], {b.input("grad"): b.const(1.0)})
    assert copy is b.input("score")


def test_topological_gives_operands_first_and_each_once():
    b = Builder()
    node = b.input("score")
    for _ in range(50):
        node = b.emit("mul", b.emit("add", node, b.const(1.0)), node)
    order = list(topological([node, node.args[0]]))
    position = {n: i for i, n in enumerate(order)}
    assert len(position) == len(order)
    assert all(position[a] < position[n] for n in order for a in n.args)


# -- canonical_hash ---------------------------------------------------------------------------------------------------
def shuffled_copy(root: Node, rng: random.Random) -> Node:
    """The same expression, made in another order with other operand orders, after other nodes."""
    b = Builder()
    for _ in range(rng.randrange(5)):
        b.arith("add", b.input(rng.choice(["q_idx", "kv_idx", "h"])), b.const(rng.randrange(9)))
    leaves = [n for n in topological([root]) if not n.args]
    rng.shuffle(leaves)
    done = {n: b.rebuild(n, []) for n in leaves}
    for n in topological([root]):
        if n not in done:
            args = tuple(done[a] for a in n.args)
            done[n] = b.raw(n.op, n.dtype, args) if n.op != "load" else b.load(n.attr, n.dtype, args)
    return done[root]


@settings(max_examples=100)
@given(program=float_programs())
def test_hash_ignores_construction_and_operand_order(program):
    root, _ = build(program, Builder())
    for seed in range(3):
        assert canonical_hash([shuffled_copy(root, random.Random(seed))]) == canonical_hash([root])


def test_hash_tells_expressions_apart(b):
    q, k, s = b.input("q_idx"), b.input("kv_idx"), b.input("score")
    roots = [
        q, k, b.arith("sub", q, k), b.arith("sub", k, q), b.cast(q, F), b.cast(q, I64), b.const(1), b.const(1.0),
        b.const(True), b.const(1, I64), b.const(0.0), b.const(-0.0), b.const(math.nan), b.const(math.inf), b.load(0, F),
        b.load(1, F), b.load(0, I32), b.load(0, F, [q]), b.load(0, F, [k]), b.load(0, F, [q, k]), b.load(0, F, [k, q]),
        b.unary("exp", s), b.unary("exp2", s), b.compare("lt", q, k), b.compare("lt", k, q), b.arith("max", q, k),
        b.arith("mul", s, b.const(2.0)), b.arith("mul", s, b.const(2.5)),
    ]  # fmt: skip
    assert len({canonical_hash([r]) for r in roots}) == len(roots)
    assert canonical_hash([q, k]) != canonical_hash([k, q])
    assert canonical_hash([q]) != canonical_hash([q, q])
    assert canonical_hash([q], extra=("fp32",)) != canonical_hash([q], extra=("bf16",))


# -- text -------------------------------------------------------------------------------------------------------------
def test_text_reads_like_python(b):
    score, q, k, h = (b.input(n) for n in ("score", "q_idx", "kv_idx", "h"))
    bias = b.load(0, F, [h, b.arith("sub", q, k)])
    root = b.where(b.compare("lt", q, k), b.unary("tanh", b.arith("add", score, bias)), b.const(0.5))
    assert to_text(root, ["bias"]) == "where((q_idx < kv_idx), tanh((score + bias[h, (q_idx - kv_idx)])), 0.5)"
    assert "capture0[" in repr(root)
    assert to_text(b.cast(q, F)) == "f(q_idx)"


def test_shared_graphs_print_in_bounded_space_and_time(b):
    node = b.input("score")
    for i in range(200):  # 2**200 operands when written out
        node = b.emit("mul", b.emit("add", node, b.const(float(i + 1))), node)
    start = time.perf_counter()
    text = repr(node)
    assert time.perf_counter() - start < 1.0
    assert len(text) < 10_000
    assert "…" in text


def test_deep_graphs_print_without_recursion_error(b):
    node = b.input("score")
    for _ in range(5000):
        node = b.emit("exp", node)
    assert "…" in repr(node)
