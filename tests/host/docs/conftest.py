"""The Sphinx-free parts of docs/_ext are importable in these tests."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

EXTENSIONS = Path(__file__).resolve().parents[3] / "docs" / "_ext"


@pytest.fixture(autouse=True)
def extensions_importable() -> Iterator[None]:
    sys.path.insert(0, str(EXTENSIONS))
    yield
    sys.path.remove(str(EXTENSIONS))
