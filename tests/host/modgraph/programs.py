"""Random mods as straight-line programs, run twice: through a Builder and, unsimplified, by torch itself."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor

from flexbwd.modgraph.ir import BOOL, COMPARE, I32, I64, Builder, DType, F, Node, topological

LANES = 48
_TYPES = {F: torch.float64, I32: torch.int32, I64: torch.int64, BOOL: torch.bool}

#: what each op means, in torch
TORCH: dict[str, Callable[..., Tensor]] = {
    "add": torch.add, "sub": torch.sub, "mul": torch.mul, "div": torch.div, "max": torch.maximum, "min": torch.minimum,
    "pow": torch.pow, "mod": torch.remainder, "fmod": torch.fmod,
    "fdiv": lambda x, y: torch.div(x, y, rounding_mode="floor"),
    "tdiv": lambda x, y: torch.div(x, y, rounding_mode="trunc"), "where": torch.where,
    "and": torch.bitwise_and, "or": torch.bitwise_or, "xor": torch.bitwise_xor,
    "shl": torch.bitwise_left_shift, "shr": torch.bitwise_right_shift,
    "neg": torch.neg, "abs": torch.abs, "sign": torch.sign, "not": torch.bitwise_not, "rcp": torch.reciprocal,
    "detach": lambda x: x.detach(), **{op: getattr(torch, op) for op in COMPARE},
    **{op: getattr(torch, op) for op in (
        "exp", "exp2", "log", "log2", "log1p", "expm1", "sqrt", "rsqrt", "tanh", "sigmoid", "sin", "cos", "tan", "erf",
        "floor", "ceil", "trunc", "round")},
}  # fmt: skip
SMOOTH = ("exp", "exp2", "log", "log2", "log1p", "expm1", "sqrt", "rsqrt", "rcp", "tanh", "sigmoid", "sin", "cos",
          "tan", "erf", "neg", "abs")  # fmt: skip
STEPS = ("floor", "ceil", "trunc", "round", "sign", "detach")
BINARY = ("add", "sub", "mul", "div", "max", "min", "pow", "mod", "fmod", "fdiv", "tdiv")


def run(roots: Sequence[Node], inputs: dict[str, Tensor], loads: dict[Node, Tensor]) -> list[Tensor]:
    """Values of a graph, one torch op per node; `loads` gives each load's lanes."""
    found: dict[Node, Tensor] = {}
    for n in topological(roots):
        args = [found[a] for a in n.args]
        if n.op == "in":
            found[n] = inputs[str(n.attr)]
        elif n.op == "const":
            found[n] = torch.tensor(n.value, dtype=_TYPES[n.dtype])
        elif n.op == "load":
            found[n] = loads[n]
        elif n.op == "cast":
            found[n] = args[0].to(_TYPES[n.dtype])
        else:
            found[n] = TORCH[n.op](*args)
    return [found[r].expand(LANES) for r in roots]


# -- float programs: score, two captured values, a distance -----------------------------------------------------------
@dataclass(frozen=True)
class Step:
    op: str
    args: tuple[int, ...]  # earlier values, by position modulo their number
    number: float = 0.0  # of op "const"


NUMBERS = (0.0, -0.0, 1.0, -1.0, 2.0, 0.5, 3.0, -0.25, 30.0)


@st.composite
def float_programs(draw: st.DrawFn, ops: Sequence[str] = (), size: int = 12) -> list[Step]:
    """Steps over the leaves score, u, v (captured) and d = q_idx − kv_idx."""
    kinds = ops or ("const", "const", *BINARY, *BINARY[:6], "where", "where", *SMOOTH, *STEPS)
    steps = []
    for _ in range(draw(st.integers(1, size))):
        op = draw(st.sampled_from(kinds))
        count = {"const": 0, "where": 4}.get(op, 2 if op in BINARY else 1)
        # values made lately are the likeliest operands, so that graphs are deep
        args = tuple(-1 - min(draw(st.integers(0, 8)), draw(st.integers(0, 8))) for _ in range(count))
        steps.append(Step(op, args, draw(st.sampled_from(NUMBERS)) if op == "const" else 0.0))
    return steps


def build(program: list[Step], b: Builder) -> tuple[Node, list[Node]]:
    """The program as a graph: its result and its leaves score, u, v."""
    score, u, v = b.input("score"), b.load(0, F), b.load(1, F, [b.input("h")])
    values = [score, u, v, b.cast(b.arith("sub", b.input("q_idx"), b.input("kv_idx")), F)]
    for step in program:
        args = [values[a % len(values)] for a in step.args]
        if step.op == "const":
            values.append(b.const(step.number))
        elif step.op == "where":
            values.append(b.where(b.compare("lt", args[0], args[1]), args[2], args[3]))
        else:
            values.append(b.emit(step.op, *args))
    return values[-1], [score, u, v]


def run_in_torch(program: list[Step], leaves: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """The result, differentiable, and where every value on the way is finite and of moderate size."""
    values = list(leaves)
    fine = torch.ones(LANES, dtype=torch.bool)
    for step in program:
        args = [values[a % len(values)] for a in step.args]
        if step.op == "const":
            values.append(torch.full((LANES,), step.number, dtype=torch.float64))
        elif step.op == "where":
            values.append(torch.where(args[0] < args[1], args[2], args[3]))
        else:
            values.append(TORCH[step.op](*args))
        fine &= values[-1].detach().abs() < 1e4  # false for NaN
    return values[-1], fine


def float_leaves(seed: int) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Lanes of score, u, v, d that hold ties, zeros and plain numbers; and the integer inputs."""
    g = torch.Generator().manual_seed(seed)
    special = torch.tensor([0.0, 1.0, -1.0, 0.5, 2.0, -3.0], dtype=torch.float64)

    def lanes() -> Tensor:
        plain = 1.5 * torch.randn(LANES, generator=g, dtype=torch.float64)
        pick = special[torch.randint(len(special), (LANES,), generator=g)]
        return torch.where(torch.rand(LANES, generator=g) < 0.4, pick, plain)

    inputs = int_inputs(seed)
    distance = (inputs["q_idx"] - inputs["kv_idx"]).double()
    return [lanes(), lanes(), lanes(), distance], inputs


def int_inputs(seed: int) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(seed + 1)

    def below(n: int) -> Tensor:
        return torch.randint(n, (LANES,), generator=g, dtype=torch.int32)

    return {"b": below(3), "h": below(4), "q_idx": below(9), "kv_idx": below(9)}


# -- integer programs -------------------------------------------------------------------------------------------------
INTEGERS = (0, 1, 2, 3, -1, -7, 31, 2**31 - 1, -(2**31), 2**40 + 5)
INT_BINARY = ("add", "sub", "mul", "max", "min", "and", "or", "xor", "mod", "fdiv", "tdiv", "fmod", "shl", "shr")
INT_UNARY = ("neg", "abs", "sign", "not")


@st.composite
def int_programs(draw: st.DrawFn, ops: Sequence[str] = (), size: int = 12) -> list[Step]:
    """Steps over b, h, q_idx, kv_idx; divisors and shift counts are constants (`number`)."""
    kinds = ops or ("const", *INT_BINARY, *INT_UNARY, "to_i32", "to_i64", "to_bool", *COMPARE, "where", "bool_not")
    steps = []
    for _ in range(draw(st.integers(1, size))):
        op = draw(st.sampled_from(kinds))
        number = draw(st.sampled_from(INTEGERS))
        if op in ("mod", "fdiv", "tdiv", "fmod"):
            number = draw(st.sampled_from((1, 2, 3, -3, 7, -2)))
        elif op in ("shl", "shr"):
            number = draw(st.sampled_from((0, 1, 4, 31)))
        steps.append(Step(op, tuple(-1 - draw(st.integers(0, 6)) for _ in range(4)), number))
    return steps


def build_int(program: list[Step], b: Builder) -> Node:
    values = [b.input(n) for n in ("b", "h", "q_idx", "kv_idx")]
    for step in program:
        x, y, z, w = (values[a % len(values)] for a in step.args)
        number = int(step.number)
        if step.op == "const":
            values.append(b.const(number))
        elif step.op in ("mod", "fdiv", "tdiv", "fmod", "shl", "shr"):
            x = b.cast(x, I32) if x.dtype is BOOL else x
            values.append(b.emit(step.op, x, b.const(number, x.dtype)))
        elif step.op in COMPARE:
            values.append(b.compare(step.op, x, y))
        elif step.op.startswith("to_"):
            values.append(b.cast(x, DType(step.op[3:])))
        elif step.op == "where":
            values.append(b.where(b.compare("le", x, y), z, w))
        elif step.op == "bool_not":
            values.append(b.emit("not", b.cast(x, BOOL)))
        elif step.op in INT_UNARY:
            values.append(b.emit(step.op, b.cast(x, I32) if x.dtype is BOOL else x))
        else:
            values.append(b.arith(step.op, x, y))
    return values[-1]


def run_int(program: list[Step], inputs: dict[str, Tensor]) -> Tensor:
    values = [inputs[n] for n in ("b", "h", "q_idx", "kv_idx")]
    for step in program:
        x, y, z, w = (values[a % len(values)] for a in step.args)
        x_int = x.int() if x.dtype is torch.bool else x
        number = int(step.number)
        if step.op == "const":
            width = torch.int32 if -(2**31) <= number < 2**31 else torch.int64
            values.append(torch.full((LANES,), number, dtype=width))
        elif step.op in ("mod", "fdiv", "tdiv", "fmod", "shl", "shr"):
            values.append(TORCH[step.op](x_int, torch.full((LANES,), number, dtype=x_int.dtype)))
        elif step.op.startswith("to_"):
            values.append(x.to(_TYPES[DType(step.op[3:])]))
        elif step.op == "where":
            z, w = _promoted(z, w)
            values.append(torch.where(x <= y, z, w))
        elif step.op == "bool_not":
            values.append(~x.bool())
        elif step.op in INT_UNARY:
            values.append(TORCH[step.op](x_int))
        elif step.op in COMPARE:
            values.append(TORCH[step.op](*_promoted(x, y)))
        else:
            x, y = _promoted(x, y)
            if x.dtype is torch.bool and step.op in ("add", "sub", "mul"):
                x, y = x.int(), y.int()
            values.append(TORCH[step.op](x, y))
    return values[-1]


def _promoted(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    common = torch.promote_types(x.dtype, y.dtype)
    return x.to(common), y.to(common)


def same(x: Tensor, y: Tensor) -> bool:
    """Bitwise equal but for the sign of zero and the kind of NaN."""
    return (
        x.dtype == y.dtype and torch.equal(x, y)
        if not x.is_floating_point()
        else torch.equal(x.nan_to_num(nan=math.pi), y.nan_to_num(nan=math.pi))
    )
