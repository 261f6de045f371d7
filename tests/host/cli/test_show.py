"""`flexbwd show` prints and draws what was asked for."""

from __future__ import annotations

import pytest


def test_causal_as_text(command):
    ended = command("show", "causal", "-S", "64", "--block", "16")
    lines = ended.out.splitlines()
    assert ended.code == 0
    assert lines[0] == "causal"
    assert lines[2:6] == ["▒▒······", "██▒▒····", "████▒▒··", "██████▒▒"]


def test_parameters_reach_the_factory(command):
    narrow = command("show", "sliding_window", "-S", "64", "--block", "16", "--window", "3").out
    wide = command("show", "sliding_window", "-S", "64", "--block", "16", "--window", "63").out
    assert "62.50 % " not in narrow
    assert "50.78 % kept" in wide
    assert "window=3" in narrow


def test_mask_and_score_are_shown_together(command):
    ended = command("show", "causal", "--score", "alibi", "--heads", "8", "--head", "7", "-S", "64")
    assert ended.out.startswith("causal + alibi\n")
    assert "score_mod at score 0" in ended.out


def test_a_score_mod_alone_is_shown(command):
    ended = command("show", "softcap", "--at-score", "100", "-S", "32,48")
    assert ended.code == 0
    assert "100.00 % kept" in ended.out
    assert "40 -> 19.3" in ended.out


def test_a_mod_of_the_user_is_shown(command, tmp_path):
    (tmp_path / "mine.py").write_text("def stripes(b, h, q_idx, kv_idx):\n    return kv_idx % 2 == 0\n")
    ended = command("show", f"{tmp_path / 'mine.py'}:stripes", "-S", "64", "--block", "32,16")
    assert "tiles of 32 x 16: " in ended.out
    assert "50.00 % kept" in ended.out


@pytest.mark.parametrize("suffix", [".png", ".svg"])
def test_picture_file_is_written(command, tmp_path, suffix):
    pytest.importorskip("matplotlib")
    path = tmp_path / f"mask{suffix}"
    ended = command("show", "causal", "--score", "alibi", "-S", "64", "--block", "16", "--out", str(path))
    assert ended.code == 0
    assert ended.out.strip() == str(path)
    assert path.stat().st_size > 1000


def test_unwritable_picture_is_one_line(command, tmp_path):
    pytest.importorskip("matplotlib")
    ended = command("show", "causal", "-S", "64", "--out", str(tmp_path / "absent" / "mask.png"))
    assert ended.code == 2
    assert "cannot be written" in ended.err
