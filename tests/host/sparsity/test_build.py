"""Block lists built from a mask's graph equal brute force over all elements."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flexbwd.errors import MaskError
from flexbwd.modgraph.ir import BOOL, I32, I64, Builder, F, Node
from flexbwd.sparsity import classify, grid
from flexbwd.sparsity.build import build_lists
from flexbwd.sparsity.tensors import BlockSparseTensors, IndexBase

BLOCKS = [(16, 16), (64, 64), (128, 128), (96, 96), (64, 128), (128, 64), (256, 256)]


def assert_equals_brute_force(brute, root, captures, sizes, block_size, index_base=None, **base):
    """`sizes`: B, H, Q_LEN, KV_LEN; both directions are compared."""
    B, H, q_len, kv_len = sizes
    lists = build_lists(root, captures, B, H, q_len, kv_len, block_size, index_base)
    q, kv = base.pop("q_idx", torch.arange(q_len)), base.pop("kv_idx", torch.arange(kv_len))
    inputs = brute.coordinates(B or 1, H or 1, q, kv, **base)
    dense = brute.evaluate(root, inputs, captures)[root].expand(B or 1, H or 1, q_len, kv_len)
    want = brute.classes_of(dense, block_size)
    got = brute.classes_in(lists.q_to_kv, want.shape[3])
    assert (got == want).all(), f"{(got != want).sum()} blocks differ, such as {(got != want).nonzero()[0].tolist()}"
    assert (brute.classes_in(lists.kv_to_q, want.shape[2]).transpose(2, 3) == want).all()


class Masks:
    """The closed forms: each gives (graph, captures) for lengths (q, kv)."""

    def __init__(self) -> None:
        self.build = Builder()
        self.q, self.kv = self.build.input("q_idx"), self.build.input("kv_idx")
        self.distance = self.build.arith("sub", self.q, self.kv)

    def _both(self, x: Node, y: Node) -> Node:
        return self.build.arith("and", x, y)

    def _const(self, op: str, x: Node, value: int) -> Node:
        return self.build.compare(op, x, self.build.const(value))

    def causal(self, sizes):
        return self.build.compare("ge", self.q, self.kv), []

    def window(self, sizes):
        return self._both(self.causal(sizes)[0], self._const("le", self.distance, 100)), []

    def symmetric_window(self, sizes):
        return self._const("le", self.build.unary("abs", self.distance), 70), []

    def prefix(self, sizes):
        prefix = self.build.compare("lt", self.kv, self.build.load(0, I32, (self.build.input("b"),)))
        return self.build.arith("or", self.causal(sizes)[0], prefix), [torch.tensor([150, 3], dtype=torch.int32)]

    def _same_document(self, ids):
        return self.build.compare("eq", self.build.load(0, I64, (self.q,)), self.build.load(0, I64, (self.kv,))), [ids]

    def sorted_documents(self, sizes):
        ids = torch.repeat_interleave(torch.arange(40), torch.randint(1, 60, (40,)))[: max(sizes)]
        same, captures = self._same_document(ids)
        return self._both(same, self.causal(sizes)[0]), captures

    def shuffled_documents(self, sizes):
        return self._same_document(torch.randint(0, 3, (max(sizes),)))

    def interval_documents(self, sizes):
        starts = torch.arange(max(sizes)) // 77 * 77
        start = self.build.load(0, I64, (self.q,))
        return self._both(self.build.compare("le", start, self.kv), self.causal(sizes)[0]), [starts]

    def chunked(self, sizes):
        width = self.build.const(64)
        chunks = (self.build.arith("fdiv", x, width) for x in (self.q, self.kv))
        return self._both(self.build.compare("eq", *chunks), self.causal(sizes)[0]), []

    def chunk_start(self, sizes):
        start = self.build.arith("sub", self.q, self.build.arith("mod", self.q, self.build.const(50)))
        return self.build.compare("ge", self.kv, start), []

    def dilated(self, sizes):
        on = self._const("eq", self.build.arith("mod", self.distance, self.build.const(3)), 0)
        return self._both(on, self.window(sizes)[0]), []

    def global_tokens(self, sizes):
        first = self.build.arith("or", self._const("lt", self.q, 20), self._const("lt", self.kv, 20))
        return self.build.arith("or", first, self.symmetric_window(sizes)[0]), []

    def natten(self, sizes):
        width, reach = self.build.const(20), 3
        near = []
        for op in ("fdiv", "mod"):
            centre = self.build.arith("max", self.build.arith(op, self.q, width), self.build.const(reach))
            centre = self.build.arith("min", centre, self.build.const(19 - reach))
            gap = self.build.unary("abs", self.build.arith("sub", centre, self.build.arith(op, self.kv, width)))
            near.append(self._const("le", gap, reach))
        return self._both(*near), []

    def alternating_heads(self, sizes):
        odd = self._const("eq", self.build.arith("mod", self.build.input("h"), self.build.const(2)), 1)
        return self.build.where(odd, self.causal(sizes)[0], self.symmetric_window(sizes)[0]), []

    def looked_up(self, sizes):
        return self.build.load(0, BOOL, (self.q, self.kv)), [
            torch.rand(sizes[0], 1) + torch.linspace(-1.5, 1.5, sizes[1]) > 0.5
        ]

    def everything(self, sizes):
        return self.build.const(True), []

    def nothing(self, sizes):
        return self.build.const(False), []

    def padded_keys(self, sizes):
        lengths = torch.tensor([[0, 130], [77, 5]])
        index = self.build.input("b"), self.build.input("h")
        return self.build.compare("lt", self.kv, self.build.load(0, I64, index)), [lengths]


NAMES = [name for name in vars(Masks) if not name.startswith("_")]


@pytest.mark.parametrize("block_size", BLOCKS, ids="{0[0]}x{0[1]}".format)
@pytest.mark.parametrize("lengths", [(400, 400), (331, 500)], ids="q{0[0]}-kv{0[1]}".format)
@pytest.mark.parametrize("name", NAMES)
def test_closed_forms_equal_brute_force(brute, name, lengths, block_size):
    torch.manual_seed(0)
    root, captures = getattr(Masks(), name)(lengths)
    assert_equals_brute_force(brute, root, captures, (2, 2, *lengths), block_size)


@settings(max_examples=500, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    lengths=st.tuples(st.integers(1, 260), st.integers(1, 260)),
    block_size=st.sampled_from(BLOCKS),
)
def test_random_programs_equal_brute_force(brute, seed, lengths, block_size):
    graph = brute.RandomGraph(seed)
    assert_equals_brute_force(brute, graph.mask(5), graph.captures, (2, 3, *lengths), block_size)


@pytest.mark.parametrize("lengths", [(1, 1), (1, 257), (257, 1), (128, 129)], ids="q{0[0]}-kv{0[1]}".format)
def test_short_lengths_equal_brute_force(brute, lengths):
    root, captures = Masks().causal(lengths)
    assert_equals_brute_force(brute, root, captures, (None, None, *lengths), (128, 128))


@pytest.mark.parametrize("lengths", [(0, 64), (64, 0), (0, 0)], ids="q{0[0]}-kv{0[1]}".format)
def test_empty_lengths_give_empty_lists(lengths):
    root, _ = Masks().causal(lengths)
    lists = build_lists(root, [], None, None, *lengths, 64)
    assert lists.q_to_kv.mask_block_cnt.shape == (1, 1, -(-lengths[0] // 64))
    assert lists.kv_to_q.mask_block_cnt.shape == (1, 1, -(-lengths[1] // 64))
    assert all(int(t.sum()) == 0 for pair in lists[:2] for t in (pair.mask_block_cnt, pair.full_block_cnt))


def test_a_ragged_last_block_that_keeps_all_its_elements_is_full():
    root, _ = Masks().everything((100, 100))
    lists = build_lists(root, [], None, None, 100, 70, 64).q_to_kv
    assert lists.full_block_cnt.tolist() == [[[2, 2]]]
    assert lists.mask_block_cnt.tolist() == [[[0, 0]]]


@pytest.mark.parametrize("at", [(701, 333), (703, 335), (15, 1007), (16, 16)], ids="{0[0]}-{0[1]}".format)
def test_one_kept_element_in_a_large_block_is_found(at):
    masks = Masks()
    row, column = (masks._const("eq", x, i) for x, i in zip((masks.q, masks.kv), at, strict=True))
    lists = build_lists(masks._both(row, column), [], None, None, 1024, 1024, 1024).q_to_kv
    assert lists.mask_block_cnt.tolist() == [[[1]]]


def test_index_lists_are_as_wide_as_the_longest_row():
    root, _ = Masks().window((1024, 1024))
    lists = build_lists(root, [], None, None, 1024, 1024, 64)
    for direction in lists[:2]:
        assert direction.mask_block_idx.shape[-1] == int(direction.mask_block_cnt.max())
        assert direction.full_block_idx.shape[-1] == max(1, int(direction.full_block_cnt.max()))


def test_dimensions_that_the_mask_does_not_read_are_expanded():
    root, captures = Masks().prefix((256, 256))
    lists = build_lists(root, captures, 2, 4, 256, 256, 64)
    assert lists.q_to_kv.mask_block_cnt.shape == (2, 4, 4)
    assert lists.q_to_kv.mask_block_cnt.stride(1) == lists.kv_to_q.full_block_idx.stride(1) == 0
    assert build_lists(root, captures, 2, None, 256, 256, 64).q_to_kv.mask_block_cnt.shape == (2, 1, 4)


@pytest.mark.parametrize("block_size", [(64, 64), (16, 48)], ids="{0[0]}x{0[1]}".format)
def test_index_base_shifts_every_coordinate(brute, block_size):
    q_len, kv_len = 150, 170
    q_base = torch.randperm(-(-q_len // block_size[0]), dtype=torch.int32) * 80
    kv_base = torch.randperm(-(-kv_len // block_size[1]), dtype=torch.int32) * 64 - 100
    masks = Masks()
    b, h = masks.build.input("b"), masks.build.input("h")
    shifted = masks.build.compare("lt", masks.kv, masks.build.arith("mul", b, masks.build.arith("mul", h, h)))
    root = masks.build.arith("or", shifted, masks.window((0, 0))[0])
    assert_equals_brute_force(
        brute,
        root,
        [],
        (2, 3, q_len, kv_len),
        block_size,
        IndexBase(3, 5, q_base, kv_base),
        b_off=3,
        h_off=5,
        q_idx=torch.arange(q_len) + q_base.repeat_interleave(block_size[0])[:q_len],
        kv_idx=torch.arange(kv_len) + kv_base.repeat_interleave(block_size[1])[:kv_len],
    )


def test_many_heads_and_strips_equal_brute_force(brute, monkeypatch):
    monkeypatch.setattr(grid, "_STRIP_ROWS", 3)
    monkeypatch.setattr(grid, "_STRIP_CELLS", 40)
    monkeypatch.setattr(classify, "_ELEMENTS", 1000)
    monkeypatch.setattr(classify, "_CELLS", 100)
    root, captures = Masks().alternating_heads((300, 300))
    assert_equals_brute_force(brute, root, captures, (2, 5, 300, 300), (16, 64))


@pytest.mark.parametrize("name", ["natten", "shuffled_documents"])
def test_huge_blocks_are_searched_in_larger_cells(brute, name, monkeypatch):
    monkeypatch.setattr(classify, "_MOST_CELLS", 3)
    root, captures = getattr(Masks(), name)((400, 400))
    assert_equals_brute_force(brute, root, captures, (None, None, 400, 400), (256, 192))


# -- errors ---------------------------------------------------------------------------------------------------------
def _reads(name: str) -> Node:
    build = Builder()
    return build.compare("le", build.input("kv_idx"), build.cast(build.input(name), I32))


@pytest.mark.parametrize(
    ("root", "arguments", "message"),
    [
        (_reads("b"), (None, None, 64, 64, 64), r"B=None .* reads `b`: pass B="),
        (_reads("h"), (2, None, 64, 64, 64), r"H=None .* reads `h`: pass H="),
        (_reads("q_idx"), (None, None, 64, 64, 100), r"BLOCK_SIZE=100: .* multiple of 16"),
        (_reads("q_idx"), (None, None, 64, 64, (64, 0)), r"BLOCK_SIZE=\(64, 0\): .* multiple of 16"),
        (_reads("q_idx"), (None, None, -1, 64, 64), r"Q_LEN=-1: .* >= 0"),
        (_reads("q_idx"), (1.5, None, 64, 64, 64), r"B=1.5: .* integer"),
        (_reads("score"), (None, None, 64, 64, 64), "mask_mod reads the score"),
        (Builder().input("q_idx"), (None, None, 64, 64, 64), "mask_mod yields i32: it must yield a bool"),
    ],
    ids=["reads-b", "reads-h", "block-100", "block-0", "negative-length", "float-batch", "score", "int-mask"],
)
def test_wrong_arguments_are_named(root, arguments, message):
    with pytest.raises(MaskError, match=message):
        build_lists(root, [], *arguments)


def test_an_index_base_of_another_length_is_refused():
    with pytest.raises(MaskError, match=r"index_base.kv_base has shape \(3,\).*\[2\]"):
        build_lists(_reads("q_idx"), [], None, None, 64, 128, 64, IndexBase(kv_base=torch.zeros(3, dtype=torch.int32)))


# -- cost -----------------------------------------------------------------------------------------------------------
_MEASURE = """
    import time, torch
    from pathlib import Path
    from flexbwd.modgraph.ir import I64, Builder
    from flexbwd.sparsity.build import build_lists

    torch.set_num_threads(2)
    build = Builder()
    q, kv = build.input("q_idx"), build.input("kv_idx")
    same = build.compare("eq", build.load(0, I64, (q,)), build.load(0, I64, (kv,)))
    mask = build.arith("and", same, build.compare("ge", q, kv))
    documents = torch.sort(torch.randint(0, 100, (131072,))).values
    build_lists(mask, [documents], None, None, 1024, 1024, 128)

    def peak_kib():
        return next(int(line.split()[1]) for line in Path("/proc/self/status").open() if line.startswith("VmHWM"))

    Path("/proc/self/clear_refs").write_text("5")  # the peak so far, that of the imports, is forgotten
    before, start = peak_kib(), time.perf_counter()
    build_lists(mask, [documents], None, None, 131072, 131072, 128)
    print(time.perf_counter() - start, (peak_kib() - before) / 1024)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads the peak memory from /proc")
def test_packed_documents_of_131072_tokens_take_under_a_second_and_200_mib():
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(_MEASURE)], capture_output=True, text=True, check=True)
    seconds, mib = map(float, done.stdout.split())
    assert seconds < 1
    assert 0 < mib < 200


def test_lists_have_the_types_of_kernels():
    root, _ = Masks().causal((256, 256))
    lists = build_lists(root, [], None, None, 256, 256, 128, device="cpu")
    assert isinstance(lists.q_to_kv, BlockSparseTensors)
    assert lists.bits is None
    assert all(t.dtype is torch.int32 and t.device.type == "cpu" for pair in lists[:2] for t in pair)
    assert lists.q_to_kv.full_block_idx.tolist() == [[[[0], [0]]]]


def test_float_masks_are_decided_too(brute):
    masks = Masks()
    slope = masks.build.arith("mul", masks.build.cast(masks.distance, F), masks.build.const(0.37))
    root = masks.build.compare("lt", masks.build.unary("tanh", slope), masks.build.const(0.5))
    assert_equals_brute_force(brute, root, [], (None, None, 300, 200), (64, 64))
