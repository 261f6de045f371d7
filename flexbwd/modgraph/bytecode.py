"""Which names a function reads: found once per code object, from its bytecode.

A recipe lists the closure cells, global names and (for methods) the attributes of `self` that the code and the code
inside it load, each with the attribute chains that follow: `cfg.window` reads `window` of `cfg` and nothing else of it,
while a bare `cfg` may read anything. What cannot be followed makes the recipe opaque.
"""

from __future__ import annotations

import dis
import sys
import threading
from dataclasses import dataclass
from types import CodeType
from typing import NamedTuple

from .locate import is_trusted_module


class Chain(NamedTuple):
    """Attributes read one after the other, and whether the result is called at once."""

    attrs: tuple[str, ...] = ()
    called: bool = False


Chains = tuple[Chain, ...]


@dataclass(frozen=True, eq=False)
class Recipe:
    """What to look at when a function with this code is fingerprinted."""

    code: CodeType
    cells: tuple[tuple[int, str, Chains], ...]  # (position in __closure__, name, chains)
    globals: tuple[tuple[str, Chains], ...]
    self_chains: Chains  # of the first argument
    opaque: bool  # may read or change what no recipe can list


_GLOBAL = ("LOAD_GLOBAL", "LOAD_NAME")
_DEREF = ("LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_FROM_DICT_OR_DEREF")
_ATTR = ("LOAD_ATTR", "LOAD_METHOD")
_STORES = ("STORE_GLOBAL", "DELETE_GLOBAL", "STORE_ATTR", "DELETE_ATTR")
_BETWEEN = ("EXTENDED_ARG", "CACHE", "PRECALL")

_Reads = dict[str, dict[Chain, None]]  # name -> chains, in order of first use

_recipes: dict[int, Recipe] = {}
_RECIPES = 8192
_lock = threading.Lock()


def recipe_of(code: CodeType) -> Recipe:
    """The recipe of `code`, remembered by identity (the recipe keeps the code alive)."""
    found = _recipes.get(id(code))
    if found is None:
        found = _Scan(code).recipe()
        with _lock:
            if len(_recipes) >= _RECIPES:
                _recipes.clear()
            _recipes[id(code)] = found
    return found


class _Scan:
    """Collects the reads of one code object and of the code objects inside it."""

    def __init__(self, code: CodeType) -> None:
        self.code = code
        self.first = code.co_varnames[0] if code.co_argcount else ""
        self.cells: _Reads = {}
        self.globals: _Reads = {}
        self.first_argument: _Reads = {}
        self.opaque = False

    def recipe(self) -> Recipe:
        self._scan(self.code, frozenset(self.code.co_freevars), top=True)
        free = self.code.co_freevars
        return Recipe(
            self.code,
            tuple((i, name, tuple(self.cells[name])) for i, name in enumerate(free) if name in self.cells),
            tuple((name, tuple(chains)) for name, chains in self.globals.items()),
            tuple(self.first_argument.get(self.first, ())),
            self.opaque,
        )

    def _scan(self, code: CodeType, outer: frozenset[str], *, top: bool) -> None:
        """`outer`: the free variables that are free in the outermost code too."""
        loads = [i for i in dis.get_instructions(code) if i.opname not in _BETWEEN]
        for at, ins in enumerate(loads):
            found = self._table(ins, outer, top)
            if found is not None:
                table, name = found
                table.setdefault(name, {})[_chain(loads, at)] = None
            self.opaque = self.opaque or _is_opaque(ins, outer)
        for const in code.co_consts:
            if isinstance(const, CodeType):
                self._scan(const, outer.intersection(const.co_freevars), top=False)

    def _table(self, ins: dis.Instruction, outer: frozenset[str], top: bool) -> tuple[_Reads, str] | None:
        """Where a load of something from outside is noted, and under which name."""
        name = ins.argval
        if ins.opname in _GLOBAL:
            return self.globals, name
        if ins.opname in _DEREF and name in outer:
            return self.cells, name
        # the first argument: a local here, a free variable of the code inside
        is_load = ins.opname in _DEREF or (top and ins.opname.startswith("LOAD_FAST"))
        names = name if isinstance(name, tuple) else (name,)  # 3.13 loads two at once
        return (self.first_argument, self.first) if is_load and self.first and self.first in names else None


def _is_opaque(ins: dis.Instruction, outer: frozenset[str]) -> bool:
    """Does the instruction write outside the function, or bring in a module that may mean anything?"""
    if ins.opname == "IMPORT_NAME":
        return not is_trusted_module(ins.argval)
    return ins.opname in _STORES or (ins.opname == "STORE_DEREF" and ins.argval in outer)


def _chain(loads: list[dis.Instruction], at: int) -> Chain:
    """The attributes loaded right after instruction `at`."""
    attrs, end = [], at + 1
    while end < len(loads) and loads[end].opname in _ATTR:
        attrs.append(loads[end].argval)
        end += 1
    return Chain(tuple(attrs), _is_called(loads, at, end))


def _is_called(loads: list[dis.Instruction], first: int, end: int) -> bool:
    """Is what instructions first..end-1 load the callee of a call? Python 3.10 marks method calls only."""
    last = loads[end - 1]
    if last.opname == "LOAD_METHOD" or "NULL" in last.argrepr.replace(str(last.argval), ""):
        return True
    marker = end if sys.version_info >= (3, 13) else first - 1
    return 0 <= marker < len(loads) and loads[marker].opname == "PUSH_NULL"
