"""What a user types finds the right mod."""

from __future__ import annotations

import pytest
import torch

from flexbwd.cli.load import Sizes, load, parse_pair, parse_parameters
from flexbwd.errors import OptionError

SIZES = Sizes(batch=2, heads=4, q=64, kv=64)
FILE = """
import torch
from neighbour import LIMIT

def capped(score, b, h, q_idx, kv_idx):
    return LIMIT * torch.tanh(score / LIMIT)

def capped_bwd(grad, score, b, h, q_idx, kv_idx):
    return grad

def near(b, h, q_idx, kv_idx, radius=3):
    return (q_idx - kv_idx).abs() <= radius

def factory(size):
    return near

number = 3
"""


@pytest.fixture
def file(tmp_path):
    (tmp_path / "neighbour.py").write_text("LIMIT = 7.0\n")
    (tmp_path / "mine.py").write_text(FILE)
    return tmp_path / "mine.py"


@pytest.mark.parametrize(("name", "kind"), [("capped", "score"), ("near", "mask")])
def test_a_file_gives_its_mod_and_kind(file, name, kind):
    loaded = load(f"{file}:{name}", SIZES)
    assert (loaded.name, loaded.kind) == (name, kind)
    assert "capped_bwd" in loaded.siblings


def test_a_file_may_import_its_neighbours(file):
    capped = load(f"{file}:capped", SIZES).mod
    assert float(capped(torch.tensor(1e9), 0, 0, 0, 0)) == 7.0


def test_a_module_path_gives_a_mod():
    assert load("flexbwd.mods:causal", SIZES).kind == "mask"


def test_every_zoo_name_loads_with_its_kind():
    from flexbwd import mods

    for entry in mods.zoo():
        loaded = load(entry.name, SIZES)
        assert loaded.kind == entry.kind
        assert callable(loaded.mod)


@pytest.mark.parametrize("window", [0, 5])
def test_zoo_parameters_replace_the_example(window):
    mask = load("sliding_window", SIZES, {"window": str(window)}).mod
    distance = torch.arange(8)
    assert mask(0, 0, distance, torch.tensor(0)).tolist() == (distance <= window).tolist()


def test_tensor_parameters_are_read_as_lists():
    mask = load("document", SIZES, {"ids": "0,0,1,1"}).mod
    assert bool(mask(0, 0, torch.tensor(2), torch.tensor(3)))
    assert not bool(mask(0, 0, torch.tensor(1), torch.tensor(2)))


@pytest.mark.parametrize(
    ("name", "words"),
    [("absent", ["absent", "capped", "near"]), ("number", ["int"]), ("factory", ["1 arguments", "factory"])],
)
def test_what_is_no_mod_is_refused(file, name, words):
    with pytest.raises(OptionError) as error:
        load(f"{file}:{name}", SIZES)
    for word in words:
        assert word in str(error.value)


def test_a_file_that_raises_is_named_with_its_error(tmp_path):
    (tmp_path / "broken.py").write_text("1 / 0\n")
    with pytest.raises(OptionError, match=r"broken\.py cannot be imported: ZeroDivisionError"):
        load(f"{tmp_path / 'broken.py'}:mod", SIZES)


def test_parameters_of_a_file_are_refused(file):
    with pytest.raises(OptionError, match="--window: only zoo mods"):
        load(f"{file}:near", SIZES, {"window": "3"})


@pytest.mark.parametrize(("text", "pair"), [("128", (128, 128)), ("64,128", (64, 128))])
def test_pairs(text, pair):
    assert parse_pair(text, "--block") == pair


@pytest.mark.parametrize("text", ["", "0", "1,2,3", "a", "1,,2", "-4"])
def test_bad_pairs_are_refused(text):
    with pytest.raises(OptionError, match="--block"):
        parse_pair(text, "--block")


def test_parameter_spellings():
    got = parse_parameters(["--window", "4", "--block-size=16", "--offset", "-3"])
    assert got == {"window": "4", "block_size": "16", "offset": "-3"}


@pytest.mark.parametrize("arguments", [["4"], ["--x"], ["--x="]])
def test_bad_parameters_are_refused(arguments):
    with pytest.raises(OptionError):
        parse_parameters(arguments)
