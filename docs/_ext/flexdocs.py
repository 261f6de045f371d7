"""Sphinx extension: fills the placeholders of pages with generated parts, and turns our docstrings into clean RST."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import benchmark_tables
import error_examples
import mod_example
import module_list
import zoo_page
from sphinx.application import Sphinx

PLACEHOLDER = re.compile(r"^<!-- generated: ([a-z-]+) -->$", re.MULTILINE)


def parts(source_dir: Path) -> dict[str, Callable[[], str]]:
    """What a placeholder `<!-- generated: NAME -->` becomes: Markdown."""
    return {
        "zoo-masks": lambda: zoo_page.markdown("mask", source_dir),
        "zoo-scores": lambda: zoo_page.markdown("score", source_dir),
        "errors": error_examples.markdown,
        "modules": module_list.markdown,
        "mod-source": mod_example.source,
        "mod-report": mod_example.report,
        "mod-tiers": mod_example.tiers,
        "mod-listing": mod_example.listing,
        "benchmarks": lambda: benchmark_tables.markdown(source_dir / "benchmarks"),
    }


def fill(app: Sphinx, docname: str, source: list[str]) -> None:
    known = parts(Path(app.srcdir))
    source[0] = PLACEHOLDER.sub(lambda match: known[match[1]](), source[0])


def clean_docstring(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """`code` becomes ``code``, an indented formula a literal block, and RST's own markup is escaped elsewhere."""
    lines[:] = to_rst(lines)


def to_rst(lines: list[str]) -> list[str]:
    """RST of a docstring in the house style."""
    result: list[str] = []
    formula = False
    for number, line in enumerate(lines):
        starts_block = line.startswith("    ") and (number == 0 or not lines[number - 1].strip())
        if not formula and starts_block:
            result += ["::", ""]
            formula = True
        elif formula and line.strip() and not line.startswith("    "):
            formula = False
        result.append(line if formula else _escape(line))
    return result


def _escape(line: str) -> str:
    code_and_text = re.split(r"(`[^`]+`)", line)
    for n, piece in enumerate(code_and_text):
        if n % 2:
            code_and_text[n] = f"`{piece}`"
        else:
            code_and_text[n] = re.sub(r"([*|\\]|_(?=\W|$))", r"\\\1", piece)
    return "".join(code_and_text)


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("source-read", fill)
    app.connect("autodoc-process-docstring", clean_docstring, priority=400)  # before napoleon reads the sections
    return {"parallel_read_safe": True}
