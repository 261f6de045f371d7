"""From what a user types to a mod: zoo names, file.py:name, package.module:name."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from flexbwd.errors import OptionError

SCORE, MASK = "score", "mask"


@dataclass(frozen=True)
class Sizes:
    """The problem that a zoo mod is made for."""

    batch: int
    heads: int
    q: int
    kv: int


@dataclass(frozen=True)
class Loaded:
    """A mod, what it is called, whether it is a score mod or a mask, and where it came from."""

    mod: Callable[..., Any]
    name: str
    kind: str
    siblings: Mapping[str, Any]  # what else its module defines; empty for the zoo


def load(spec: str, sizes: Sizes, parameters: Mapping[str, str] | None = None, *, backward: bool = False) -> Loaded:
    """The mod that `spec` names; `parameters` replace arguments of a zoo factory's example.

    With `backward`, a score_mod_bwd of (grad, score, b, h, q_idx, kv_idx) is wanted, and no zoo name will do.

    Raises:
        OptionError: no such zoo name, file, module or attribute; parameters that the factory does not take.
    """
    parameters = parameters or {}
    if ":" not in spec:
        return _from_zoo(spec, sizes, parameters)
    place, _, name = spec.rpartition(":")
    module = _load_file(Path(place)) if place.endswith(".py") else _load_module(place)
    found = getattr(module, name, None)
    if found is None:
        known = [n for n, value in vars(module).items() if callable(value) and not n.startswith("_")]
        raise OptionError(f"{place} has no {name!r}; it defines {', '.join(known) or 'no functions'}")
    if not callable(found):
        raise OptionError(f"{spec} is a {type(found).__name__}; name a mod, which is a function")
    if parameters:
        raise OptionError(
            f"{', '.join(f'--{p}' for p in parameters)}: only zoo mods take parameters; {spec} is used as is"
        )
    return Loaded(found, name, SCORE if backward else _kind_of(found, spec), vars(module))


def parse_parameters(arguments: Sequence[str]) -> dict[str, str]:
    """`["--window", "256", "--x=3"]` as `{"window": "256", "x": "3"}`."""
    found: dict[str, str] = {}
    rest = iter(arguments)
    for argument in rest:
        if not argument.startswith("--"):
            raise OptionError(f"unexpected argument {argument!r}; parameters of a mod are written --name value")
        name, equals, value = argument[2:].partition("=")
        if not equals:
            value = next(rest, "")
        if not value:
            raise OptionError(f"--{name} has no value; write --{name} VALUE")
        found[name.replace("-", "_")] = value
    return found


def parse_pair(text: str, option: str, least: int = 1) -> tuple[int, int]:
    """`"128"` as (128, 128) and `"64,128"` as (64, 128)."""
    try:
        numbers = tuple(int(part) for part in text.split(","))
    except ValueError:
        numbers = ()
    if len(numbers) not in (1, 2) or min(numbers, default=0) < least:
        raise OptionError(f"{option} {text!r} must be one number, or two separated by a comma, of at least {least}")
    return numbers[0], numbers[-1]


# -- the zoo -----------------------------------------------------------------------------------------------------------
def _from_zoo(name: str, sizes: Sizes, parameters: Mapping[str, str]) -> Loaded:
    from flexbwd import mods

    entry = mods.get(name)
    example = entry.example_arguments(sizes.batch, sizes.heads, sizes.q, sizes.kv)
    if not parameters:
        return Loaded(entry.instantiate(example), name, entry.kind, {})
    if entry.arguments is None:
        raise OptionError(f"{name} takes no parameters, got {', '.join(f'--{p}' for p in parameters)}")
    bound = inspect.signature(entry.factory).bind(*example)
    bound.apply_defaults()
    for parameter, text in parameters.items():
        if parameter not in bound.arguments:
            raise OptionError(f"{name} has no parameter {parameter!r}; it takes {inspect.signature(entry.factory)}")
        bound.arguments[parameter] = _value(text, bound.arguments[parameter], f"--{parameter}")
    described = ", ".join(f"{p}={text}" for p, text in parameters.items())
    return Loaded(entry.factory(*bound.args, **bound.kwargs), f"{name}({described})", entry.kind, {})


def _value(text: str, example: Any, option: str) -> Any:
    """`text` as a value of the kind of `example`; "0,100,256" becomes a tensor where one is expected."""
    import torch

    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        value = text
    if isinstance(example, torch.Tensor):
        try:
            return torch.tensor(value, dtype=example.dtype)
        except (TypeError, ValueError, RuntimeError):
            raise OptionError(f"{option} {text!r} must be numbers separated by commas") from None
    if isinstance(example, (int, float, tuple)) and not isinstance(value, (int, float, tuple)):
        raise OptionError(f"{option} {text!r} must be a {type(example).__name__}, like {example!r}")
    return value


# -- the user's own files ----------------------------------------------------------------------------------------------
def _load_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise OptionError(f"there is no file {path}")
    name = f"flexbwd_user_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path.resolve())
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look their module up
    sys.path.insert(0, str(path.resolve().parent))  # the file may import its neighbours, as a script does
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise OptionError(f"{path} cannot be imported: {type(error).__name__}: {error}") from error
    finally:
        sys.path.pop(0)
    return module


def _load_module(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except Exception as error:
        raise OptionError(f"module {name!r} cannot be imported: {type(error).__name__}: {error}") from error


def _kind_of(mod: Callable[..., Any], spec: str) -> str:
    """Score mods take five arguments, (score, b, h, q_idx, kv_idx); masks the last four."""
    try:
        parameters = inspect.signature(mod).parameters.values()
    except (TypeError, ValueError):
        raise OptionError(f"{spec} has no readable signature; wrap it in a function") from None
    required = [
        p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) and p.default is p.empty
    ]
    if len(required) == 5:
        return SCORE
    if len(required) == 4:
        return MASK
    raise OptionError(
        f"{spec} takes {len(required)} arguments; a score mod takes (score, b, h, q_idx, kv_idx) and a mask mod "
        "(b, h, q_idx, kv_idx): name the mod itself, not its factory"
    )
