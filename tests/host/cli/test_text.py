"""Pictures as characters say what the arrays say."""

from __future__ import annotations

import numpy as np
import pytest

from flexbwd.cli.text import RAMP, SHADES, TILES, TILES_ASCII, draw_scores, draw_shares, draw_tiles, render
from flexbwd.viz import EMPTY, FULL, PARTIAL, Picture

CAUSAL = np.array([[PARTIAL, EMPTY, EMPTY], [FULL, PARTIAL, EMPTY], [FULL, FULL, PARTIAL]], dtype=np.int8)


def picture(tiles, kept, score=None):
    return Picture((48, 48), (16, 16), tiles, np.asarray(kept, np.float32), score)


def test_each_tile_is_its_class():
    assert draw_tiles(CAUSAL, 64, TILES_ASCII).splitlines() == ["++....", "##++..", "####++"]


def test_pooled_tiles_that_differ_are_partial():
    tiles = np.kron(np.array([[FULL, EMPTY], [EMPTY, FULL]]), np.ones((4, 4), int))
    tiles[0, 0] = EMPTY
    assert draw_tiles(tiles, 4, TILES_ASCII).splitlines() == ["+#..", "..##"]


def test_only_nothing_and_everything_get_the_outermost_shades():
    kept = np.array([[0.0, 1e-4, 0.5, 0.9999, 1.0]])
    (line,) = draw_shares(kept, 5, SHADES).splitlines()
    assert line[0] == SHADES[0]
    assert line[-1] == SHADES[-1]
    assert not set(line[1:4]) & {SHADES[0], SHADES[-1]}


def test_scores_span_the_ramp_and_dropped_elements_are_marked():
    score = np.array([[0.0, 9.0, np.nan]])
    assert draw_scores(score, 8, "x") == RAMP[0] + RAMP[-1] + "x"


@pytest.mark.parametrize("score", [np.full((4, 4), 2.0), np.full((4, 4), np.nan)], ids=["constant", "nothing kept"])
def test_scores_without_a_range_are_drawn(score):
    assert len(draw_scores(score, 4, "x").splitlines()) == 2


@pytest.mark.parametrize("width", [8, 31, 64, 200])
def test_no_line_of_a_drawing_is_wider_than_asked(width):
    rng = np.random.default_rng(0)
    shown = picture(rng.integers(0, 3, (100, 70)).astype(np.int8), rng.random((300, 500)), rng.random((300, 500)))
    drawn = [line for line in render(shown, width).splitlines() if ":" not in line or " " not in line]
    assert max(map(len, drawn)) <= width


def test_legend_counts_tiles_and_elements():
    text = render(picture(CAUSAL, [[1.0, 0.0], [1.0, 1.0]]), 64)
    assert f"{TILES[EMPTY]} 3 empty, {TILES[PARTIAL]} 3 partial, {TILES[FULL]} 3 full; 33.3 % of 9 skipped" in text
    assert "75.00 % kept" in text


def test_ascii_rendering_is_ascii():
    shown = picture(CAUSAL, [[1.0, 0.5], [0.0, 1.0]], np.array([[1.0, np.nan], [2.0, 3.0]]))
    assert render(shown, 64, unicode=False).isascii()
