"""Run a mod once on scalars that stand for its arguments, and keep what it computes as a graph."""

from __future__ import annotations

import enum
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from flexbwd.errors import (
    ModBoundsError,
    ModCaptureError,
    ModDtypeError,
    ModError,
    ModShapeError,
    ModSignatureError,
    ModTraceError,
)

from .importer import Importer
from .ir import Builder, F, Node, canonical_hash, topological
from .locate import defined_at, error_line, name_of, unwrap
from .modes import IndexMode, RecordMode
from .modplan import CaptureSpec
from .prologue import Prologue, Register, prune
from .recorder import Recorder, quiet_fakes
from .values import ir_dtype

Mod = Callable[..., Any]


class ModKind(enum.Enum):
    """What a callable is for, which fixes its arguments."""

    SCORE = "score_mod"
    MASK = "mask_mod"
    SCORE_BWD = "score_mod_bwd"

    @property
    def arguments(self) -> tuple[str, ...]:
        return _ARGUMENTS[self]


_ARGUMENTS = {
    ModKind.SCORE: ("score", "b", "h", "q_idx", "kv_idx"),
    ModKind.MASK: ("b", "h", "q_idx", "kv_idx"),
    ModKind.SCORE_BWD: ("grad", "score", "b", "h", "q_idx", "kv_idx"),
}


@dataclass(frozen=True, eq=False)
class TracedMod:
    """A mod as a graph. One object per distinct mod: equal fingerprints give the same object.

    Attributes:
        name, where: the callable's name, and `file:line` of its definition.
        output: F for score mods, BOOL for mask mods.
        captures: what each load slot reads, after the prologue.
        prologue: user's captured tensors -> the tensors that load slots read.
        source_lines: user's `file:line` of a node, where known.
        narrowed: names of float64 values that fp32 arithmetic would take.
        device: where it was traced for.
        signature: equal for equal graphs, prologues and capture facts.
    """

    kind: ModKind
    name: str
    where: str
    builder: Builder
    output: Node
    captures: tuple[CaptureSpec, ...]
    prologue: Prologue
    source_lines: dict[Node, str] = field(default_factory=dict)
    narrowed: tuple[str, ...] = ()
    signature: str = ""
    device: torch.device | None = None


def trace_once(
    mod: Mod, kind: ModKind, device: torch.device, names: dict[int, str]
) -> tuple[TracedMod, tuple[Tensor, ...]]:
    """The graph of `mod` and the captured tensors it uses, in the prologue's order.

    Args:
        names: how the user calls a captured tensor, by the tensor's id.
    Raises:
        ModError: every class of it; the message names the mod, the line, the operation and the remedy.
    """
    name = name_of(mod)
    check_arity(mod, kind, name)
    recorder = Importer(name, device, names)
    output = _run(unwrap(mod), kind, recorder)
    node = _checked_result(output, kind, recorder, defined_at(mod))
    return _finish(mod, kind, recorder, node)


def check_arity(mod: Mod, kind: ModKind, name: str) -> None:
    """Does `mod` take the positional arguments that its kind is called with?"""
    if not callable(mod):
        raise ModSignatureError(f"{kind.value} is a {type(mod).__name__}, not a callable", mod=name)
    try:
        signature = inspect.signature(unwrap(mod))
    except (TypeError, ValueError):
        return
    try:
        signature.bind(*kind.arguments)
    except TypeError as error:
        expected = f"({', '.join(kind.arguments)})"
        problem = f"{kind.value} takes {signature}, but is called with {expected}: {error}"
        remedy = f"define it as def {name if name.isidentifier() else 'mod'}{expected}"
        raise ModSignatureError(problem, mod=name, where=defined_at(mod), remedy=remedy) from None


def _same(x: Any) -> Any:
    return x


def _run(mod: Mod, kind: ModKind, recorder: Importer) -> Any:
    kinds = {"score": torch.float32, "grad": torch.float32}
    autocast = torch.autocast(recorder.device.type, enabled=False)
    # hooks of our own hide those outside: activation checkpointing would count what a trace saves, and only the first
    # call of a mod is traced
    unhooked = torch.autograd.graph.saved_tensors_hooks(_same, _same)
    normal = torch.inference_mode(False)
    with _disable_current_modes(), normal, torch.enable_grad(), autocast, unhooked, quiet_fakes():
        arguments = [recorder.input(a, kinds.get(a, torch.int32)) for a in kind.arguments]
        try:
            # the fake mode below: with it, torch makes no tensor on a device this machine may lack
            with recorder.fake_mode, RecordMode(recorder), IndexMode(recorder):
                return mod(*arguments)
        except ModError:
            raise
        except IndexError as error:
            raise ModBoundsError(f"{error}", mod=recorder.mod, where=error_line(error)) from error
        except Exception as error:
            problem = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            remedy = "the original error is chained above"
            raise ModTraceError(problem, mod=recorder.mod, where=error_line(error), remedy=remedy) from error


def _checked_result(output: Any, kind: ModKind, recorder: Recorder, where: str) -> Node:
    """The scalar node a mod returned, of its kind's type."""
    is_mask = kind is ModKind.MASK
    if is_mask and isinstance(output, (bool, int)):
        problem = f"mask_mod returned the Python {type(output).__name__} {output}, not a bool tensor"
        remedy = "return a comparison of its arguments; for a constant, torch.ones_like(q_idx, dtype=torch.bool)"
        raise ModDtypeError(problem, mod=recorder.mod, where=where, remedy=remedy)
    if not isinstance(output, Tensor):
        shown = "None (is a return missing?)" if output is None else f"a {type(output).__name__}"
        problem = f"{kind.value} returned {shown}, not one scalar tensor"
        remedy = "return one tensor computed from the arguments"
        raise ModSignatureError(problem, mod=recorder.mod, where=where, remedy=remedy)
    value = recorder.value(output)
    if value.shape:
        problem = f"{kind.value} returned a tensor of shape {list(value.shape)}, not a scalar"
        remedy = "index captured tensors by every dimension, as in table[h, q_idx - kv_idx]"
        raise ModShapeError(problem, mod=recorder.mod, where=where, remedy=remedy)
    if is_mask != (value.dtype == torch.bool):
        rule = "must return bool" if is_mask else "must return a number, not bool"
        remedy = "write a comparison, as in x != 0" if is_mask else "that is a mask: pass it as mask_mod, or .float()"
        problem = f"{kind.value} returned {value.dtype}; it {rule}"
        raise ModDtypeError(problem, mod=recorder.mod, where=where, remedy=remedy)
    if ir_dtype(value.dtype) is None:
        raise ModDtypeError(f"{kind.value} returned {value.dtype}; return a real float", mod=recorder.mod, where=where)
    node = value.scalar()
    return node if is_mask else recorder.builder.cast(node, F)


def _finish(mod: Mod, kind: ModKind, recorder: Recorder, output: Node) -> tuple[TracedMod, tuple[Tensor, ...]]:
    """Only what the output needs, in a Builder of its own, load slots numbered by first use."""
    builder = Builder()
    copies: dict[Node, Node] = {}
    slots: dict[int, int] = {}  # the recorder's to the new one
    for node in topological([output]):
        args = [copies[a] for a in node.args]
        if node.op == "load":
            slot = slots.setdefault(int(node.attr), len(slots))  # type: ignore[call-overload]
            copies[node] = builder.load(slot, node.dtype, args)
        else:
            copies[node] = builder.rebuild(node, args)
    registers = [recorder.slots[old] for old in slots]
    prologue, used = prune(recorder.steps, registers)
    specs = tuple(_spec(recorder, r) for r in registers)
    if kind is ModKind.MASK:
        _check_mask_captures(recorder, output, slots, specs)
    narrowed = [f"captured tensor {s.name}" for s in specs if s.dtype == torch.float64]
    facts = (
        kind.value,
        str(recorder.device),
        prologue.text(),
        tuple((s.dtype, s.shape, s.requires_grad) for s in specs),
    )
    traced = TracedMod(
        kind=kind,
        name=recorder.mod,
        where=defined_at(mod),
        builder=builder,
        output=copies[output],
        captures=specs,
        prologue=prologue,
        source_lines={copies[n]: line for n, line in recorder.lines.items() if n in copies},
        narrowed=tuple(dict.fromkeys([*narrowed, *recorder.narrowed])),
        signature=canonical_hash([copies[output]], facts),
        device=recorder.device,
    )
    return traced, tuple(recorder.captures[i] for i in used)


def _spec(recorder: Recorder, register: Register) -> CaptureSpec:
    tensor = recorder.tensors[register]
    shape = tuple(int(n) for n in tensor.shape)
    return CaptureSpec(recorder.names[register], tensor.dtype, shape, tensor.requires_grad)


def _check_mask_captures(
    recorder: Recorder, output: Node, slots: Mapping[int, int], specs: Sequence[CaptureSpec]
) -> None:
    """No gradient can flow through a mask, so none may be asked for; `detach` says that it is meant."""
    stack, seen = [output], set()
    while stack:
        node = stack.pop()
        if node in seen or node.op == "detach":
            continue
        seen.add(node)
        stack += node.args
        spec = specs[slots[int(node.attr)]] if node.op == "load" else None  # type: ignore[call-overload]
        if spec is not None and spec.requires_grad:
            problem = f"mask_mod reads {spec.name}, which requires grad, but a mask has no gradient"
            remedy = f"write {spec.name}.detach() in the mask, or move the term into score_mod"
            where = recorder.lines.get(node, "")
            raise ModCaptureError(problem, mod=recorder.mod, where=where, remedy=remedy)
