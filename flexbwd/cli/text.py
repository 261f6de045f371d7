"""Pictures as text: tile classes, kept elements and scores in character cells."""

from __future__ import annotations

import itertools

import numpy as np

from flexbwd.viz import EMPTY, FULL, PARTIAL, Array, Picture

TILES = {EMPTY: "·", PARTIAL: "▒", FULL: "█"}
TILES_ASCII = {EMPTY: ".", PARTIAL: "+", FULL: "#"}
SHADES, SHADES_ASCII = "·░▒▓█", ".-+*#"
RAMP = " .:-=+*%@#"  # scores, low to high
ASPECT = 2  # a character is about twice as high as wide


def render(shown: Picture, width: int, *, unicode: bool = True) -> str:
    """The whole picture: legend, tiles, elements and, when there is a score mod, scores.

    Args:
        width: columns of each drawing; larger pictures are pooled, smaller ones are not blown up.
        unicode: block characters, or ASCII only.
    """
    tiles, shades = (TILES, SHADES) if unicode else (TILES_ASCII, SHADES_ASCII)
    names = ((EMPTY, "empty"), (PARTIAL, "partial"), (FULL, "full"))
    counts = ", ".join(f"{tiles[kind]} {shown.count(kind)} {name}" for kind, name in names)
    skipped = f"{100 * shown.skipped:.1f} % of {shown.tiles.size} skipped"
    parts = [
        f"tiles of {shown.block_size[0]} x {shown.block_size[1]}: {counts}; {skipped}",
        draw_tiles(shown.tiles, width, tiles),
        "",
        f"elements of {shown.lengths[0]} x {shown.lengths[1]}: {100 * float(shown.kept.mean()):.2f} % kept",
        draw_shares(shown.kept, width, shades),
    ]
    if shown.is_flat and shown.curve is not None:
        parts += ["", "score_mod, the same everywhere: " + _curve_points(shown.curve)]
    elif shown.score is not None:
        parts += ["", _score_title(shown), draw_scores(shown.score, width, tiles[EMPTY])]
    return "\n".join(parts)


def draw_tiles(tiles: Array, width: int, characters: dict[int, str]) -> str:
    """One character per tile, two columns wide where there is room; pooled groups that differ inside are partial."""
    rows, columns = tiles.shape
    wide = 2 if 2 * columns <= width else 1
    cells = _groups(columns, width // wide), _groups(rows, width // (1 if wide == 2 else ASPECT))
    lines = []
    for top, bottom in cells[1]:
        line = ""
        for left, right in cells[0]:
            group = tiles[top:bottom, left:right]
            kind = int(group.flat[0]) if (group == group.flat[0]).all() else PARTIAL
            line += characters[kind] * wide
        lines.append(line)
    return "\n".join(lines)


def draw_shares(kept: Array, width: int, shades: str) -> str:
    """Share of kept elements as a shade; only nothing and everything get the outermost two."""
    pooled = _pooled(kept, width)
    inner = len(shades) - 2
    levels = 1 + np.minimum((pooled * inner).astype(int), inner - 1)
    levels[pooled <= 0.0] = 0
    levels[pooled >= 1.0] = inner + 1
    return "\n".join("".join(shades[level] for level in row) for row in levels)


def draw_scores(score: Array, width: int, nothing: str) -> str:
    """Scores from low to high along RAMP; `nothing` where no element is kept."""
    pooled = _pooled(score, width)
    finite = np.isfinite(pooled)
    low, high = _range(score)
    share = (np.where(finite, pooled, low) - low) / ((high - low) or 1.0)
    levels = np.clip(np.round(share * (len(RAMP) - 1)), 0, len(RAMP) - 1).astype(int)
    return "\n".join(
        "".join(RAMP[level] if known else nothing for level, known in zip(*row, strict=True))
        for row in zip(levels, finite, strict=True)
    )


def _score_title(shown: Picture) -> str:
    assert shown.score is not None
    low, high = _range(shown.score)
    return f"score_mod at score {shown.at_score:g}: from {low:.4g} '{RAMP[0]}' to {high:.4g} '{RAMP[-1]}'"


def _curve_points(curve: Array) -> str:
    """A few points of the curve, "score → value"."""
    chosen = curve[:, np.linspace(0, curve.shape[1] - 1, 9).astype(int)]
    return ", ".join(f"{score:g} -> {value:.3g}" for score, value in chosen.T)


def _range(score: Array) -> tuple[float, float]:
    finite = score[np.isfinite(score)]
    return (float(finite.min()), float(finite.max())) if finite.size else (0.0, 0.0)


def _groups(length: int, most: int) -> list[tuple[int, int]]:
    """At most `most` contiguous groups that cover `length`."""
    number = max(1, min(length, most))
    edges = [length * n // number for n in range(number + 1)]
    return list(itertools.pairwise(edges))


def _pooled(values: Array, width: int) -> Array:
    """Means of groups, `width` columns and half as many rows at most; NaN only where a whole group is NaN."""
    groups = _groups(values.shape[0], width // ASPECT), _groups(values.shape[1], width)
    starts = [np.array([begin for begin, _ in axis]) for axis in groups]
    known = np.isfinite(values)

    def sums(x: Array) -> Array:
        return np.asarray(np.add.reduceat(np.add.reduceat(x, starts[0], axis=0), starts[1], axis=1))

    number = sums(known.astype(np.float64))
    total = sums(np.where(known, values, 0.0).astype(np.float64))
    return np.where(number > 0, total / np.maximum(number, 1), np.nan)
