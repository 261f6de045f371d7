"""Plans, traces and built masks are reused, and never stale."""

import gc
import time
import weakref

import pytest
import torch

from flexbwd import built_lists, calls, create_block_mask, flex_attention, warmup
from flexbwd.errors import MaskError, OptionError
from flexbwd.reference import attention_reference
from flexbwd.sparsity.tensors import IndexBase
from flexbwd.testing import make_case

WINDOW = 3


def causal(b, h, i, j):
    return i >= j


def scaled(factor):
    def mod(s, b, h, i, j):
        return s * factor

    return mod


def check(case, mod=None, mask_mod=None):
    got = flex_attention(case.query, case.key, case.value, mod, mask_mod=mask_mod)
    want, _ = attention_reference(case.query, case.key, case.value, mod, mask_mod)
    torch.testing.assert_close(got, want)


def test_another_captured_number_gives_another_result():
    case = make_case((20, 20), head_dim=8)
    for factor in (1, 2, 2.0, 0.5, True):
        check(case, scaled(factor))


def test_two_lambdas_on_one_line_are_two_mods():
    case = make_case((20, 20), head_dim=8)
    first, second = (lambda s, b, h, i, j: s + 1 * j), (lambda s, b, h, i, j: s - 1 * j)
    check(case, first)
    check(case, second)


def test_a_changed_default_argument_is_seen():
    case = make_case((20, 20), head_dim=8)

    def mod(s, b, h, i, j, w=1.0):
        return s * w

    check(case, mod)
    mod.__defaults__ = (3.0,)
    check(case, mod)


def test_a_changed_helper_and_global_are_seen(monkeypatch):
    case = make_case((20, 20), head_dim=8)

    def mask(b, h, i, j):
        return i - j < WINDOW

    for width in (3, 7):
        monkeypatch.setitem(globals(), "WINDOW", width)
        check(case, mask_mod=mask)


def test_changed_mask_values_rebuild_the_lists():
    case = make_case((300, 300), head_dim=8)
    ids = torch.zeros(300, dtype=torch.int32)

    def same_document(b, h, i, j):
        return ids[i] == ids[j]

    for cut in (300, 200, 100):
        ids[cut:] = 1
        check(case, mask_mod=same_document)


def test_values_changed_behind_torchs_back_are_seen():
    case = make_case((300, 300), head_dim=8)
    ids = torch.zeros(300, dtype=torch.int64)
    shared = ids.numpy()

    def same_document(b, h, i, j):
        return ids[i] == ids[j]

    for cut in (300, 130):
        shared[cut:] = 1
        check(case, mask_mod=same_document)


def test_another_length_is_another_problem():
    table = torch.randn(4096, dtype=torch.float64)
    for length in (64, 200, 64):
        case = make_case((length, length), head_dim=8)
        check(case, lambda s, b, h, i, j: s + table[i - j + 2048], lambda b, h, i, j: i >= j)


def test_warmup_builds_what_the_call_uses():
    case = make_case((300, 300), head_dim=8)
    mask = lambda b, h, i, j: i >= j  # noqa: E731
    calls.clear_caches()
    warmup(case.query, case.key, case.value, mask_mod=mask)
    built = built_lists.BuiltLists.find_or_build
    seen = []

    def spy(self, *args):
        before = [v for entries in self._table.values() for v in entries]
        seen.append((built(self, *args), before))
        return seen[-1][0]

    built_lists.BuiltLists.find_or_build = spy
    try:
        flex_attention(case.query, case.key, case.value, mask_mod=mask)
    finally:
        built_lists.BuiltLists.find_or_build = built
    lists, before = seen[0]
    assert any(lists is kept.lists for kept in before)


def test_a_second_call_costs_little_host_time():
    q, k, v = (torch.randn(1, 2, 16, 8) for _ in range(3))
    ids = torch.zeros(16, dtype=torch.int32)
    slopes = torch.rand(2)

    def mod(s, b, h, i, j):
        return 20 * torch.tanh((s - slopes[h] * (i - j)) / 20)

    def mask(b, h, i, j):
        return (i >= j) & (ids[i] == ids[j])

    planned = []
    for _ in range(200):
        start = time.perf_counter()
        warmup(q, k, v, score_mod=mod, mask_mod=mask)
        planned.append(time.perf_counter() - start)
    assert sorted(planned)[len(planned) // 4] < 200e-6


def test_mask_values_behind_a_kept_block_mask_are_read_anew():
    import flexbwd

    case = make_case((100, 100), head_dim=8)
    ids = torch.zeros(100, dtype=torch.int64)
    shared = ids.numpy()

    def same_document(b, h, i, j):
        return (i >= j) & (ids[i] == ids[j])

    mask = flexbwd.create_block_mask(same_document, None, None, 100, 100)
    for cut in (100, 30):
        shared[cut:] = 1
        got = flex_attention(case.query, case.key, case.value, block_mask=mask)
        want, _ = attention_reference(case.query, case.key, case.value, None, same_document)
        torch.testing.assert_close(got, want)


def test_nothing_of_the_users_is_kept_alive():
    q = torch.randn(1, 2, 64, 8)

    def biased(table):
        return lambda s, b, h, i, j: s + table[h, i, j]

    gone = []
    for step in range(12):
        table = torch.randn(2, 64, 64, requires_grad=True)
        mask = create_block_mask(lambda b, h, i, j, shift=step: i >= j - shift, None, None, 64, 64)
        gone += [weakref.ref(table), weakref.ref(mask)]
        flex_attention(q, q, q, biased(table), block_mask=mask).sum().backward()
    del table, mask
    gc.collect()
    assert not any(r() for r in gone)


def test_a_block_mask_changed_between_calls_is_seen():
    q = torch.randn(1, 2, 200, 8)
    mask = create_block_mask(causal, None, None, 200, 200)
    before = flex_attention(q, q, q, block_mask=mask)
    mask.index_base = IndexBase(q_base=torch.tensor([40, 40], dtype=torch.int32))
    want, _ = attention_reference(q, q, q, mask_mod=causal, block_mask=mask, index_base=mask.index_base)
    after = flex_attention(q, q, q, block_mask=mask)
    torch.testing.assert_close(after, want)
    assert not torch.equal(after, before)
    mask.index_base, mask.seq_lengths = None, (190, 200)
    with pytest.raises(MaskError, match="190"):
        flex_attention(q, q, q, block_mask=mask)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_torch_sees_lists_written_to_between_calls():
    q = torch.randn(1, 2, 200, 8)
    mask = create_block_mask(causal, None, None, 200, 200)
    assert flex_attention(q, q, q, block_mask=mask, backend="torch").any()
    mask.q_to_kv.mask_block_cnt.zero_()
    mask.q_to_kv.full_block_cnt.zero_()
    assert not flex_attention(q, q, q, block_mask=mask, backend="torch").any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_another_default_device_changes_nothing(dtype):
    q = torch.randn(1, 2, 200, 8, dtype=dtype, requires_grad=True)
    ids = torch.arange(200) // 50
    dense = torch.rand(200, 200) < 0.5

    def mask(b, h, i, j):
        return (ids[i] == ids[j]) & (i >= j)

    def run():
        out = flex_attention(q, q, q, lambda s, b, h, i, j: 5 * torch.tanh(s / 5), mask_mod=mask)
        return out, *torch.autograd.grad(out.sum(), q), flex_attention(q, q, q, mask_mod=dense)

    want = run()
    with torch.device("meta"):
        got = run()
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)


def test_meta_tensors_have_a_shape():
    q = torch.empty(1, 2, 64, 16, device="meta")
    for _ in range(2):
        assert flex_attention(q, q, q).shape == q.shape
    warmup(q, q, q)


@pytest.mark.parametrize(
    "option",
    [{"deterministic": []}, {"deterministic": 1}, {"scale": [1]}, {"scale": 10**400}, {"scale": True},
     {"precision": []}, {"backend": {}}, {"enable_gqa": 1}, {"kernel_options": {1: 2, "a": 3}}],
    ids=str,
)  # fmt: skip
def test_a_wrong_option_is_refused_after_a_right_one_too(option):
    q = torch.randn(1, 2, 16, 8)
    for right in ({}, {"deterministic": True}, {"scale": 1.0}, {"enable_gqa": True}):
        flex_attention(q, q, q, **right)
    with pytest.raises(OptionError):
        flex_attention(q, q, q, **option)
