"""The generated parts of the pages: every error has a true example, every IR op a row, every module a line."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from flexbwd import errors, mods
from flexbwd.modgraph.ir import ARITY

ROOT = Path(__file__).resolve().parents[3]
DOCS = ROOT / "docs"
RAISED = [name for name in vars(errors) if re.fullmatch(r"\w+(Error|Warning|Notice)", name)]


@pytest.mark.parametrize("name", [n for n in RAISED if n not in ("FlexError", "ModError", "ModOverflowWarning")])
def test_the_example_of_an_error_raises_it(name: str) -> None:
    import error_examples

    assert error_examples.message(name)


def test_messages_of_mods_name_the_mod_and_the_line() -> None:
    import error_examples

    assert error_examples.message("ModDataDependentError").startswith("bias (example.py:2): ")


def test_an_example_that_raises_another_class_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    import error_examples

    monkeypatch.setitem(error_examples.EXAMPLES, "ShapeError", "flex_attention(q, k.double(), v)")
    with pytest.raises(AssertionError, match="raises DtypeError"):
        error_examples.message("ShapeError")


def test_every_operation_of_the_graph_is_explained() -> None:
    page = (DOCS / "architecture.md").read_text()
    table = page[page.index("## The IR") : page.index("## Caches")]
    assert set(ARITY) - set(re.findall(r"`(\w+)`", table)) == set()


def test_every_module_has_a_line() -> None:
    import module_list

    listed = module_list.modules()
    missing = [f"{folder}/{name}" for folder, files in listed.items() for name, first in files if not first]
    assert {m for m in missing if not m.endswith("__init__.py")} == set()
    assert ("affine.py" in dict(listed["flexbwd/modgraph"])) and ("block_mask.py" in dict(listed["sparsity"]))


@pytest.mark.parametrize("name", ["causal", "alibi_learned"])
def test_a_zoo_section_has_formula_picture_and_code(name: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    import zoo_page

    (tmp_path / zoo_page.PICTURES).mkdir(parents=True)
    entry = mods.get(name)
    text = zoo_page.section(entry, tmp_path)
    assert entry.formula in text
    assert f"def {name}(" in text
    assert (tmp_path / zoo_page.PICTURES / f"{name}.png").stat().st_size < 30_000
    assert ("48.4 % of the blocks are skipped" in text) == (name == "causal")


def test_the_followed_mod_is_what_the_page_says() -> None:
    import mod_example

    assert "def capped_alibi(score, b, h, q_idx, kv_idx):" in mod_example.source()
    assert "nonlinear: a factor that needs the score" in mod_example.report()
    tiers = mod_example.tiers()
    assert re.search(r"\| v\d+ \| `slopes\[h\]` \| once per work item \|", tiers)
    assert tiers.count("tanh(") == 1
    assert "stepped" in tiers


def test_the_followed_mod_has_one_tanh_an_element() -> None:
    pytest.importorskip("cutlass")
    import mod_example

    listing = mod_example.listing()
    assert listing.count("tanh.approx.f32") == 4  # of a fragment of four elements
    assert not re.search(r"div|ld\.local|rem\.", listing)


def test_placeholders_are_known() -> None:
    known = re.findall(r'^        "([a-z-]+)": ', (DOCS / "_ext" / "flexdocs.py").read_text(), re.MULTILINE)
    used = [
        name for page in DOCS.glob("*.md") for name in re.findall(r"<!-- generated: ([a-z-]+) -->", page.read_text())
    ]
    assert sorted(known) == sorted(used)


def test_pages_are_in_the_table_of_contents() -> None:
    index = (DOCS / "index.md").read_text()
    assert all(re.search(rf"^{page.stem}$", index, re.MULTILINE) for page in DOCS.glob("*.md") if page.stem != "index")


def test_recorded_benchmarks_join_below_the_title(tmp_path: Path) -> None:
    import benchmark_tables

    assert "No run is recorded yet" in benchmark_tables.markdown(tmp_path)
    (tmp_path / "cpu-1.md").write_text("# Old\n\n## Part\n")
    (tmp_path / "cpu-2.md").write_text("### New\n\n# not a heading?\n")
    joined = benchmark_tables.markdown(tmp_path)
    assert joined.index("New") < joined.index("## Old")
    assert "### Part" in joined


def test_links_of_the_readme_lead_somewhere() -> None:
    links = re.findall(r"\]\(([^)#]+)\)", (ROOT / "README.md").read_text())
    assert links
    assert [link for link in links if "://" not in link and not (ROOT / link).exists()] == []
