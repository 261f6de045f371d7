"""Pictures show what the mods do; figures hold what they claim to."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch

from flexbwd import create_block_mask, viz
from flexbwd.errors import OptionError, ShapeError, UnsupportedError
from flexbwd.mods import alibi, causal, dilated_window, head_bias, sliding_window, softcap


def dense(mask, q: int, kv: int) -> np.ndarray:
    return mask(0, 0, torch.arange(q)[:, None], torch.arange(kv)[None, :]).numpy()


def classes(keep: np.ndarray, block: tuple[int, int]) -> np.ndarray:
    """Tile classes by brute force over the elements that exist."""
    rows, columns = (-(-n // b) for n, b in zip(keep.shape, block, strict=True))
    tiles = np.empty((rows, columns), np.int8)
    for r in range(rows):
        for c in range(columns):
            tile = keep[r * block[0] : (r + 1) * block[0], c * block[1] : (c + 1) * block[1]]
            tiles[r, c] = viz.EMPTY if not tile.any() else viz.FULL if tile.all() else viz.PARTIAL
    return tiles


@pytest.mark.parametrize("lengths", [(96, 96), (64, 160), (100, 33)], ids="q{0[0]}-kv{0[1]}".format)
@pytest.mark.parametrize("block", [(16, 16), (32, 16)], ids="{0[0]}x{0[1]}".format)
@pytest.mark.parametrize("mask", [causal, sliding_window(20), dilated_window(30, 3)], ids=lambda m: m.__name__)
def test_picture_agrees_with_brute_force(mask, block, lengths):
    shown = viz.picture(mask, lengths=lengths, block_size=block)
    keep = dense(mask, *lengths)
    np.testing.assert_array_equal(shown.kept, keep)
    whole = [n % b == 0 for n, b in zip(lengths, block, strict=True)]
    if all(whole):  # a ragged last tile may be full or partial
        np.testing.assert_array_equal(shown.tiles, classes(keep, block))
    np.testing.assert_array_equal(shown.tiles == viz.EMPTY, classes(keep, block) == viz.EMPTY)
    assert shown.skipped == (shown.tiles == viz.EMPTY).mean()


def test_score_is_shown_where_elements_are_kept():
    shown = viz.picture(causal, alibi(4), lengths=(64, 64), block_size=16, heads=4, head=1, at_score=3.0)
    q, kv = np.arange(64)[:, None], np.arange(64)[None, :]
    want = np.where(kv <= q, 3.0 + 2.0**-4 * (kv - q), np.nan)
    np.testing.assert_allclose(shown.score, want, rtol=1e-5)


def test_a_mod_of_the_score_alone_is_shown_as_a_curve():
    shown = viz.picture(causal, softcap(20.0), lengths=(32, 32), block_size=16, at_score=5.0)
    assert shown.is_flat
    np.testing.assert_allclose(shown.curve[1], 20 * np.tanh(shown.curve[0] / 20), rtol=1e-5)
    assert not viz.picture(causal, alibi(4), lengths=(32, 32), block_size=16).is_flat


def test_scores_of_minus_infinity_count_as_dropped():
    def near(score, b, h, q_idx, kv_idx):
        return torch.where((q_idx - kv_idx).abs() < 5, score, float("-inf"))

    shown = viz.picture(None, near, lengths=(32, 32), block_size=16)
    distance = np.abs(np.arange(32)[:, None] - np.arange(32)[None, :])
    np.testing.assert_array_equal(shown.kept, distance < 5)
    np.testing.assert_array_equal(np.isnan(shown.score), distance >= 5)


@pytest.mark.parametrize("head", [0, 2])
def test_the_head_asked_for_is_shown(head):
    bias = torch.tensor([1.0, 2.0, 4.0])

    def by_head(b, h, q_idx, kv_idx):
        return kv_idx <= q_idx + h

    shown = viz.picture(by_head, head_bias(bias), lengths=(32, 32), block_size=16, heads=3, head=head)
    q, kv = np.arange(32)[:, None], np.arange(32)[None, :]
    np.testing.assert_array_equal(shown.kept, kv <= q + head)
    assert set(shown.score[shown.kept > 0]) == {float(bias[head])}


def test_a_dense_tensor_and_a_block_mask_are_masks():
    keep = torch.rand((1, 1, 48, 48), generator=torch.Generator().manual_seed(0)) < 0.3
    np.testing.assert_array_equal(viz.picture(keep, lengths=(48, 48), block_size=16).kept, keep[0, 0])
    block_mask = create_block_mask(causal, None, None, 48, 80, BLOCK_SIZE=16)
    np.testing.assert_array_equal(viz.picture(block_mask).kept, dense(causal, 48, 80))


@pytest.mark.parametrize("length", [3000, 20000], ids=["every element", "sampled"])
def test_long_sequences_keep_their_shares(length):
    shown = viz.picture(dilated_window(length, 4), lengths=(length, 64), block_size=128)
    assert shown.kept.shape == (viz.MAX_CELLS, 64)
    assert abs(float(shown.kept.mean()) - 0.25) < 0.01


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"heads": 2, "head": 2}, OptionError, "head=2"),
        ({"lengths": (0, 4)}, ShapeError, r"lengths=\(0, 4\)"),
    ],
    ids=["head", "length"],
)
def test_bad_requests_are_refused(options, error, words):
    with pytest.raises(error, match=words):
        viz.picture(causal, **options)


def test_figure_has_a_panel_for_each_aspect(tmp_path):
    pytest.importorskip("matplotlib")
    shown = viz.picture(causal, alibi(1), lengths=(64, 64), block_size=16)
    figure = viz.draw(shown, "causal + alibi")
    titles = [axis.get_title() for axis in figure.axes if axis.get_title()]
    assert titles == ["tiles: 37.5 % skipped", "elements: 50.8 % kept", "score_mod at score 0"]
    figure.savefig(tmp_path / "mask.png")
    assert (tmp_path / "mask.png").read_bytes().startswith(b"\x89PNG")


def test_loss_curve_is_smoothed_over_the_last_steps():
    pytest.importorskip("matplotlib")
    figure = viz.draw_loss([4.0, 2.0, 0.0, 2.0], smooth=2)
    raw, mean = figure.axes[0].lines
    assert list(raw.get_ydata()) == [4.0, 2.0, 0.0, 2.0]
    assert list(mean.get_ydata()) == [4.0, 3.0, 1.0, 1.0]


@pytest.mark.parametrize(("losses", "smooth"), [([], 3), ([1.0], 0)])
def test_loss_curve_needs_losses(losses, smooth):
    with pytest.raises(OptionError, match="losses"):
        viz.draw_loss(losses, smooth=smooth)


def test_drawing_without_matplotlib_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(UnsupportedError, match=r"pip install flexbwd\[viz\]"):
        viz.draw_loss([1.0])
