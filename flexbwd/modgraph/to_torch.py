"""Graphs as vectorised torch code: the CPU backend, tabulated masks and tests evaluate mods with it.

A `TorchProgram` is compiled once from a set of roots. Coordinates may have any shapes that broadcast together; a value
keeps the broadcast shape of the inputs it depends on, so what depends on a row or a column only stays that small.
Temporaries that die are overwritten in place; that is decided once, from the inputs each value depends on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from .ir import INPUTS, F, Node, topological
from .torch_ops import Kernel, addcmul, kernel_of, read, subcmul, torch_dtype


class TorchProgram:
    """Evaluates `roots` over broadcastable tensors.

    Args:
        roots: nodes of one Builder.
        consume: inputs whose tensors the evaluation may overwrite; they have the full broadcast shape.
    """

    def __init__(self, roots: Sequence[Node], consume: Sequence[str] = ()) -> None:
        self.roots = tuple(roots)
        self.depends = input_dependence(self.roots)
        self.inputs = frozenset().union(*(self.depends[r] for r in self.roots)) if self.roots else frozenset()
        self._consume = frozenset(consume)
        self._compiled: dict[tuple[torch.dtype, torch.device], _Code] = {}

    def __call__(
        self,
        inputs: Mapping[str, Tensor],
        captures: Sequence[Tensor],
        float_dtype: torch.dtype,
        origins: Mapping[str, int] | None = None,
    ) -> list[Tensor]:
        """The roots' values, each of the broadcast shape of the inputs it depends on.

            Args:
                inputs: by name; integers int32, `score` and `grad` of `float_dtype`.
                captures: by load slot; on the inputs' device.
                float_dtype: what `F` means here, fp32 or fp64.
        X
        """
        some = next(iter(inputs.values()), None)
        device = some.device if some is not None else captures[0].device if captures else torch.device("cpu")
        code = self._compiled.get((float_dtype, device))
        if code is None:
            code = _Compiler(self.roots, self.depends, self._consume, float_dtype, device).compile()
            self._compiled[float_dtype, device] = code
        registers = list(code.initial)
        for register, name in code.inputs:
            registers[register] = inputs[name]
        for step in code.steps:
            if step.load is None:
                out = registers[step.reuse] if step.reuse >= 0 else None
                registers[step.target] = step.kernel(*[registers[r] for r in step.operands], out=out)
            else:
                registers[step.target] = _load(step, registers, captures, inputs, origins)
            for r in step.dead:
                registers[r] = None
        return [registers[r] for r in code.results]  # type: ignore[misc]

    def is_fresh(self, root: int) -> bool:
        """May the caller overwrite the value of root number `root`? Not when it is, or views, something else."""
        return next(iter(self._compiled.values())).fresh[root]


def evaluate(
    roots: Sequence[Node], inputs: Mapping[str, Tensor], captures: Sequence[Tensor], float_dtype: torch.dtype
) -> list[Tensor]:
    """`TorchProgram(roots)`, compiled and run once."""
    return TorchProgram(roots)(inputs, captures, float_dtype)


def input_dependence(roots: Sequence[Node]) -> dict[Node, frozenset[str]]:
    """For every node reachable from `roots`, the inputs whose values it reads, also through load indices."""
    depends: dict[Node, frozenset[str]] = {}
    for node in topological(roots):
        own = frozenset({str(node.attr)}) if node.op == "in" else frozenset()
        depends[node] = own.union(*(depends[a] for a in node.args))
    return depends


# -- compiled form -----------------------------------------------------------------------------------------------------
class Run(NamedTuple):
    """An index of the form `name + offset`; name "" for a constant."""

    name: str
    offset: int


@dataclass(frozen=True)
class _LoadSpec:
    slot: int
    dtype: torch.dtype
    runs: tuple[Run, ...] | None  # per dimension, when all are runs of different inputs


class _Step(NamedTuple):
    kernel: Kernel
    operands: tuple[int, ...]  # registers
    target: int
    reuse: int  # register whose tensor is overwritten with the result, or -1
    dead: tuple[int, ...]  # registers nobody reads afterwards
    load: _LoadSpec | None


class _Code(NamedTuple):
    initial: list[Tensor | None]  # registers, constants filled in
    inputs: list[tuple[int, str]]
    steps: list[_Step]
    results: list[int]
    fresh: tuple[bool, ...]  # by root: nothing else refers to its tensor


class _Compiler:
    def __init__(
        self,
        roots: tuple[Node, ...],
        depends: dict[Node, frozenset[str]],
        consume: frozenset[str],
        float_dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.roots, self.consume, self.float_dtype, self.device = roots, consume, float_dtype, device
        # an input that may be consumed has the full shape, whatever else is read beside it
        self.shape = {n: frozenset(INPUTS) if d & consume else d for n, d in depends.items()}
        self.register: dict[Node, int] = {}
        self.owner: list[Node] = []  # by register
        self.owned: set[int] = set()  # registers whose tensors the program may overwrite

    def compile(self) -> _Code:
        fused = _fusable_products(self.roots)
        plan: list[tuple[Node, tuple[Node, ...], Kernel]] = []
        for node in topological(self.roots):
            if node in fused:
                continue
            self._declare(node)
            if node.op not in ("in", "const", "detach"):
                plan.append((node, *self._lower(node, fused)))
        last_use: dict[int, int] = {}
        for position, (_, args, _) in enumerate(plan):
            last_use.update((self.register[a], position) for a in args)
        results = [self.register[r] for r in self.roots]
        steps = [self._step(i, *entry, last_use, frozenset(results)) for i, entry in enumerate(plan)]
        initial = [self._constant(n) if n.op == "const" else None for n in self.owner]
        inputs = [(r, str(n.attr)) for r, n in enumerate(self.owner) if n.op == "in"]
        fresh = tuple(r in self.owned and results.count(r) == 1 for r in results)
        return _Code(initial, inputs, steps, results, fresh)

    def _declare(self, node: Node) -> None:
        """Give `node` a register; a detach shares its operand's."""
        if node.op == "detach":
            self.register[node] = self.register[node.args[0]]
            return
        self.register[node] = len(self.owner)
        # a load may be a view of the capture, so it is not ours to overwrite
        if (node.op == "in" and node.attr in self.consume) or node.op not in ("in", "const", "load"):
            self.owned.add(len(self.owner))
        self.owner.append(node)

    def _constant(self, node: Node) -> Tensor:
        return torch.tensor(node.value, dtype=torch_dtype(node.dtype, self.float_dtype), device=self.device)

    def _lower(self, node: Node, fused: set[Node]) -> tuple[tuple[Node, ...], Kernel]:
        """Operands and kernel; a float sum with a product read nowhere else is one addcmul."""
        if node.op in ("add", "sub"):
            for i in (1, 0) if node.op == "add" else (1,):
                if node.args[i] in fused:
                    return (node.args[1 - i], *node.args[i].args), addcmul if node.op == "add" else subcmul
        return node.args, read if node.op == "load" else kernel_of(node, self.float_dtype)

    def _step(
        self,
        position: int,
        node: Node,
        args: tuple[Node, ...],
        kernel: Kernel,
        last_use: dict[int, int],
        kept: frozenset,
    ) -> _Step:
        target = self.register[node]
        operands = tuple(self.register[a] for a in args)
        dead = tuple(r for r in dict.fromkeys(operands) if last_use[r] == position and r not in kept)
        if node.op == "load":
            spec = _LoadSpec(int(node.attr), torch_dtype(node.dtype, self.float_dtype), index_runs(args))  # type: ignore
            return _Step(kernel, operands, target, -1, dead, spec)
        fits = (
            r
            for r in dead
            if r in self.owned and self.owner[r].dtype is node.dtype and self.shape[self.owner[r]] == self.shape[node]
        )
        return _Step(kernel, operands, target, next(fits, -1), dead, None)


def _fusable_products(roots: Sequence[Node]) -> set[Node]:
    """Float products read once, by an add or as a subtrahend; at most one per sum."""
    uses: dict[Node, int] = dict.fromkeys(roots, 2)
    nodes = list(topological(roots))
    for node in nodes:
        for a in node.args:
            uses[a] = uses.get(a, 0) + 1
    fused: set[Node] = set()
    for node in nodes:
        if node.dtype is F and node.op in ("add", "sub") and node.args[0] is not node.args[1]:
            candidates = node.args[::-1] if node.op == "add" else node.args[1:]
            found = next((a for a in candidates if a.op == "mul" and uses[a] == 1), None)
            if found is not None:
                fused.add(found)
    return fused


# -- loads -------------------------------------------------------------------------------------------------------------
def index_runs(index: Sequence[Node]) -> tuple[Run, ...] | None:
    """The indices as runs of different inputs, or None."""
    found = [index_run(i) for i in index]
    names = [r.name for r in found if r is not None and r.name]
    if not names or len(set(names)) != len(names) or None in found:
        return None
    return tuple(found)  # type: ignore[arg-type]


def index_run(node: Node) -> Run | None:
    """`node` as `input + constant`, a constant, or None."""
    if node.op == "in":
        return Run(str(node.attr), 0)
    if node.op == "const" and node.dtype.is_int:
        return Run("", int(node.value))
    if node.op == "cast" and node.dtype.is_int and node.args[0].dtype.is_int:
        return index_run(node.args[0])
    if node.op == "add" and node.dtype.is_int:
        x, y = index_run(node.args[0]), index_run(node.args[1])
        if x is not None and y is not None and not (x.name and y.name):
            return Run(x.name or y.name, x.offset + y.offset)
    return None


def run_view(
    tensor: Tensor, runs: Sequence[Run], inputs: Mapping[str, Tensor], origins: Mapping[str, int]
) -> Tensor | None:
    """The elements of `tensor` that the index `runs` address, as a view of the inputs' broadcast shape.

    None when an index leaves the tensor, or an input is no run of consecutive integers.
    """
    offset = tensor.storage_offset()
    shapes = []
    for run in runs:
        if run.name and run.name not in origins:
            return None
        shapes.append(inputs[run.name].shape if run.name else ())
    ndim = max(map(len, shapes))
    shape, strides = [1] * ndim, [0] * ndim
    for run, extent, stride, size in zip(runs, tensor.shape, tensor.stride(), shapes, strict=True):
        first = origins[run.name] + run.offset if run.name else run.offset
        count = 1
        for back, n in enumerate(reversed(size), start=1):
            if n != 1:
                shape[-back], strides[-back], count = n, stride * count, count * n
        if first < 0 and not run.name and first + extent >= 0:
            first += extent
        if first < 0 or first + count > extent:
            return None
        offset += first * stride
    return tensor.as_strided(shape, strides, offset)


def _load(
    step: _Step,
    registers: Sequence[Tensor | None],
    captures: Sequence[Tensor],
    inputs: Mapping[str, Tensor],
    origins: Mapping[str, int] | None,
) -> Tensor:
    spec = step.load
    assert spec is not None
    capture = captures[spec.slot]
    if origins is not None and spec.runs is not None:
        view = run_view(capture, spec.runs, inputs, origins)
        if view is not None:
            return view.to(spec.dtype)
    return read(capture, [registers[r] for r in step.operands], spec.dtype)  # type: ignore[misc]
