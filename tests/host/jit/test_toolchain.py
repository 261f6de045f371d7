"""The fingerprint: everything that decides the code is in it, and nothing else."""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from flexbwd.jit import toolchain
from flexbwd.jit.toolchain import NO_DRIVER, Toolchain


@pytest.fixture
def again(monkeypatch):
    """again() -> the toolchain, read anew."""
    monkeypatch.delenv("CUTE_DSL_LIBS", raising=False)
    return toolchain.toolchain.__wrapped__


def test_versions_sources_driver_and_architecture_are_in_the_fingerprint(again):
    names = {fact.partition("=")[0] for fact in again().facts}
    assert {"platform", "arch", "options", "flavour", "nvidia-cutlass-dsl", "apache-tvm-ffi", "sources"} <= names
    base = Toolchain(("a=1", "b=2"), "13.0", 13, None)
    others = [Toolchain(("a=1", "b=3"), "13.0", 13, None), Toolchain(("a=1", "b=2"), "13.1", 13, None)]
    assert len({t.fingerprint() for t in [base, *others]}) == 3
    assert base.fingerprint("13.1") == others[1].fingerprint()


def test_the_compilers_environment_is_in_the_fingerprint(again, monkeypatch):
    before = again().fingerprint()
    monkeypatch.setenv("CUTE_DSL_LOG_LEVEL", "20")
    monkeypatch.setenv("CUTE_DSL_ARCH", "sm_100a")  # ours is set for each compile
    assert again().fingerprint() == before
    monkeypatch.setenv("CUTE_DSL_COMPILER_OPT", "opt-level=1")
    assert again().fingerprint() != before


def test_an_edited_source_changes_the_fingerprint(again, tmp_path, monkeypatch):
    (tmp_path / "flexbwd/jit").mkdir(parents=True)
    (tmp_path / "flexbwd/sm90/forward").mkdir(parents=True)
    source = tmp_path / "flexbwd/sm90/forward/mma.py"
    source.write_text("a = 1\n")
    monkeypatch.setattr(toolchain, "__file__", str(tmp_path / "flexbwd/jit/toolchain.py"))
    before = toolchain.source_hash()
    source.write_text("a = 2\n")
    assert toolchain.source_hash() != before
    source.rename(source.with_name("moved.py"))
    assert toolchain.source_hash() != before


def test_an_edit_after_the_process_began_is_seen(monkeypatch):
    newest = max(source.stat().st_mtime for source in toolchain._sources())
    monkeypatch.setattr(toolchain, "_BEGAN", newest + 1)
    assert not toolchain.edited()
    monkeypatch.setattr(toolchain, "_BEGAN", newest - 1)
    assert toolchain.edited()


def test_another_version_or_wheel_of_the_dsl_changes_the_fingerprint(again, monkeypatch):
    real = metadata.distribution
    seen = {again().fingerprint()}

    class Changed:
        def __init__(self, name, version, record):
            self.version, self._record = version or real(name).version, record

        def read_text(self, name):
            return self._record

    same, rebuilt = "cutlass/a.py,sha256=1,9\n", "cutlass/a.py,sha256=2,9\n"
    by_another_installer = same + "x.dist-info/INSTALLER,sha256=3,4\ncutlass/a.pyc,,\n"
    for version, record in (("4.8.2", same), (None, same), (None, rebuilt), (None, by_another_installer)):
        monkeypatch.setattr(metadata, "distribution", lambda name, v=version, r=record: Changed("torch", v, r))
        seen.add(again().fingerprint())
    assert len(seen) == 4


@pytest.mark.parametrize(
    ("driver", "chosen"), [(NO_DRIVER, 13), ("13.0", 13), ("14.2", 13), ("12.9", 12), ("11.8", None)], ids=str
)
def test_the_flavour_is_the_newest_that_the_driver_serves(driver, chosen):
    installed = [(12, Path("cu12")), (13, Path("cu13"))]
    assert toolchain.flavour(installed, driver)[0] == chosen


def test_the_flavour_is_the_one_that_the_dsl_chooses():
    import cutlass.base_dsl.version_info as version_info

    assert toolchain.toolchain().flavour == version_info.CUDA_VERSION.major
    assert toolchain.toolchain().runtime.is_file()


def test_reading_it_does_not_import_the_dsl():
    code = "import sys, flexbwd.jit.toolchain as t; t.toolchain().fingerprint(); print('cutlass' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "False"
