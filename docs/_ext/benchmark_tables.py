"""The recorded runs of `flexbwd bench`, joined into one page."""

from __future__ import annotations

import re
from pathlib import Path


def markdown(folder: Path) -> str:
    """Every `*.md` of `folder`, newest first; its headings one level deeper."""
    runs = sorted(folder.glob("*.md"), reverse=True)
    if not runs:
        return "No run is recorded yet: `make bench` measures this machine and writes the table here."
    return "\n\n".join(re.sub(r"^#", "##", run.read_text(), flags=re.MULTILINE) for run in runs)
