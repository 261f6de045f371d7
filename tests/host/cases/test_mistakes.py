"""Known failures 15, 16, 17: masks used where they do not fit, stale caches, and mods that cannot be compiled."""

from __future__ import annotations

import random

import pytest
import torch

from flexbwd import BlockMask, and_masks, create_block_mask, errors, flex_attention
from flexbwd.sparsity import IndexBase
from flexbwd.testing import assert_matches_reference, attention_grads, make_case
from tests.host.cases.oracle import causal, check, param

OFFSET = 3
TABLE = torch.arange(64.0)


def call(score_mod=None, lengths=(40, 40), heads=2, batch=1, **options):
    case = make_case(lengths, heads=heads, head_dim=16, batch=batch, dtype=torch.float32)
    return flex_attention(case.query, case.key, case.value, score_mod, **options)


def one_line(error, *words):
    text = str(error)
    assert "\n" not in text
    assert len(text) < 500, text
    for word in words:
        assert word in text, text


# -- 15: masks used where they do not fit ------------------------------------------------------------------------------
LENS = torch.tensor([30, 40])


def reads_batch(b, h, i, j):
    return j < LENS[b]


def reads_head(b, h, i, j):
    return i >= j + h


MISFITS = {
    "made for 4096, used at 1024": (
        lambda: create_block_mask(causal, None, None, 4096, 4096),
        {"lengths": (1024, 1024)},
        ("(4096, 4096)", "(1024, 1024)", "adjust"),
    ),
    "made for 1024, used at 4096": (
        lambda: create_block_mask(causal, None, None, 64, 64),
        {"lengths": (128, 128)},
        ("(64, 64)", "(128, 128)", "create_block_mask"),
    ),
    "same blocks, other length": (
        lambda: create_block_mask(causal, None, None, 128, 128),
        {"lengths": (100, 128)},
        ("(128, 128)", "(100, 128)"),
    ),
    "H=2 with 4 heads": (
        lambda: create_block_mask(causal, None, 2, 40, 40),
        {"heads": 4},
        ("H=2", "4", "H=None"),
    ),
    "H of key heads": (
        lambda: create_block_mask(causal, None, 2, 40, 40),
        {"heads": (4, 2)},
        ("H=2", "query heads"),
    ),
    "B=2 with batch 3": (
        lambda: create_block_mask(reads_batch, 2, None, 40, 40),
        {"batch": 3},
        ("B=2", "3"),
    ),
    "H=1 that reads h": (
        lambda: create_block_mask(reads_head, None, 1, 40, 40),
        {"heads": 4},
        ("reads `h`", "4"),
    ),
    "one batch entry of several": (
        lambda: create_block_mask(reads_batch, 1, None, 40, 40),
        {"batch": 2},
        ("reads `b`", "B=2"),
    ),
}


@pytest.mark.parametrize("kind", MISFITS)
@pytest.mark.parametrize("torchs", [False, True], ids=["ours", "torch's"])
def test_a_block_mask_that_does_not_fit_is_refused_with_a_remedy(kind, torchs):
    make, use, words = MISFITS[kind]
    mask = make().to_torch() if torchs else make()
    with pytest.raises(errors.MaskError) as caught:
        call(block_mask=mask, **use)
    one_line(caught.value, *words)


@pytest.mark.parametrize("kind", ["made for 1024, used at 4096", "made for 4096, used at 1024", "H=2 with 4 heads"])
@pytest.mark.parametrize("torchs", [False, True], ids=["ours", "torch's"])
@pytest.mark.parametrize("fullgraph", [False, True], ids=["breaks allowed", "fullgraph"])
def test_a_block_mask_that_does_not_fit_is_refused_when_compiled(kind, torchs, fullgraph):
    """Its lists would name blocks outside the tensors. Under fullgraph Dynamo wraps the error and names it."""
    make, use, _ = MISFITS[kind]
    mask = make().to_torch() if torchs else make()
    torch._dynamo.reset()
    case = make_case(use.get("lengths", (40, 40)), use.get("heads", 2), 16, torch.float32)
    run = torch.compile(lambda q, k, v: flex_attention(q, k, v, block_mask=mask), fullgraph=fullgraph, backend="eager")
    with pytest.raises(torch._dynamo.exc.Unsupported if fullgraph else errors.MaskError, match=r"MaskError|made for"):
        run(case.query, case.key, case.value)


@pytest.mark.parametrize(("mask_mod", "letter"), [(reads_batch, "b"), (reads_head, "h")])
@pytest.mark.parametrize("joined", [False, True], ids=["alone", "joined"])
def test_a_mask_that_reads_b_or_h_needs_the_size(mask_mod, letter, joined):
    mod = and_masks(causal, mask_mod) if joined else mask_mod
    with pytest.raises(errors.MaskError) as caught:
        create_block_mask(mod, None, None, 40, 40)
    one_line(caught.value, letter.upper(), "None")


def test_torchs_mask_without_b_that_reads_b_is_refused():
    from torch.nn.attention.flex_attention import create_block_mask as torch_block_mask

    lens = torch.tensor([30, 20])
    mask = torch_block_mask(lambda b, h, i, j: j < lens[b], None, None, 40, 40, device="cpu")
    with pytest.raises(errors.MaskError) as caught:
        call(block_mask=mask, batch=2)
    one_line(caught.value, "b")


def test_a_mask_of_global_coordinates_is_never_used_at_others():
    """Its lists were built where its index_base says: the call looks there too, or is refused."""
    base = IndexBase(q_base=torch.full((1,), 20, dtype=torch.int32))
    mask = create_block_mask(causal, None, None, 40, 40, index_base=base)
    there = call(block_mask=mask, index_base=base)
    assert torch.equal(call(block_mask=mask), there)
    assert torch.equal(call(mask_mod=lambda b, h, i, j: i + 20 >= j), there)
    with pytest.raises(errors.MaskError) as caught:
        call(block_mask=mask, index_base=IndexBase(q_base=torch.full((1,), 256, dtype=torch.int32)))
    one_line(caught.value, "index_base")
    with pytest.raises(errors.MaskError) as caught:
        call(block_mask=create_block_mask(causal, None, None, 40, 40), index_base=base)
    one_line(caught.value, "index_base")


def test_two_different_masks_are_not_silently_reduced_to_one():
    with pytest.raises(errors.MaskError, match="and_masks"):
        call(block_mask=create_block_mask(causal, None, None, 40, 40), mask_mod=lambda b, h, i, j: i > j)


# -- 16: nothing is stale ----------------------------------------------------------------------------------------------
def scaled_by(x):
    return lambda s, b, h, i, j: s * x + j * 0.01


def helper(i, j):
    return (i - j) * 0.1


class Settings:
    slope = 0.1


def default_argument(x):
    def mod(s, b, h, i, j, slope=x):
        return s + slope * (i - j)

    return mod


def keyword_default(x):
    def mod(s, b, h, i, j, *, slope=x):
        return s + slope * (i - j)

    return mod


def list_entry(x):
    settings = [x]
    return lambda s, b, h, i, j: s + settings[0] * (i - j)


def dict_entry(x):
    settings = {"slope": x}
    return lambda s, b, h, i, j: s + settings["slope"] * (i - j)


def nested_function(x):
    def slope(i, j):
        return x * (i - j)

    return lambda s, b, h, i, j: s + slope(i, j)


def partial_argument(x):
    import functools

    def mod(slope, s, b, h, i, j):
        return s + slope * (i - j)

    return functools.partial(mod, x)


def branch(x):
    def mod(s, b, h, i, j):
        return s + 0.1 * (i - j) if x > 1 else s - 0.1 * (i - j)

    return mod


FACTORIES = [
    scaled_by,
    default_argument,
    keyword_default,
    list_entry,
    dict_entry,
    nested_function,
    partial_argument,
    branch,
]


@pytest.mark.parametrize("factory", FACTORIES, ids=lambda f: f.__name__)
def test_the_same_code_with_another_number_is_another_mod(factory):
    case = make_case((40, 50), heads=2, head_dim=16)
    for x in (1, 2, 2.0, 0.5, -0.0, True, float(torch.tensor(0.3))):
        check(case, factory(x), captures={})


@pytest.mark.parametrize("change", ["closure cell", "list", "attribute", "class attribute", "global", "helper"])
def test_one_function_whose_surroundings_change_is_traced_again(change, monkeypatch):
    case, x, settings, local = make_case((40, 50), heads=2, head_dim=16), 0.1, [0.1], Settings()

    def mod(s, b, h, i, j):
        parts = {
            "closure cell": lambda: x * (i - j),
            "list": lambda: settings[0] * (i - j),
            "attribute": lambda: local.slope * (i - j),
            "class attribute": lambda: Settings.slope * (i - j),
            "global": lambda: OFFSET * (i - j),
            "helper": lambda: helper(i, j),
        }
        return s + parts[change]()

    check(case, mod, captures={})
    x = settings[0] = local.slope = -0.7
    monkeypatch.setattr(Settings, "slope", 0.9)
    monkeypatch.setitem(globals(), "OFFSET", 0.25)
    monkeypatch.setitem(globals(), "helper", lambda i, j: (i + j) * 0.3)
    check(case, mod, captures={})


def test_closures_on_one_line_are_told_apart():
    case = make_case((40, 40), heads=2, head_dim=16)
    a, b = (lambda s, b, h, i, j: s + 0.1 * j), (lambda s, b, h, i, j: s - 0.1 * j)
    c, d = [lambda s, b, h, i, j, n=n: s * n for n in (2.0, 3.0)]
    e, f = [lambda s, b, h, i, j, m=m: s + m[i - j + 40] for m in (param(80, seed=1), param(80, seed=2))]
    for mod in (a, b, c, d, a, e, f, e):
        check(case, mod, captures={}, torch_too=False)
    masks = (lambda b, h, i, j: i >= j), (lambda b, h, i, j: i <= j)
    for mask_mod in (*masks, masks[0]):
        check(case, mask_mod=mask_mod)


def table_reader(table):
    return lambda s, b, h, i, j: s + table[h + 1] * 0.1


def test_a_captured_tensor_of_another_dtype_or_shape_is_another_mod():
    case = make_case((40, 50), heads=2, head_dim=16)
    for table in (torch.arange(4), torch.arange(4.0), torch.arange(4.0).double(), torch.ones(9), torch.ones(4) > 0,
                  torch.arange(4, dtype=torch.int16), torch.ones(1, 2).expand(4, 2)[:, 0]):  # fmt: skip
        check(case, table_reader(table), captures={}, torch_too=False)


def test_equal_mods_do_not_trace_again(monkeypatch):
    """Only what changed is traced: a fresh closure of the same code and constants is found."""
    from flexbwd.modgraph import frontend

    case, count = make_case((40, 40), heads=2, head_dim=16), []
    once = frontend.trace_once
    monkeypatch.setattr(frontend, "trace_once", lambda *a, **o: count.append(1) or once(*a, **o))
    seen = []
    for n in range(4):
        mod = (lambda t: lambda s, b, h, i, j: s * 0.77 + t[h])(torch.full((2,), float(n)))
        flex_attention(case.query, case.key, case.value, mod)
        seen.append(len(count))
    assert seen == [seen[0]] * 4
    assert seen[0] > 0


# -- 17: mods that cannot be compiled ----------------------------------------------------------------------------------
def branches_on_index(s, b, h, i, j):
    if i > j:
        return s
    return s * 2


def uses_and(s, b, h, i, j):
    return torch.where(i > j and j > 2, s, s * 2)


def uses_not(s, b, h, i, j):
    return torch.where(not (i > j), s, s * 2)


def chained_comparison(s, b, h, i, j):
    return torch.where(0 < i - j < 3, s, s * 2)


def takes_item(s, b, h, i, j):
    return s + i.item()


def takes_float(s, b, h, i, j):
    return s + float(j)


def ranges_over_index(s, b, h, i, j):
    return sum((s for _ in range(i)), s)


def python_max(s, b, h, i, j):
    return s * max(i, j)


def unknown_op(s, b, h, i, j):
    return torch.special.bessel_j0(s)


def sorts(s, b, h, i, j):
    return s + TABLE.sort()[0][i] + torch.sort(TABLE * i)[0][0]


def dropout(s, b, h, i, j):
    return torch.nn.functional.dropout(s, 0.1)


def random_tensor(s, b, h, i, j):
    return s + torch.rand(())


def python_random(s, b, h, i, j):
    return s + random.random()


def whole_row(s, b, h, i, j):
    return s + TABLE * i


def bool_score(s, b, h, i, j):
    return i >= j


def no_result(s, b, h, i, j):
    s * 2


def in_place(s, b, h, i, j):
    s += 1
    return s.mul_(2)


def four_arguments(s, b, h, i):
    return s


SCORE_MISTAKES = {
    branches_on_index: (errors.ModDataDependentError, "torch.where"),
    uses_and: (errors.ModDataDependentError, "&"),
    uses_not: (errors.ModDataDependentError, "~"),
    chained_comparison: (errors.ModDataDependentError, "&"),
    takes_item: (errors.ModDataDependentError, "item"),
    takes_float: (errors.ModDataDependentError, "float"),
    ranges_over_index: (errors.ModDataDependentError, "range"),
    python_max: (errors.ModDataDependentError, "torch"),
    unknown_op: (errors.ModUnsupportedOpError, "bessel_j0"),
    sorts: (errors.ModShapeError, "sort"),
    dropout: (errors.ModRandomError, "dropout"),
    random_tensor: (errors.ModRandomError, "rand"),
    python_random: (errors.ModRandomError, "random"),
    whole_row: (errors.ModShapeError, "scalar"),
    bool_score: (errors.ModDtypeError, "bool"),
    no_result: (errors.ModSignatureError, "None"),
    in_place: (errors.ModMutationError, "in place"),
    four_arguments: (errors.ModSignatureError, "kv_idx"),
}


@pytest.mark.parametrize("mod", SCORE_MISTAKES, ids=lambda m: m.__name__)
def test_a_score_mod_that_cannot_be_compiled_gets_one_line(mod):
    kind, word = SCORE_MISTAKES[mod]
    with pytest.raises(errors.ModError) as caught:
        call(mod)
    assert type(caught.value) is kind
    one_line(caught.value, mod.__name__, "test_mistakes.py:", word)
    assert caught.value.remedy


def as_one_block(mask_mod):
    one = torch.ones(1, 1, 1, dtype=torch.int32)
    return BlockMask.from_kv_blocks(one, one[..., None] * 0, mask_mod=mask_mod, seq_lengths=(40, 40))


USES = {
    "mask_mod=": lambda mod: call(mask_mod=mod),
    "create_block_mask": lambda mod: create_block_mask(mod, None, None, 40, 40),
    "from_kv_blocks": lambda mod: call(block_mask=as_one_block(mod)),
}


@pytest.mark.parametrize(
    ("mask_mod", "kind", "word"),
    [
        (lambda b, h, i, j: i - j, errors.ModDtypeError, "!= 0"),
        (lambda b, h, i, j: (i >= j).int(), errors.ModDtypeError, "!= 0"),
        (lambda b, h, i, j: True, errors.ModDtypeError, "bool"),
        (lambda b, h, i, j: 1, errors.ModDtypeError, "int"),
        (lambda b, h, i, j: (i - j).float(), errors.ModDtypeError, "float"),
        (lambda b, h, i: i >= 0, errors.ModSignatureError, "kv_idx"),
        (lambda b, h, i, j: torch.rand(()) > 0.5, errors.ModRandomError, "rand"),
        (lambda b, h, i, j: None, errors.ModError, "None"),
        (lambda b, h, i, j: undefined_name > i, errors.ModTraceError, "undefined_name"),  # noqa: F821
    ],
    ids=["int", "int tensor", "Python bool", "Python int", "float", "arity", "random", "None", "NameError"],
)
@pytest.mark.parametrize("where", USES)
def test_a_mask_mod_that_is_none_gets_one_line(mask_mod, kind, word, where):
    with pytest.raises(errors.FlexError) as caught:
        USES[where](mask_mod)
    assert isinstance(caught.value, kind), caught.value
    one_line(caught.value, word, "test_mistakes.py:")


@pytest.mark.parametrize("given", USES)
def test_a_mask_with_python_control_flow_is_tabulated(given):
    """What a score_mod may not do a mask_mod may: it is evaluated once per element, outside the call."""

    def odd(b, h, i, j):
        if i > 20 and j % 3 == 0:
            return int(i) % 2 == 0
        return i >= j

    case = make_case((40, 40), heads=2, head_dim=16)
    keep = torch.tensor([[bool(odd(0, 0, i, j)) for j in range(40)] for i in range(40)])
    make = {
        "mask_mod=": lambda: {"mask_mod": odd},
        "create_block_mask": lambda: {"block_mask": create_block_mask(odd, None, None, 40, 40, BLOCK_SIZE=16)},
        "from_kv_blocks": lambda: {"block_mask": as_one_block(odd)},
    }
    assert_matches_reference(case, attention_grads(case, **make[given]()), mask_mod=keep)


@pytest.mark.parametrize("option", [{"dropout_p": 0.1}, {"attn_mask": None}, {"is_causal": True}])
def test_options_of_sdpa_are_refused(option):
    with pytest.raises(TypeError, match=next(iter(option))):
        call(**option)
