"""BlockMask: sizes as torch's, slices and crops that keep their meaning, moving, pickling, pytrees, compile."""

import functools
import pickle

import pytest
import torch
from torch.nn.attention import flex_attention as torch_flex
from torch.utils import _pytree as pytree

from flexbwd import flex_attention, sparsity
from flexbwd.errors import MaskError
from flexbwd.sparsity import BlockMask, IndexBase, and_masks, create_block_mask, noop_mask
from flexbwd.sparsity.rebind import captured_tensors, map_tensors

LENGTHS = [(256, 256), (100, 300), (300, 100), (1, 257), (129, 1)]


def causal(b, h, q, k):
    return q >= k


def per_batch_and_head(b, h, q, k):
    return (k <= q + 40 * b) & ((q - k < 90) | (h == 1))


def untraceable(b, h, q, k):
    return torch.ones(4, dtype=torch.bool).cumsum(0)[q % 4] * 0 + (q >= k) == 1 if int(q) % 2 else k < 50


def dense_of(mod, shape):
    """Brute force over all elements, by broadcasting."""
    b, h, q, k = (torch.arange(n) for n in shape)
    return mod(b[:, None, None, None], h[:, None, None], q[:, None], k).expand(shape)


def lists_only(seed=0, shape=(2, 3, 5, 7), block=16, tail=(3, 5)):
    """Random partial and full lists, in shuffled order and with garbage past the counts."""
    gen = torch.Generator().manual_seed(seed)
    batch, heads, rows, columns = shape
    kinds = torch.randint(0, 3, shape, generator=gen)
    lists = []
    for kind in (1, 2):
        cnt = (kinds == kind).sum(-1)
        idx = torch.full((batch, heads, rows, columns), 10**6)
        for at in torch.cartesian_prod(*(torch.arange(n) for n in shape[:3])).tolist():
            found = (kinds[tuple(at)] == kind).nonzero()[:, 0]
            found = found[torch.randperm(len(found), generator=gen)]
            idx[(*at, slice(0, len(found)))] = found
        lists += [cnt.int(), idx.int()]
    lengths = (rows * block - tail[0], columns * block - tail[1])
    return kinds, BlockMask.from_kv_blocks(*lists, BLOCK_SIZE=block, seq_lengths=lengths)


def expand_blocks(kinds, block, lengths):
    return kinds.repeat_interleave(block, -2).repeat_interleave(block, -1)[..., : lengths[0], : lengths[1]]


# -- sizes ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("lengths", LENGTHS, ids="q{0[0]}-kv{0[1]}".format)
@pytest.mark.parametrize("block", [(128, 128), (64, 128), (128, 32)], ids="{0[0]}x{0[1]}".format)
def test_sizes_sparsity_and_dense_blocks_are_torchs(lengths, block):
    ours = create_block_mask(per_batch_and_head, 2, 3, *lengths, BLOCK_SIZE=block)
    theirs = torch_flex.create_block_mask(per_batch_and_head, 2, 3, *lengths, device="cpu", BLOCK_SIZE=block)
    assert ours.shape == theirs.shape == (2, 3, *lengths)
    assert ours.numel() == theirs.numel()
    assert torch.equal(ours.to_dense(), theirs.to_dense())
    ceil_grid = 100 * (1 - theirs.to_dense().double().mean().item())
    assert ours.sparsity() == pytest.approx(ceil_grid)
    assert torch.equal(ours.element_mask(), dense_of(per_batch_and_head, ours.shape))
    ours.check()


def test_sparsity_equals_torchs_on_whole_blocks():
    ours = create_block_mask(causal, None, None, 512, 512)
    theirs = torch_flex.create_block_mask(causal, None, None, 512, 512, device="cpu")
    assert ours.sparsity() == pytest.approx(theirs.sparsity())


def test_lists_go_by_torchs_names_too():
    ours = create_block_mask(causal, None, None, 300, 300)
    theirs = torch_flex.create_block_mask(causal, None, None, 300, 300, device="cpu")
    for name in ("kv_num_blocks", "full_kv_num_blocks", "q_num_blocks", "full_q_num_blocks"):
        assert getattr(ours, name).shape == getattr(theirs, name).shape
    assert ours.BLOCK_SIZE == theirs.BLOCK_SIZE
    assert (ours.kv_indices, ours.q_indices) == (ours.q_to_kv[1], ours.kv_to_q[1])
    assert (ours.full_kv_indices, ours.full_q_indices) == (ours.q_to_kv[3], ours.kv_to_q[3])


@pytest.mark.parametrize("lengths", [(0, 0), (0, 40), (40, 0)], ids="q{0[0]}-kv{0[1]}".format)
def test_empty_lengths_are_masks_too(lengths):
    mask = create_block_mask(causal, None, None, *lengths)
    assert mask.element_mask().shape == (1, 1, *lengths)
    assert mask.sparsity() == 0.0
    mask.check()
    assert "BlockMask(" in str(mask) + repr(mask)


def test_elements_are_listed_and_full_or_kept_by_the_mask():
    kinds, mask = lists_only()
    mask.mask_mod = causal
    want = expand_blocks(kinds, 16, mask.seq_lengths)
    want = (want == 2) | ((want == 1) & dense_of(causal, mask.shape))
    assert torch.equal(mask.element_mask(), want)


def test_a_dense_tensor_is_kept_bit_by_bit():
    dense = torch.rand(2, 1, 100, 150, generator=torch.Generator().manual_seed(1)) > 0.4
    mask = create_block_mask(dense, 2, None, 100, 150, BLOCK_SIZE=(32, 48))
    assert mask.mask_mod is None
    assert torch.equal(mask.element_mask(), dense)


def test_an_untraceable_mask_is_tabulated():
    want = torch.tensor(
        [[bool(untraceable(0, 0, torch.tensor(q), torch.tensor(k))) for k in range(60)] for q in range(40)]
    )
    mask = create_block_mask(untraceable, None, None, 40, 60, BLOCK_SIZE=16)
    assert mask.bits is not None
    assert torch.equal(mask.element_mask()[0, 0], want)
    cnt, idx = torch.tensor([[[1]]]), torch.tensor([[[[0]]]])
    listed = BlockMask.from_kv_blocks(cnt, idx, BLOCK_SIZE=64, mask_mod=untraceable, seq_lengths=(40, 60))
    assert torch.equal(listed.element_mask()[0, 0], want)


def test_index_base_moves_the_coordinates_of_the_mask():
    base = IndexBase(b_off=1, q_base=torch.tensor([64, 0], dtype=torch.int32), block_size=(32, 32))
    mask = create_block_mask(per_batch_and_head, 2, 2, 64, 96, BLOCK_SIZE=32, index_base=base)
    q = torch.cat([torch.arange(64, 96), torch.arange(32, 64)])[:, None]
    b, h, k = torch.tensor([1, 2])[:, None, None, None], torch.arange(2)[:, None, None], torch.arange(96)
    assert torch.equal(mask.element_mask(), per_batch_and_head(b, h, q, k))
    mask.check()


# -- slices -----------------------------------------------------------------------------------------------------------
SLICES = {
    "one-batch": (1,),
    "negative": (-1, -2),
    "heads": (slice(None), slice(1, 3)),
    "shuffled-heads": (0, [2, 0, 1]),
    "first-rows": (slice(None), slice(None), slice(0, 2)),
    "later-rows": (slice(None), slice(None), slice(2, 4)),
    "ragged-row": (slice(None), slice(None), slice(3, None)),
    "one-row": (1, 2, 4),
    "picked-rows": (slice(None), 0, torch.tensor([3, 0, 2])),
    "every-other": (slice(None, None, -1), slice(None, None, 2), slice(None, None, 2)),
    "bools": (torch.tensor([False, True]), slice(None), torch.tensor([True, False, False, True, True])),
    "no-rows": (slice(None), slice(None), slice(0, 0)),
}


def sliced_dense(dense, index, block):
    """The same choice made on elements."""
    index = (*index, *(slice(None),) * (3 - len(index)))
    rows = torch.arange(-(-dense.shape[2] // block))
    for dim, i in enumerate(index[:2]):
        dense = dense.index_select(dim, torch.arange(dense.shape[dim])[_as_vector(i)])
    chosen = rows[_as_vector(index[2])]
    elements = [torch.arange(dense.shape[2])[r * block : (r + 1) * block] for r in chosen.tolist()]
    return dense.index_select(2, torch.cat([*elements, torch.empty(0, dtype=torch.int64)]))


def _as_vector(index):
    if isinstance(index, slice) and (index.step or 1) < 0:
        return torch.tensor(list(range(2))[index])
    return [index] if isinstance(index, int) else index


@pytest.mark.parametrize("index", SLICES.values(), ids=SLICES)
@pytest.mark.parametrize("source", ["mask_mod", "lists", "bits"])
def test_a_slice_keeps_the_same_elements(index, source):
    if source == "mask_mod":
        mask = create_block_mask(per_batch_and_head, 2, 3, 70, 100, BLOCK_SIZE=16)
    elif source == "lists":
        mask = lists_only(tail=(10, 5))[1]
    else:
        mask = create_block_mask(dense_of(per_batch_and_head, (2, 3, 70, 100)), 2, 3, 70, 100, BLOCK_SIZE=16)
    part = mask[index]
    assert part.seq_lengths[0] == part.element_mask().shape[2]
    assert torch.equal(part.element_mask(), sliced_dense(mask.element_mask(), index, 16))
    part.check()


def test_slices_of_slices_compose():
    mask = create_block_mask(per_batch_and_head, 2, 3, 128, 128, BLOCK_SIZE=16)
    part = mask[:, 1:, [5, 1, 2, 7]][1, 1, 1:3]
    assert torch.equal(part.element_mask(), mask.element_mask()[1:, 2:, 16:48])


def test_a_batch_taken_from_several_serves_any_batch_count():
    mask = create_block_mask(per_batch_and_head, 2, 2, 64, 64, BLOCK_SIZE=16)
    b = torch.arange(5, dtype=torch.int32)
    for batch, kept in ((0, False), (1, True)):
        pinned = mask[batch, 0].mask_mod(b, b, torch.full_like(b, 3), torch.full_like(b, 30))
        assert pinned.tolist() == [kept] * 5


def test_a_prefix_of_rows_needs_no_new_mask_mod():
    mask = create_block_mask(causal, None, None, 512, 512)
    assert mask[:, :, :2].mask_mod is causal


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ((2,), r"batch index 2 is outside \[-2, 2\)"),
        ((0, 5), "head index 5"),
        ((0, 0, [4, 0]), "only come last"),
        ((0, 0, 0, 0), "at most three"),
        ((0.5,), "must be an integer"),
        ((torch.ones(2, 2),), "vector of integers"),
        ((None,), "must be an integer"),
    ],
    ids=["batch", "head", "ragged-first", "four", "float", "matrix", "none"],
)
def test_a_bad_index_says_which_dimension(index, message):
    mask = create_block_mask(per_batch_and_head, 2, 3, 70, 70, BLOCK_SIZE=16)
    with pytest.raises(MaskError, match=message):
        mask[index]


def test_a_shared_dimension_says_to_leave_it_out():
    with pytest.raises(MaskError, match="leave that dimension out"):
        create_block_mask(causal, None, None, 64, 64)[3]


def test_a_mask_is_no_sequence():
    with pytest.raises(TypeError, match="not iterable"):
        list(create_block_mask(causal, None, None, 64, 64))


def test_a_mask_with_an_index_base_is_not_sliced():
    base = IndexBase(q_base=torch.zeros(4, dtype=torch.int32))
    with pytest.raises(MaskError, match="index_base"):
        create_block_mask(causal, None, None, 64, 64, BLOCK_SIZE=16, index_base=base)[:, :, 1:]


# -- other lengths ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("lengths", [(64, 100), (70, 33), (5, 97), (16, 16), (0, 100)], ids="q{0[0]}-kv{0[1]}".format)
@pytest.mark.parametrize("source", ["mask_mod", "lists", "bits"])
def test_shorter_lengths_keep_the_upper_left_elements(lengths, source):
    if source == "mask_mod":
        mask = create_block_mask(per_batch_and_head, 2, 3, 70, 100, BLOCK_SIZE=16)
    elif source == "lists":
        mask = lists_only(tail=(10, 12))[1]
    else:
        mask = create_block_mask(dense_of(per_batch_and_head, (2, 3, 70, 100)), 2, 3, 70, 100, BLOCK_SIZE=16)
    short = mask.adjust(*lengths)
    assert short.seq_lengths == lengths
    assert torch.equal(short.element_mask(), mask.element_mask()[:, :, : lengths[0], : lengths[1]])
    short.check()


def test_longer_lengths_ask_the_mask_again():
    long = create_block_mask(per_batch_and_head, 2, 3, 64, 64, BLOCK_SIZE=16).adjust(100, 130)
    assert torch.equal(long.element_mask(), dense_of(per_batch_and_head, (2, 3, 100, 130)))


def test_equal_lengths_give_the_mask_itself():
    mask = create_block_mask(causal, None, None, 64, 64)
    assert mask.adjust(64, 64) is mask


@pytest.mark.parametrize(
    "make", [lambda: lists_only()[1], lambda: create_block_mask(torch.eye(64) > 0, None, None, 64, 64)]
)
def test_nothing_is_invented_beyond_lists_and_bits(make):
    with pytest.raises(MaskError, match="nothing is known beyond"):
        make().adjust(1000, 1000)


def is_shared(mask):
    """Batch and head dimensions of all lists are expanded, not stored."""
    tensors = [t for t in (*mask.q_to_kv, *mask.kv_to_q, *(mask.bits or ())[1:]) if t is not None]
    return all(t.stride()[:2] == (0, 0) for t in tensors)


@pytest.mark.parametrize("given", [causal, torch.ones(70, 100).tril() > 0], ids=["mask_mod", "bits"])
def test_lists_shared_by_all_batches_and_heads_are_never_multiplied(given):
    mask = create_block_mask(given, 4, 6, 70, 100, BLOCK_SIZE=16)
    assert is_shared(mask)
    parts = {
        "slice": (mask[1:3, ::2, [3, 0]], mask.element_mask()[1:3, ::2][:, :, [*range(48, 64), *range(16)]]),
        "crop": (mask.adjust(50, 60), mask.element_mask()[:, :, :50, :60]),
        "grow": (mask.adjust(70, 120), dense_of(causal, (4, 6, 70, 120)))
        if given is causal
        else (mask, mask.element_mask()),
        "tensors": (BlockMask.from_kv_blocks(*mask.q_to_kv, 16, mask.mask_mod, (70, 100)), None),
    }
    for name, (part, want) in parts.items():
        assert is_shared(part), name
        assert want is None or torch.equal(part.element_mask(), want), name
        part.check()
    assert is_shared(mask.to("meta"))


# -- moving, copying --------------------------------------------------------------------------------------------------
def holders():
    """mask_mods that hold a tensor in every way that Python offers."""
    table = torch.arange(100)

    def closure(b, h, q, k):
        return table[q] >= k

    def nested(b, h, q, k):
        return closure(b, h, q, k) & helper(q, k)

    def helper(q, k):
        return table[k] <= q

    def default(b, h, q, k, limit=table):
        return limit[q] >= k

    def keyword(b, h, q, k, *, limit=table):
        return limit[q] >= k

    def taking(limit, b, h, q, k):
        return limit["at"][0][q] >= k

    class Owner(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("limit", table)
            self.weights = torch.nn.Parameter(torch.zeros(3))

        def mask(self, b, h, q, k):
            return self.lookup(q) >= k

        def lookup(self, q):
            return self.limit[q]

        def forward(self, b, h, q, k):
            return self.mask(b, h, q, k)

    return {
        "closure": closure,
        "nested": nested,
        "default": default,
        "keyword": keyword,
        "partial": functools.partial(taking, {"at": (table, 0)}),
        "method": Owner().mask,
        "module": Owner(),
        "combined": and_masks(closure, noop_mask),
    }


@pytest.mark.parametrize("name", holders())
def test_the_tensors_of_a_mask_mod_move_along(name):
    mod = holders()[name]
    mask = create_block_mask(mod, None, None, 100, 100)
    moved = mask.to("meta")
    assert moved is not mask
    assert moved.device.type == moved.q_to_kv.full_block_idx.device.type == "meta"
    assert [t.device.type for t in captured_tensors(moved.mask_mod)] == ["meta"]
    assert [t.device.type for t in captured_tensors(mod)] == ["cpu"]
    assert mask.mask_mod is mod
    assert getattr(moved.mask_mod, "__name__", "") == getattr(mod, "__name__", "")


@pytest.mark.parametrize("name", holders())
def test_a_mask_mod_with_other_tensors_computes_with_them(name):
    moved = map_tensors(holders()[name], lambda t: t * 0 if t.dtype == torch.int64 else t)
    q, k = torch.tensor(7), torch.tensor(3)
    assert bool(holders()[name](q, q, q, k))
    assert not bool(moved(q, q, q, k))


def test_moving_nowhere_gives_the_mask_itself():
    mask = create_block_mask(holders()["closure"], None, None, 100, 100)
    assert mask.to("cpu") is mask
    assert mask.to(torch.device("cpu")) is mask


def test_a_function_that_calls_itself_moves():
    table = torch.arange(4)

    def mod(b, h, q, k, depth=1):
        return mod(b, h, q, k, depth - 1) if depth else table[q] >= k

    moved = map_tensors(mod, lambda t: -t)
    assert moved.__closure__[0].cell_contents is moved
    assert not bool(moved(None, None, torch.tensor(2), torch.tensor(1)))
    assert bool(mod(None, None, torch.tensor(2), torch.tensor(1)))


def test_a_bound_method_holds_what_it_reads_and_not_the_whole_model():
    names = [tuple(t.shape) for t in captured_tensors(holders()["method"])]
    assert names == [(100,)]


GLOBAL_TABLE = torch.arange(100)


def reads_a_global(b, h, q, k):
    return GLOBAL_TABLE[q] >= k


def test_a_global_tensor_cannot_move():
    mask = create_block_mask(reads_a_global, None, None, 100, 100)
    assert mask.to("cpu") is mask
    with pytest.raises(MaskError, match="global tensor GLOBAL_TABLE"):
        mask.to("meta")


def test_bits_and_index_base_move():
    dense = torch.rand(64, 64, generator=torch.Generator().manual_seed(0)) > 0.5
    moved = create_block_mask(dense, None, None, 64, 64).to("meta")
    assert {t.device.type for t in moved.bits} == {"meta"}
    base = IndexBase(1, 2, torch.zeros(1, dtype=torch.int32), torch.zeros(2, dtype=torch.int32))
    moved = create_block_mask(causal, None, None, 64, 256, index_base=base).to("meta").index_base
    assert (moved.b_off, moved.h_off, moved.q_base.shape, moved.kv_base.shape) == (1, 2, (1,), (2,))
    assert {moved.q_base.device.type, moved.kv_base.device.type} == {"meta"}


@pytest.mark.parametrize("mod", [causal, and_masks(causal, noop_mask)], ids=["function", "combined"])
def test_pickling_keeps_everything(mod):
    mask = create_block_mask(mod, None, 2, 100, 70, BLOCK_SIZE=16)[:, 1, 2:]
    again = pickle.loads(pickle.dumps(mask))
    assert torch.equal(again.element_mask(), mask.element_mask())
    assert (again.shape, again.block_size) == (mask.shape, mask.block_size)


def test_masks_compare_by_identity():
    one, two = (create_block_mask(causal, None, None, 64, 64) for _ in range(2))
    assert one == one
    assert one != two
    assert len({one, two, one}) == 2


def test_a_tree_map_sees_every_tensor_once():
    mask = create_block_mask(holders()["nested"], None, None, 100, 100)
    leaves, spec = pytree.tree_flatten([mask])
    assert any(t.shape == (100,) for t in leaves)
    assert pytree.tree_unflatten(leaves, spec)[0] is mask
    copied = pytree.tree_map(torch.clone, mask)
    assert torch.equal(copied.element_mask(), mask.element_mask())
    assert not {id(t) for t in pytree.tree_leaves(copied)} & {id(t) for t in leaves}


def test_a_mask_is_read_inside_a_compiled_graph():
    mask = create_block_mask(causal, None, None, 300, 300)

    @functools.partial(torch.compile, backend="eager", fullgraph=True)
    def work(x, mask):
        sparsity.validate_for(mask, 2, 4, 300, 300, x.device)
        return x + mask.q_to_kv.mask_block_cnt.sum() + mask.shape[2] + len(mask.block_size)

    got = work(torch.zeros(1), mask)
    assert int(got) == int(mask.q_to_kv.mask_block_cnt.sum()) + 302


def test_masks_are_built_and_sliced_between_compiled_graphs():
    @functools.partial(torch.compile, backend="eager")
    def work(x, lens):
        mask = create_block_mask(lambda b, h, q, k: k < lens[b], 3, None, 64, 64, BLOCK_SIZE=16)
        return x + mask[1].to_dense().sum()

    assert int(work(torch.zeros(1), torch.tensor([64, 20, 0]))) == 8


def test_a_whole_graph_says_to_build_the_mask_outside():
    def work(x):
        return x + create_block_mask(causal, None, None, 64, 64).to_dense().sum()

    with pytest.raises(torch._dynamo.exc.Unsupported, match="build masks outside compiled code"):
        torch.compile(work, backend="eager", fullgraph=True)(torch.zeros(1))


# -- in attention -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("rows", [slice(1, 3), [3, 0, 2], slice(3, None)], ids=["range", "picked", "ragged"])
@pytest.mark.parametrize("source", ["mask_mod", "bits"])
def test_attention_over_a_slice_is_that_part_of_the_whole(rows, source):
    gen = torch.Generator().manual_seed(5)
    q, k, v = (torch.randn(2, 3, n, 8, dtype=torch.float64, generator=gen) for n in (70, 100, 100))
    given = per_batch_and_head if source == "mask_mod" else dense_of(per_batch_and_head, (2, 3, 70, 100))
    mask = create_block_mask(given, 2, 3, 70, 100, BLOCK_SIZE=16)
    chosen = torch.cat([torch.arange(70)[16 * r : 16 * r + 16] for r in torch.arange(5)[rows]])
    whole = flex_attention(q, k, v, block_mask=mask)
    part = flex_attention(q[1:, :, chosen], k[1:], v[1:], block_mask=mask[1, :, rows])
    torch.testing.assert_close(part, whole[1:, :, chosen])


def test_no_batch_entry_makes_an_empty_mask():
    mask = create_block_mask(lambda b, h, q, kv: kv <= q + b, 2, None, 40, 40, device="cpu", BLOCK_SIZE=16)
    for empty in (mask[2:], mask[[]], create_block_mask(mask.mask_mod, 0, None, 40, 40, device="cpu", BLOCK_SIZE=16)):
        empty.check()
        assert empty.shape == (0, 1, 40, 40)
