"""The list of modules with the first line of each docstring, read from the sources without importing them."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = (
    "flexbwd",
    "flexbwd/modgraph",
    "sparsity",
    "flexbwd/cpu",
    "flexbwd/jit",
    "flexbwd/sm90",
    "flexbwd/cli",
    "mods",
)
INTRODUCED_ELSEWHERE = "mods"  # one file for each mod: the zoo page tells of them


def summary(path: Path) -> str:
    """First sentence of a module's docstring."""
    first, _, _ = (ast.get_docstring(ast.parse(path.read_text())) or "").partition("\n\n")
    return " ".join(first.split())


def modules() -> dict[str, list[tuple[str, str]]]:
    """By folder, (file, summary) of every module."""
    listing = {}
    for folder in FOLDERS:
        files = sorted((ROOT / folder).glob("*.py"))
        if folder == INTRODUCED_ELSEWHERE:
            files = [ROOT / folder / name for name in ("__init__.py", "registry.py", "signatures.py")]
        listing[folder] = [(path.name, summary(path)) for path in files]
    return listing


def markdown() -> str:
    """A definition list for each folder."""
    text = []
    for folder, files in modules().items():
        rows = [f"| `{name}` | {_cell(first)} |" for name, first in files if first]
        text += [f"### {folder}/", "", "| module | |", "|---|---|", *rows, ""]
    return "\n".join(text)


def _cell(text: str) -> str:
    return text.replace("|", r"\|")
