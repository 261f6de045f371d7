"""The frame of the command line: help, errors as one line, quiet in a pipe."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize("arguments", [("--help",), ("show", "--help"), ("bench", "--help")], ids=" ".join)
def test_help_lists_options_and_succeeds(command, arguments):
    ended = command(*arguments)
    assert ended.code == 0
    assert "--help" in ended.out


def test_help_loads_no_plotting_and_no_kernel_library():
    code = (
        "import sys; sys.argv = ['flexbwd', '--help']\n"
        "from flexbwd.cli import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "print(sorted({'matplotlib', 'cutlass', 'tvm_ffi', 'attn_gym'} & set(sys.modules)))\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.stdout.splitlines()[-1] == "[]", run.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("show", "no_such_mod"), ["no_such_mod", "causal"]),
        (("show", "causal", "-S", "0"), ["--lengths", "'0'"]),
        (("show", "causal", "--block", "x"), ["--block", "'x'"]),
        (("show", "causal", "--out", "picture.bmp"), ["picture.bmp", ".png"]),
        (("show", "causal", "--window", "4"), ["causal", "--window"]),
        (("show", "sliding_window", "--windw", "4"), ["windw", "window"]),
        (("show", "sliding_window", "--window"), ["--window", "no value"]),
        (("show", "causal", "--score", "causal"), ["--score causal", "mask"]),
        (("show", "softcap", "--score", "alibi"), ["both score mods"]),
        (("show", "causal", "--head", "3"), ["head=3", "1 heads"]),
        (("check", "absent.py:mod"), ["absent.py"]),
        (("check", "causal", "--bwd", "f"), ["mask", "no backward"]),
        (("check", "softcap", "--bwd", "f"), ["'f'"]),
        (("check", "softcap", "--heads", "0"), ["heads=0"]),
        (("bench", "--device", "cuda"), ["cuda", "cpu"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_a_mistake_is_one_line_on_stderr(command, arguments, words):
    ended = command(*arguments)
    assert ended.code == 2
    assert ended.out == ""
    assert len(ended.err.splitlines()) == 1
    assert ended.err.startswith("error: ")
    for word in words:
        assert word in ended.err


def test_zoo_listing_names_every_mod(command):
    from flexbwd import mods

    ended = command("show")
    assert ended.code == 0
    assert set(mods.names()) <= set(ended.out.split())


def test_piped_output_has_no_escape_codes(command):
    ended = command("show")
    assert "\x1b" not in ended.out + ended.err
