"""The prologue: what a mod computes from its captured tensors alone.

`exp(slopes)[h]` reads a derived tensor `exp(slopes)`, which plain torch computes once per call, under autograd, so that
a gradient of the derived tensor reaches the user's leaf through torch. Steps are single operators with fixed arguments;
a value is named by its `Register`: (step, position in its result), where step -1-i is the user's i-th captured tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor


class Register(NamedTuple):
    """A value the prologue holds."""

    step: int  # >= 0: a step's result; negative: captured tensor -1-step
    item: int = 0  # which result, of a step with several


@dataclass(frozen=True, eq=False)
class Step:
    """One operator call; a `Register` among the arguments stands for its value."""

    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...] = ()
    detach: bool = False  # the call was made under no_grad

    def run(self, inputs: Sequence[Tensor], results: Sequence[tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        args = [_fill(a, inputs, results) for a in self.args]
        kwargs = {k: _fill(a, inputs, results) for k, a in self.kwargs}
        out = self.func(*args, **kwargs)
        out = (out,) if isinstance(out, Tensor) else tuple(out)
        return tuple([o.detach() for o in out]) if self.detach else out


@dataclass(frozen=True, eq=False)
class Prologue:
    """User's captured tensors -> derived captures, one per load slot."""

    inputs: int
    steps: tuple[Step, ...]
    outputs: tuple[Register, ...]

    @property
    def is_identity(self) -> bool:
        """Are the derived captures the captured tensors themselves, in order?"""
        return not self.steps and self.outputs == tuple(Register(-1 - i) for i in range(self.inputs))

    def run(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The derived captures. Differentiable, and straight-line for torch.compile."""
        results: list[tuple[Tensor, ...]] = []
        for step in self.steps:
            results.append(step.run(tensors, results))
        return tuple([_read(r, tensors, results) for r in self.outputs])

    def text(self) -> str:
        """A full description: equal for equal prologues."""
        parts = [f"{self.inputs}"]
        parts += [f"{s.func}{_text(s.args)}{_text(s.kwargs)}{s.detach}" for s in self.steps]
        return ";".join([*parts, repr(self.outputs)])


def _read(r: Register, inputs: Sequence[Tensor], results: Sequence[tuple[Tensor, ...]]) -> Tensor:
    return inputs[-1 - r.step] if r.step < 0 else results[r.step][r.item]


def _fill(arg: Any, inputs: Sequence[Tensor], results: Sequence[tuple[Tensor, ...]]) -> Any:
    if isinstance(arg, Register):
        return _read(arg, inputs, results)
    if isinstance(arg, (list, tuple)):
        return [_fill(a, inputs, results) for a in arg]
    return arg


def _text(arg: Any) -> str:
    if isinstance(arg, Tensor):  # a literal of the mod's own text
        return f"tensor({arg.dtype},{tuple(arg.shape)},{arg.device},{arg.tolist()})"
    if isinstance(arg, (list, tuple)) and not isinstance(arg, Register):
        return f"({','.join(map(_text, arg))})"
    return repr(arg)


def registers_in(arg: Any) -> list[Register]:
    """Registers named anywhere in an argument."""
    if isinstance(arg, Register):
        return [arg]
    if isinstance(arg, (list, tuple)):
        return [r for a in arg for r in registers_in(a)]
    return []


def prune(steps: Sequence[Step], outputs: Sequence[Register]) -> tuple[Prologue, list[int]]:
    """A prologue of only what `outputs` need, and which captured tensors it takes, in its order."""
    needed: set[int] = set()
    stack = [r.step for r in outputs]
    while stack:
        step = stack.pop()
        if step not in needed:
            needed.add(step)
            if step >= 0:
                stack += [r.step for r in registers_in((steps[step].args, steps[step].kwargs))]
    inputs = sorted(-1 - s for s in needed if s < 0)
    move = {-1 - old: -1 - new for new, old in enumerate(inputs)}
    kept = [s for s in sorted(needed) if s >= 0]
    move.update({old: new for new, old in enumerate(kept)})

    def renamed(arg: Any) -> Any:
        if isinstance(arg, Register):
            return Register(move[arg.step], arg.item)
        return tuple(renamed(a) for a in arg) if isinstance(arg, (list, tuple)) else arg

    new_steps = tuple(Step(s.func, renamed(s.args), renamed(s.kwargs), s.detach) for s in (steps[i] for i in kept))
    return Prologue(len(inputs), new_steps, tuple(renamed(r) for r in outputs)), inputs
