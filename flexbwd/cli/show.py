"""`flexbwd show`: a mask and a score mod, as text or as a picture file."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from flexbwd.cli.console import console, table, working
from flexbwd.cli.load import MASK, SCORE, Loaded, Sizes, load, parse_pair, parse_parameters
from flexbwd.errors import OptionError

SUFFIXES = (".png", ".svg", ".pdf")


@dataclass(frozen=True)
class Request:
    """The options of one `flexbwd show`."""

    mod: str
    score: str
    lengths: str
    block: str
    heads: int
    head: int
    at_score: float
    width: int
    out: Path | None


def run(request: Request, extra: Sequence[str]) -> None:
    """Draw what was asked for; `extra` are the parameters of the mod."""
    from flexbwd import viz

    r = request
    if r.out is not None and r.out.suffix not in SUFFIXES:
        raise OptionError(f"--out {r.out} must end in one of {', '.join(SUFFIXES)}")
    lengths, block = parse_pair(r.lengths, "--lengths"), parse_pair(r.block, "--block")
    mask, score = _mods(r, Sizes(1, r.heads, *lengths), parse_parameters(extra))
    with working("drawing"):
        shown = viz.picture(
            mask.mod if mask else None,
            score.mod if score else None,
            lengths=lengths,
            block_size=block,
            heads=r.heads,
            head=r.head,
            at_score=r.at_score,
        )
    title = " + ".join(part.name for part in (mask, score) if part)
    if r.out is None:
        from flexbwd.cli.text import render

        print(f"{title}\n{render(shown, r.width, unicode=_unicode())}")
        return
    figure = viz.draw(shown, title)
    try:
        figure.savefig(r.out)
    except OSError as error:
        raise OptionError(f"--out {r.out} cannot be written: {error.strerror}") from error
    print(r.out)


def list_zoo() -> None:
    """Every mod of the zoo with its formula."""
    from flexbwd import mods

    listing = table("", ("name", "kind", "formula"))
    for entry in mods.zoo():
        listing.add_row(entry.name, entry.kind, entry.formula)
    console().print(listing, markup=False)


def _mods(request: Request, sizes: Sizes, parameters: dict[str, str]) -> tuple[Loaded | None, Loaded | None]:
    """The mask and the score mod; a first argument that is a score mod is shown as one."""
    first = load(request.mod, sizes, parameters) if request.mod else None
    score = load(request.score, sizes, {} if first else parameters) if request.score else None
    if score is not None and score.kind != SCORE:
        raise OptionError(f"--score {request.score} is a mask; give it as the first argument")
    if first is None or first.kind == MASK:
        return first, score
    if score is not None:
        raise OptionError(f"{request.mod} and --score {request.score} are both score mods; give one of them")
    return None, first


def _unicode() -> bool:
    """Whether stdout can print block characters."""
    try:
        "·░▒▓█".encode(sys.stdout.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True
