"""`flexbwd check` tells a right mod from a wrong one by its exit code."""

from __future__ import annotations

import pytest

FILE = """
import torch

def square(score, b, h, q_idx, kv_idx):
    return score * score

def square_bwd(grad, score, b, h, q_idx, kv_idx):
    return grad * 2 * score

def wrong_bwd(grad, score, b, h, q_idx, kv_idx):
    return grad * score

def window(b, h, q_idx, kv_idx):
    return (q_idx - kv_idx).abs() < 4 + h
"""


@pytest.fixture
def file(tmp_path):
    (tmp_path / "mine.py").write_text(FILE)
    return tmp_path / "mine.py"


def test_a_right_hand_written_backward_passes(command, file):
    ended = command("check", f"{file}:square")
    assert ended.code == 0, ended.out
    assert "square" in ended.out


@pytest.mark.parametrize("bwd", ["wrong_bwd", "{file}:wrong_bwd"], ids=["beside the mod", "file.py:name"])
def test_a_wrong_hand_written_backward_fails(command, file, bwd):
    ended = command("check", f"{file}:square", "--bwd", bwd.format(file=file))
    assert ended.code == 1
    assert ended.out.strip()


@pytest.mark.parametrize("name", ["softcap", "alibi_learned", "t5_causal"])
def test_score_mods_of_the_zoo_pass(command, name):
    assert command("check", name).code == 0


@pytest.mark.parametrize("name", ["causal", "document", "padding_left"])
def test_masks_of_the_zoo_pass(command, name):
    ended = command("check", name, "-S", "40,56")
    assert ended.code == 0
    assert "traced" in ended.out


def test_a_mask_of_the_user_passes_for_every_head(command, file):
    ended = command("check", f"{file}:window", "-S", "48")
    assert ended.code == 0
    assert "ok: every element" in ended.out
    assert "kernel, as words of 32 elements: " in ended.out


def test_a_mod_that_cannot_be_compiled_is_one_line(command, tmp_path):
    body = "return score if q_idx > kv_idx else -score"
    (tmp_path / "branch.py").write_text(f"def mod(score, b, h, q_idx, kv_idx):\n    {body}\n")
    ended = command("check", f"{tmp_path / 'branch.py'}:mod")
    assert ended.code != 0
    text = ended.err + ended.out
    assert "branch.py" in text
    assert "Traceback" not in text
