"""Every ```python block of the README and the pages runs, page by page, top to bottom, in one namespace a page."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[3]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(page: Path) -> list[tuple[int, str]]:
    """(line in the page, code) of every python block."""
    text = page.read_text()
    return [(text.count("\n", 0, match.start(1)), match[1]) for match in BLOCK.finditer(text)]


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page)], ids=lambda page: page.stem)
def test_the_examples_of_a_page_run(page: Path) -> None:
    scope: dict[str, object] = {"__name__": "example"}
    torch.manual_seed(0)
    with contextlib.redirect_stdout(io.StringIO()):
        for line, code in blocks(page):
            exec(compile("\n" * line + code, str(page), "exec"), scope)
