"""Every mistake in a mod is one line of ours: the mod, the user's line, the operation and what to write instead."""

from __future__ import annotations

import math
import random
import re

import pytest
import torch
from torch import nn

from flexbwd import errors
from flexbwd.modgraph.frontend import ModKind, trace, warn_narrowing

H, S = 4, 16
TABLE = torch.arange(H * S, dtype=torch.float32).reshape(H, S)
FLAGS = torch.ones(H, S, dtype=torch.bool)
WEIGHT = nn.Parameter(torch.ones(H))
COUNTER = [0]


def fails(mod, kind, error, *words, device="cpu"):
    """`mod` raises exactly `error`, on one line that has a remedy and all `words`."""
    with pytest.raises(errors.ModError) as caught:
        trace(mod, kind, device=device)
    found = caught.value
    assert type(found) is error, found
    assert "\n" not in str(found)
    for word in words:
        assert word in str(found)
    return found


# -- control flow -----------------------------------------------------------------------------------------------------
def branch(score, b, h, q_idx, kv_idx):
    if q_idx >= kv_idx:
        return score
    return -score


def both(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx and q_idx < 4


def either(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx or kv_idx < 4


def negated(b, h, q_idx, kv_idx):
    return not (q_idx < kv_idx)


def item(score, b, h, q_idx, kv_idx):
    return score * h.item()


def integer(score, b, h, q_idx, kv_idx):
    return score + int(q_idx)


def sine(score, b, h, q_idx, kv_idx):
    return score * math.sin(q_idx)


def ranged(score, b, h, q_idx, kv_idx):
    for _ in range(h):
        score = score * 2
    return score


def sliced(score, b, h, q_idx, kv_idx):
    return score + TABLE[h, q_idx : q_idx + 3].sum()


def captured_number(score, b, h, q_idx, kv_idx):
    return score * float(TABLE[0, 1])


def compared(score, b, h, q_idx, kv_idx):
    return score * torch.equal(q_idx, kv_idx)


def listed(score, b, h, q_idx, kv_idx):
    return score * q_idx.tolist()


def bool_index(score, b, h, q_idx, kv_idx):
    return score + TABLE[h, q_idx > kv_idx]


def chained(b, h, q_idx, kv_idx):
    return 0 <= q_idx - kv_idx < 4


DATA_DEPENDENT = [branch, item, integer, sine, ranged, sliced, compared, listed, bool_index]


@pytest.mark.parametrize("mod", DATA_DEPENDENT, ids=lambda m: m.__name__)
def test_a_python_value_of_an_index_is_refused(mod):
    found = fails(mod, ModKind.SCORE, errors.ModDataDependentError, mod.__name__, "torch.where")
    assert re.fullmatch(r"test_front_errors\.py:\d+", found.where)
    assert found.op


def test_the_value_of_a_captured_tensor_is_refused():
    fails(captured_number, ModKind.SCORE, errors.ModDataDependentError, "may be another at the next call", "number")
    fails(
        lambda s, b, h, q, k: s if torch.equal(TABLE, TABLE) else -s,
        ModKind.SCORE,
        errors.ModDataDependentError,
        "torch.equal",
    )


@pytest.mark.parametrize("mod", [both, either, negated, chained], ids=lambda m: m.__name__)
def test_python_logic_on_an_index_is_refused(mod):
    found = fails(mod, ModKind.MASK, errors.ModDataDependentError, "& | ~")
    line = int(found.where.split(":")[1])
    assert line == mod.__code__.co_firstlineno + 1


# -- operators, shapes ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("op", "mod"),
    [
        ("sort", lambda s, b, h, q, k: torch.sort(s)[0]),
        ("cumsum", lambda s, b, h, q, k: torch.cumsum(s, 0)),
        ("atan2", lambda s, b, h, q, k: torch.atan2(s, q.float())),
        ("lgamma", lambda s, b, h, q, k: torch.lgamma(s)),
        ("bucketize", lambda s, b, h, q, k: s + torch.bucketize(q, TABLE[0])),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_an_unknown_operator_is_named(op, mod):
    found = fails(mod, ModKind.SCORE, errors.ModUnsupportedOpError, op, "test_front_errors.py:")
    assert found.op == op
    assert "capture" in found.remedy


@pytest.mark.parametrize(
    "mod",
    [
        lambda s, b, h, q, k: s + TABLE[h],
        lambda s, b, h, q, k: s + TABLE[h].sum(),
        lambda s, b, h, q, k: s + TABLE[h] @ TABLE[b],
        lambda s, b, h, q, k: s + torch.softmax(TABLE[h], 0)[q],
        lambda s, b, h, q, k: s + torch.stack([q, k]).amax(),
        lambda s, b, h, q, k: s + TABLE[h].cumsum(0)[q],
        lambda s, b, h, q, k: s[None],
        lambda s, b, h, q, k: s + torch.nonzero(FLAGS)[h, 0],
    ],
    ids=["row", "sum", "dot", "softmax", "stack", "cumsum", "one element", "nonzero"],
)
def test_a_vector_that_depends_on_an_index_is_refused(mod):
    fails(mod, ModKind.SCORE, errors.ModShapeError, "capture")


@pytest.mark.parametrize(
    "mod", [lambda s, b, h, q, k: s + TABLE[7, q], lambda s, b, h, q, k: s + TABLE[-5][q]], ids=["above", "below"]
)
def test_a_constant_index_outside_is_refused(mod):
    fails(mod, ModKind.SCORE, errors.ModBoundsError, "test_front_errors.py:")


# -- mutation, randomness ---------------------------------------------------------------------------------------------
def adds_in_place(score, b, h, q_idx, kv_idx):
    score += 1
    return score


def method_in_place(score, b, h, q_idx, kv_idx):
    return score.mul_(2)


def writes_capture(score, b, h, q_idx, kv_idx):
    TABLE[h, q_idx] = score
    return score


def writes_capture_constant(score, b, h, q_idx, kv_idx):
    TABLE[0] = 1.0
    return score


def fills_leaf(score, b, h, q_idx, kv_idx):
    WEIGHT.zero_()
    return score


def out_argument(score, b, h, q_idx, kv_idx):
    return torch.add(score, 1, out=TABLE)


def activation_in_place(score, b, h, q_idx, kv_idx):
    return nn.functional.relu_(score)


MUTATIONS = [
    adds_in_place, method_in_place, writes_capture, writes_capture_constant, fills_leaf, out_argument,
    activation_in_place,
]  # fmt: skip


@pytest.mark.parametrize("mod", MUTATIONS, ids=lambda m: m.__name__)
def test_mutation_is_refused_and_changes_nothing(mod):
    before = TABLE.clone()
    found = fails(mod, ModKind.SCORE, errors.ModMutationError, "in place", "functional")
    assert int(found.where.split(":")[1]) == mod.__code__.co_firstlineno + 1
    assert torch.equal(TABLE, before)
    assert torch.equal(WEIGHT, torch.ones(H))


def counts(score, b, h, q_idx, kv_idx):
    COUNTER[0] += 1
    return score * COUNTER[0]


@pytest.mark.parametrize(
    "mod",
    [
        lambda s, b, h, q, k: s + torch.rand(()),
        lambda s, b, h, q, k: s + torch.randn_like(s),
        lambda s, b, h, q, k: s + torch.rand(S)[q],
        lambda s, b, h, q, k: nn.functional.dropout(s, 0.5),
        lambda s, b, h, q, k: torch.where(torch.bernoulli(s) > 0, s, 0),
        lambda s, b, h, q, k: s * random.random(),
        counts,
    ],
    ids=["rand", "randn_like", "rand table", "dropout", "bernoulli", "python random", "counter"],
)
def test_randomness_is_refused(mod):
    fails(mod, ModKind.SCORE, errors.ModRandomError, "capture")


# -- signature and result ---------------------------------------------------------------------------------------------
def keyword_only(score, b, h, q_idx, kv_idx, *, window):
    return score * window


@pytest.mark.parametrize(
    ("kind", "mod"),
    [
        (ModKind.SCORE, lambda s, b, h, q: s),
        (ModKind.SCORE, lambda s, b, h, q, k, extra: s),
        (ModKind.MASK, lambda s, b, h, q, k: q >= k),
        (ModKind.SCORE_BWD, lambda s, b, h, q, k: s),
        (ModKind.SCORE, keyword_only),
    ],
    ids=["four", "six", "mask as score", "backward without grad", "keyword only"],
)
def test_wrong_arity_shows_the_expected_signature(kind, mod):
    fails(mod, kind, errors.ModSignatureError, f"({', '.join(kind.arguments)})", kind.value)


@pytest.mark.parametrize(
    ("result", "mod"),
    [
        ("None", lambda s, b, h, q, k: None),
        ("tuple", lambda s, b, h, q, k: (s, s)),
        ("float", lambda s, b, h, q, k: 1.0),
        ("list", lambda s, b, h, q, k: [s]),
        ("generator", lambda s, b, h, q, k: (yield s)),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_another_result_than_a_tensor_is_refused(result, mod):
    fails(mod, ModKind.SCORE, errors.ModSignatureError, result)


def test_a_mod_that_is_no_callable_is_refused():
    fails(3, ModKind.SCORE, errors.ModSignatureError, "int")


# -- dtypes -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("word", "mod"),
    [
        ("bool True", lambda b, h, q, k: True),
        ("int 1", lambda b, h, q, k: 1),
        ("torch.int32", lambda b, h, q, k: q - k),
        ("torch.float32", lambda b, h, q, k: TABLE[h, q]),
        ("torch.int64", lambda b, h, q, k: (q >= k).long()),
    ],
    ids=["True", "1", "int tensor", "float tensor", "long"],
)
def test_a_mask_must_be_bool(word, mod):
    fails(mod, ModKind.MASK, errors.ModDtypeError, word)


@pytest.mark.parametrize(
    ("word", "mod"),
    [
        ("mask_mod", lambda s, b, h, q, k: q >= k),
        ("mask_mod", lambda s, b, h, q, k: FLAGS[h, q]),
        ("int8", lambda s, b, h, q, k: s + (FLAGS.to(torch.int8)[h, q] + 3)),
        ("uint8", lambda s, b, h, q, k: s + (TABLE.byte()[h, q] * 2)),
        ("complex", lambda s, b, h, q, k: s + torch.view_as_complex(TABLE.reshape(-1, 2))[q].abs()),
        ("int32", lambda s, b, h, q, k: s + (q + 2**40)),
    ],
    ids=["comparison", "bool table", "int8 sum", "uint8 product", "complex", "number beyond int32"],
)
def test_dtypes_without_meaning_in_a_score_are_refused(word, mod):
    fails(mod, ModKind.SCORE, errors.ModDtypeError, word)


def test_float64_values_under_fp32_warn_once_asked():
    slopes = torch.ones(H, dtype=torch.float64)
    traced, _ = trace(lambda s, b, h, q, k: s * slopes[h], ModKind.SCORE, device="cpu")
    with pytest.warns(errors.ModDtypeWarning, match="slopes"):
        warn_narrowing(traced, torch.float32)
    warn_narrowing(traced, torch.float64)
    converted, _ = trace(lambda s, b, h, q, k: s * q.double(), ModKind.SCORE, device="cpu")
    with pytest.warns(errors.ModDtypeWarning, match="test_front_errors"):
        warn_narrowing(converted, torch.bfloat16)
    cast, _ = trace(lambda s, b, h, q, k: s * slopes.float()[h], ModKind.SCORE, device="cpu")
    warn_narrowing(cast, torch.float32)


# -- captures ---------------------------------------------------------------------------------------------------------
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    ("word", "make"),
    [
        ("sparse", lambda: TABLE.to_sparse()),
        ("sparse", lambda: TABLE.to_sparse_csr()),
        ("nested", lambda: torch.nested.nested_tensor([torch.ones(S)] * H)),
        ("nested", lambda: torch.nested.nested_tensor([torch.ones(S)] * H, layout=torch.jagged)),
        ("meta", lambda: TABLE.to("meta")),
    ],
    ids=["coo", "csr", "nested", "jagged", "meta"],
)
def test_captures_without_plain_storage_are_refused(word, make):
    captured = make()
    fails(lambda s, b, h, q, k: s + captured[h, q], ModKind.SCORE, errors.ModCaptureError, word)


def test_a_capture_on_another_device_is_refused():
    fails(lambda s, b, h, q, k: s + TABLE[h, q], ModKind.SCORE, errors.ModCaptureError, "cuda", ".to(", device="cuda")
    zero_dim = torch.tensor(2.0)
    traced, _ = trace(lambda s, b, h, q, k: s * zero_dim, ModKind.SCORE, device="cuda")
    assert traced.captures[0].name == "zero_dim"


def test_a_mask_has_no_gradient_for_its_captures():
    span = nn.Parameter(torch.ones(H))
    fails(lambda b, h, q, k: q - k < span[h], ModKind.MASK, errors.ModCaptureError, "span", "detach")
    fails(lambda b, h, q, k: q - k < span.exp()[h], ModKind.MASK, errors.ModCaptureError, "span", "detach")
    trace(lambda b, h, q, k: q - k < span.detach()[h], ModKind.MASK, device="cpu")

    def quiet(b, h, q_idx, kv_idx):
        with torch.no_grad():
            return q_idx - kv_idx < span[h] * 2

    trace(quiet, ModKind.MASK, device="cpu")


# -- the user's own errors --------------------------------------------------------------------------------------------
def helper_that_fails(x):
    raise KeyError("no such head")


def test_an_error_in_the_mod_is_chained_with_its_line():
    def broken(score, b, h, q_idx, kv_idx):
        return helper_that_fails(score)

    found = fails(broken, ModKind.SCORE, errors.ModTraceError, "KeyError", "no such head")
    assert isinstance(found.__cause__, KeyError)
    assert int(found.where.split(":")[1]) == helper_that_fails.__code__.co_firstlineno + 1


@pytest.mark.parametrize(
    "mod",
    [
        lambda s, b, h, q, k: s + missing_name,  # noqa: F821
        lambda s, b, h, q, k: s + torch.no_such_function(q),
        lambda s, b, h, q, k: s + TABLE.take(q),
        lambda s, b, h, q, k: s + TABLE[h, q, k],
    ],
    ids=["NameError", "AttributeError", "int32 take", "rank"],
)
def test_torchs_own_complaints_are_one_line_and_not_logged(mod, caplog, capfd):
    with pytest.raises(errors.ModError) as caught:
        trace(mod, ModKind.SCORE, device="cpu")
    assert "\n" not in str(caught.value)
    assert caught.value.where.startswith("test_front_errors.py:")
    assert not caplog.records
    assert capfd.readouterr().err == ""
