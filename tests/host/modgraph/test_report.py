"""check_mod passes right mods, finds wrong backwards, and says where they differ."""

from __future__ import annotations

import math

import pytest
import torch

from flexbwd.errors import ModBoundsError, ModUnsupportedOpError, OptionError
from flexbwd.modgraph import report as report_module
from flexbwd.modgraph.modplan import Guard, JClass, Keep, LoadClass
from flexbwd.modgraph.report import check_mod

SLOPES = torch.linspace(0.1, 0.9, 4, requires_grad=True)
TABLE = torch.randn(4, 80, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
GAIN = torch.tensor(1.5, requires_grad=True)


def softcap(score, b, h, q_idx, kv_idx):
    return 30.0 * torch.tanh(score / 30.0)


def square(score, b, h, q_idx, kv_idx):
    return score * score


def square_bwd(grad, score, b, h, q_idx, kv_idx):
    return grad * 2 * score


def wrong_on_row_3(grad, score, b, h, q_idx, kv_idx):
    return torch.where(q_idx == 3, grad * score, grad * 2 * score)


def learned(score, b, h, q_idx, kv_idx):
    """A prologue (exp), a capture used twice, a toeplitz table, a 0-d parameter, and a mask."""
    score = GAIN * score + torch.exp(SLOPES)[h] * (q_idx - kv_idx) + TABLE[h, q_idx - kv_idx + 39] * SLOPES[0]
    return torch.where(q_idx >= kv_idx, score, -math.inf)


def unsafe(score, b, h, q_idx, kv_idx):
    return torch.where(score > 0, torch.sqrt(score), 0.0)


@pytest.mark.parametrize("mod", [softcap, square, learned, unsafe])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_right_mods_pass(mod, dtype):
    report = check_mod(mod, dtype=dtype)
    assert report.ok, str(report)
    assert report.elements == 2 * 4 * 24 * 40


def test_a_right_hand_written_backward_passes():
    report = check_mod(square, square_bwd)
    assert report.ok, str(report)
    assert report.backward == "square_bwd"


def test_a_wrong_one_is_found_where_it_is_wrong():
    report = check_mod(square, wrong_on_row_3, lengths=(8, 5), heads=2, batch=1)
    assert not report.ok
    (found,) = report.differences
    assert found.at["q_idx"] == 3
    assert set(found.at) == {"b", "h", "q_idx", "kv_idx"}
    assert found.count == 2 * 5
    assert found.want == pytest.approx(2 * found.got)
    assert "q_idx=3" in str(report)
    assert f"{found.got:.9g}" in str(report)


def test_masked_elements_are_not_compared():
    def masked(score, b, h, q_idx, kv_idx):
        return torch.where(q_idx >= kv_idx, score * 2, -math.inf)

    def backward(grad, score, b, h, q_idx, kv_idx):
        return torch.where(q_idx >= kv_idx, grad * 2, 0.0)

    report = check_mod(masked, backward)
    assert report.ok, str(report)
    assert report.keep == "(q_idx >= kv_idx)"
    assert any("masked" in note for note in report.notes)


def test_a_nonlinear_backward_is_a_problem():
    report = check_mod(square, lambda grad, score, b, h, q_idx, kv_idx: grad * grad)
    assert not report.ok
    assert "not linear in grad" in report.problems[0]


def test_a_backward_beside_trained_captures_is_a_problem():
    def backward(grad, score, b, h, q_idx, kv_idx):
        return grad * 1.5

    report = check_mod(learned, backward)
    assert not report.ok
    assert not report.differences
    assert "requires grad" in report.problems[0]


def test_what_is_said_about_a_mod():
    report = check_mod(learned)
    assert report.j_class is JClass.CONST
    assert report.keeps is Keep.SCORE  # d GAIN reads the score
    loads = {load.text: load for load in report.loads}
    table = next(load for text, load in loads.items() if text.startswith("TABLE"))
    assert table.kind is LoadClass.TOEPLITZ
    assert table.guards == (Guard.NONE, Guard.NONE)
    assert table.jacobian is not None
    text = str(report)
    for part in ("learned", "test_report.py", "(q_idx >= kv_idx)", "toeplitz", "sums over diagonals", "ok"):
        assert part in text


def test_long_texts_name_what_they_share():
    report = check_mod(softcap)
    assert report.jacobian == "(1.0 - (t1 * t1))"
    assert report.shared == (("t1", "tanh((score / 30.0))"),)


def test_nan_of_torch_in_branches_not_taken_is_a_note():
    report = check_mod(unsafe)
    assert any("NaN" in note for note in report.notes)


def test_wrong_captured_gradients_are_found(monkeypatch):
    honest = report_module.planned_derivatives

    def broken(*args):
        found = honest(*args)
        return type(found)(found.score, [None if c is None else c * 1.01 for c in found.captures])

    monkeypatch.setattr(report_module, "planned_derivatives", broken)
    report = check_mod(learned)
    assert not report.ok
    assert len(report.differences) == 3
    assert all("gradient of" in d.what for d in report.differences)


def test_sizes_that_leave_a_captured_tensor_say_so():
    with pytest.raises(ModBoundsError, match=r"heads and lengths"):
        check_mod(learned, heads=8)


@pytest.mark.parametrize(
    "options",
    [{"dtype": torch.bfloat16}, {"lengths": (0, 4)}, {"heads": 0}, {"batch": -1}, {"lengths": (4,)}],
    ids=str,
)
def test_bad_options_are_refused(options):
    with pytest.raises(OptionError):
        check_mod(square, **options)


def test_a_mod_that_cannot_be_compiled_raises_its_own_error():
    with pytest.raises(ModUnsupportedOpError):
        check_mod(lambda score, b, h, q_idx, kv_idx: torch.special.i0(score))
