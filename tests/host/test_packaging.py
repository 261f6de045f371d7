"""What pip installs is what the source tree says: packages, typing marker, licence, and a light import."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = {"flexbwd": ROOT / "flexbwd", "flexbwd.mods": ROOT / "mods", "flexbwd.sparsity": ROOT / "sparsity"}
REQUIRED = {"pyproject.toml", "flexbwd", "mods", "sparsity", "tests", "README.md", "LICENSE", "Makefile", ".ci"}
ALLOWED = REQUIRED | {"docs", ".gitignore", ".pre-commit-config.yaml"}

# Forget an editable install of the tree under test, so that only the installed copy can answer.
FORGET_EDITABLE = (
    "import sys\n"
    "sys.meta_path[:] = [f for f in sys.meta_path if not getattr(f, '__module__', '').startswith('__editable__')]\n"
    "for name in [n for n in sys.modules if n.startswith('__editable__')]: del sys.modules[name]\n"
)
REPORT = (
    "import flexbwd, flexbwd.mods, flexbwd.sparsity\n"
    "print(flexbwd.__file__, flexbwd.mods.__file__, flexbwd.sparsity.__file__, sep='\\n')\n"
)


def python(code: str, *, cwd: Path, path: Path | None = None) -> str:
    """Output of `code` run in a fresh interpreter that sees neither the source tree nor the caller's PYTHONPATH."""
    insert = f"import sys; sys.path.insert(0, {str(path)!r})\n" if path else ""
    run = subprocess.run(
        [sys.executable, "-c", FORGET_EDITABLE + insert + code], cwd=cwd, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    return run.stdout


def pip(*args: str, cwd: Path) -> None:
    run = subprocess.run([sys.executable, "-m", "pip", *args, "--quiet"], cwd=cwd, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the source tree, so that a build leaves nothing behind and meets no stale build folder."""
    pytest.importorskip("setuptools")
    tree = tmp_path_factory.mktemp("tree")
    ignore = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for folder in SOURCES.values():
        shutil.copytree(folder, tree / folder.name, ignore=ignore)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    return tree


@pytest.fixture(scope="module")
def wheel(tree: Path) -> Path:
    pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", "dist", ".", cwd=tree)
    (wheel,) = (tree / "dist").glob("flexbwd-*.whl")
    return wheel


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("installed")
    pip("install", "--no-deps", "--target", str(target), str(wheel), cwd=target)
    return target


def modules(package: str, folder: Path) -> set[str]:
    """Every Python file of a package as the path that a wheel gives it."""
    files = (f.relative_to(folder) for f in folder.rglob("*.py"))
    return {"/".join((*package.split("."), *file.parts)) for file in files}


def test_wheel_imports_mods_and_sparsity(installed: Path, tmp_path: Path):
    files = python(REPORT, cwd=tmp_path, path=installed).split()
    assert files == [str(installed / "flexbwd" / part / "__init__.py") for part in ("", "mods", "sparsity")]


def test_wheel_holds_every_module_of_the_tree(installed: Path):
    want = set().union(*(modules(package, folder) for package, folder in SOURCES.items()))
    got = modules("flexbwd", installed / "flexbwd")
    assert got == want, "a folder is missing from [tool.setuptools] packages"


def test_wheel_carries_the_typing_marker_and_the_licence(installed: Path):
    assert (installed / "flexbwd" / "py.typed").exists()
    (metadata,) = installed.glob("flexbwd-*.dist-info")
    assert (metadata / "licenses" / "LICENSE").read_text().startswith("BSD 3-Clause License")
    assert "License-Expression: BSD-3-Clause" in (metadata / "METADATA").read_text()
    assert "flexbwd = flexbwd.cli:main" in (metadata / "entry_points.txt").read_text()


def test_wheel_holds_nothing_but_the_package(installed: Path):
    assert {p.name for p in installed.iterdir() if not p.name.endswith(".dist-info")} <= {"flexbwd", "bin"}


def test_editable_install_imports_the_sources(tree: Path, tmp_path: Path):
    target = tmp_path / "site"
    pip("install", "--no-deps", "--no-build-isolation", "--target", str(target), "--editable", ".", cwd=tree)
    files = python(f"import site; site.addsitedir({str(target)!r})\n" + REPORT, cwd=tmp_path, path=target).split()
    assert files == [str(tree / part / "__init__.py") for part in ("flexbwd", "mods", "sparsity")]


def test_plain_source_tree_imports_mods_and_sparsity(tmp_path: Path):
    files = python(REPORT, cwd=tmp_path, path=ROOT).split()
    assert files == [str(folder / "__init__.py") for folder in SOURCES.values()]


def test_import_needs_no_gpu_and_no_kernel_library(tmp_path: Path):
    code = (
        "import sys, torch\n"
        "before = set(sys.modules)\n"
        "import flexbwd, flexbwd.mods, flexbwd.sparsity\n"
        "added = {name.split('.')[0] for name in set(sys.modules) - before}\n"
        "print(*sorted(added & {'cutlass', 'cuda', 'tvm_ffi', 'matplotlib', 'typer', 'rich', 'attn_gym'}))\n"
        "print(torch.cuda.is_initialized())\n"
    )
    loaded, initialised = python(code, cwd=tmp_path, path=ROOT).splitlines()
    assert loaded == ""
    assert initialised == "False"


def test_top_level_of_the_repository_is_the_designed_one():
    listing = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listing.returncode:
        pytest.skip("not a git checkout")
    names = {line.split("/")[0] for line in listing.stdout.splitlines()}
    assert names <= ALLOWED
    assert names >= REQUIRED
