"""The recorded runs of `flexbwd bench`, joined into one page."""

from __future__ import annotations

import re
from pathlib import Path


def markdown(folder: Path) -> str:
    """Every `*.md` of `folder`, the last by name first; its highest headings become the second level."""
    runs = sorted(folder.glob("*.md"), reverse=True)
    if not runs:
        return "No run is recorded yet: `make bench` measures this machine and writes the table here."
    return "\n\n".join(below_title(run.read_text()) for run in runs)


def below_title(text: str) -> str:
    """`text` with its headings moved so that the highest is of level 2."""
    levels = [len(marks) for marks in re.findall(r"^(#+) ", text, re.MULTILINE)]
    shift = 2 - min(levels, default=2)
    return re.sub(r"^(#+) ", lambda m: "#" * (len(m[1]) + shift) + " ", text, flags=re.MULTILINE)
