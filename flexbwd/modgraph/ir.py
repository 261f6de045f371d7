"""The mod compiler's typed scalar graph.

A mod is a function of one score element; its graph is a DAG of `Node`s over the inputs `score, b, h, q_idx, kv_idx`
(and `grad` for a hand-written backward), constants, and `load`s from captured tensors. Nodes are hash-consed by their
`Builder`: two equal expressions are one object, so equality is identity, and sharing is free.

Types: `F` (fp32; fp64 where query is fp64), `I32`, `I64`, `BOOL`. Operands of arithmetic and comparisons have one
type: `Builder.arith` and `Builder.compare` insert the casts torch's promotion asks for. Meaning is torch's throughout:
`fdiv` and `mod` round to minus infinity, `tdiv` and `fmod` truncate, `max`/`min` propagate NaN, `round` is
half-to-even.
"""

from __future__ import annotations

import enum
import hashlib
import math
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from flexbwd.errors import ModDtypeError

Number = bool | int | float


class DType(enum.Enum):
    F = "f"
    I32 = "i32"
    I64 = "i64"
    BOOL = "bool"

    @property
    def is_int(self) -> bool:
        return self in (DType.I32, DType.I64)


F, I32, I64, BOOL = DType.F, DType.I32, DType.I64, DType.BOOL
_RANK = {BOOL: 0, I32: 1, I64: 2, F: 3}

INPUTS = {"score": F, "grad": F, "b": I32, "h": I32, "q_idx": I32, "kv_idx": I32}

#: op -> arity. `in`, `const`, `load` carry their payload in `attr` (input name, number, capture slot).
LEAVES = ("in", "const")
ARITH = ("add", "sub", "mul", "max", "min", "pow", "fdiv", "tdiv", "mod", "fmod", "and", "or", "xor", "shl", "shr")
COMPARE = ("eq", "ne", "lt", "le", "gt", "ge")
UNARY_F = (
    "exp", "exp2", "log", "log2", "log1p", "expm1", "sqrt", "rsqrt", "rcp", "tanh", "sigmoid", "sin", "cos", "tan",
    "erf", "floor", "ceil", "trunc", "round",
)  # fmt: skip
UNARY = ("neg", "abs", "sign", "not", *UNARY_F)
ARITY: dict[str, int | None] = {
    **dict.fromkeys(LEAVES, 0),
    "load": None,
    "cast": 1,
    "detach": 1,
    "div": 2,
    "where": 3,
    **dict.fromkeys(ARITH, 2),
    **dict.fromkeys(COMPARE, 2),
    **dict.fromkeys(UNARY, 1),
}
COMMUTATIVE = frozenset({"add", "mul", "max", "min", "and", "or", "xor", "eq", "ne"})


@dataclass(frozen=True, eq=False, slots=True)
class Node:
    """One typed value. Made only by a `Builder`; compare with `is`."""

    op: str
    dtype: DType
    args: tuple[Node, ...]
    attr: Hashable
    serial: int

    @property
    def is_const(self) -> bool:
        return self.op == "const"

    def is_value(self, value: Number) -> bool:
        """Is this the constant `value`?"""
        return self.op == "const" and self.attr == value

    @property
    def value(self) -> Number:
        assert self.op == "const"
        return self.attr  # type: ignore[return-value]

    def __repr__(self) -> str:
        return to_text(self)


def promote(*dtypes: DType) -> DType:
    """torch's result type of mixed operands, in this IR's four types."""
    return max(dtypes, key=_RANK.__getitem__)


class Builder:
    """Makes and interns nodes, folding constants and the identities that property detection needs."""

    def __init__(self) -> None:
        self._table: dict[tuple, Node] = {}

    # -- leaves ---------------------------------------------------------------------------------------------------
    def input(self, name: str) -> Node:
        return self._intern("in", INPUTS[name], (), name)

    def const(self, value: Number, dtype: DType | None = None) -> Node:
        """A number; one that an integer `dtype` cannot hold wraps, as in torch."""
        if dtype is None:
            dtype = BOOL if isinstance(value, bool) else F if isinstance(value, float) else _int_dtype(value)
        value = wrap(int(value), dtype) if dtype.is_int else float(value) if dtype is F else bool(value)
        return self._intern("const", dtype, (), value)

    def load(self, slot: int, dtype: DType, index: Sequence[Node] = ()) -> Node:
        """Element `index` (integers, one per dimension) of captured tensor `slot`."""
        return self._intern("load", dtype, tuple(index), slot)

    # -- typed construction ---------------------------------------------------------------------------------------
    def cast(self, x: Node, dtype: DType) -> Node:
        while x.op == "cast" and _keeps_value(x):  # the value seen through a widening cast
            x = x.args[0]
        if x.dtype is dtype:
            return x
        if x.is_const and not (dtype.is_int and x.dtype is F and not _fits(x.value, dtype)):
            return self.const(x.value, dtype)
        return self._intern("cast", dtype, (x,), None)

    def arith(self, op: str, x: Node, y: Node) -> Node:
        """A binary op on promoted operands; `div` always yields F."""
        dtype = F if op == "div" else promote(x.dtype, y.dtype)
        if dtype is BOOL and op not in ("and", "or", "xor", "max", "min"):
            dtype = I32
        return self.emit(op, self.cast(x, dtype), self.cast(y, dtype))

    def compare(self, op: str, x: Node, y: Node) -> Node:
        dtype = promote(x.dtype, y.dtype)
        return self.emit(op, self.cast(x, dtype), self.cast(y, dtype))

    def where(self, cond: Node, x: Node, y: Node) -> Node:
        dtype = promote(x.dtype, y.dtype)
        return self.emit("where", self.cast(cond, BOOL), self.cast(x, dtype), self.cast(y, dtype))

    def unary(self, op: str, x: Node) -> Node:
        """A unary op; the transcendental ones and the roundings take F."""
        return self.emit(op, self.cast(x, F) if op in UNARY_F else x)

    def emit(self, op: str, *args: Node) -> Node:
        """The node `op(*args)`, simplified. Operands are already of the right types."""
        arity = ARITY[op]
        if arity is not None and arity != len(args):
            raise ValueError(f"{op} takes {arity} operands, got {len(args)}")
        dtype = BOOL if op in COMPARE else args[1].dtype if op == "where" else args[0].dtype
        from .simplify import simplify  # simplify builds through this Builder

        found = simplify(self, op, args)
        return found if found is not None else self.raw(op, dtype, args)

    def raw(self, op: str, dtype: DType, args: tuple[Node, ...]) -> Node:
        """Intern without simplifying; commutative operands are put in a fixed order."""
        if op in COMMUTATIVE and args[0].serial > args[1].serial:
            args = (args[1], args[0])
        return self._intern(op, dtype, args, None)

    def _intern(self, op: str, dtype: DType, args: tuple[Node, ...], attr: Hashable) -> Node:
        # repr tells 0.0 from -0.0 and nan from nan, which == does not
        key = (op, dtype, tuple(a.serial for a in args), repr(attr) if op == "const" else attr)
        node = self._table.get(key)
        if node is None:
            node = Node(op, dtype, args, attr, len(self._table))
            self._table[key] = node
        return node

    # -- rewriting ------------------------------------------------------------------------------------------------
    def rebuild(self, node: Node, args: Sequence[Node]) -> Node:
        """`node` with other operands (same types), simplified again; `node` may come from another Builder."""
        if node.op == "in":
            return self.input(str(node.attr))
        if node.op == "const":
            return self.const(node.value, node.dtype)
        if node.op == "load":
            return self.load(node.attr, node.dtype, args)  # type: ignore[arg-type]
        if node.op == "cast":
            return self.cast(args[0], node.dtype)
        return self.emit(node.op, *args)

    def substitute(self, roots: Sequence[Node], replace: dict[Node, Node], *, slot_shift: int = 0) -> list[Node]:
        """Copies of `roots` in this Builder with nodes replaced; load slots are moved up by `slot_shift`."""
        done = dict(replace)
        for node in topological(roots):
            if node in done:
                continue
            args = [done[a] for a in node.args]
            if node.op == "load":
                done[node] = self.load(node.attr + slot_shift, node.dtype, args)  # type: ignore[operator]
            else:
                done[node] = self.rebuild(node, args)
        return [done[r] for r in roots]


def topological(roots: Iterable[Node]) -> Iterator[Node]:
    """Every node reachable from `roots`, operands first, each once."""
    seen: set[Node] = set()
    for root in roots:
        stack: list[tuple[Node, bool]] = [(root, False)]
        while stack:
            node, ready = stack.pop()
            if ready:
                yield node
            elif node not in seen:
                seen.add(node)
                stack.append((node, True))
                stack.extend((a, False) for a in reversed(node.args) if a not in seen)


def canonical_hash(roots: Sequence[Node], extra: Hashable = ()) -> str:
    """A hash of the expressions themselves: independent of Builder, construction order and operand order."""
    digest: dict[Node, str] = {}
    for node in topological(roots):
        args = [digest[a] for a in node.args]
        if node.op in COMMUTATIVE:
            args.sort()
        text = f"{node.op}|{node.dtype.value}|{node.attr!r}|{','.join(args)}"
        digest[node] = hashlib.sha256(text.encode()).hexdigest()[:32]
    return hashlib.sha256(repr(([digest[r] for r in roots], extra)).encode()).hexdigest()[:32]


_INFIX = {
    "add": "+", "sub": "-", "mul": "*", "div": "/", "fdiv": "//", "mod": "%", "eq": "==", "ne": "!=", "lt": "<",
    "le": "<=", "gt": ">", "ge": ">=", "and": "&", "or": "|", "xor": "^", "shl": "<<", "shr": ">>",
}  # fmt: skip


def to_text(
    node: Node, names: Sequence[str] = (), max_nodes: int = 200, aliases: Mapping[Node, str] | None = None
) -> str:
    """The expression as one line of Python-like text.

    `names` are the captures' names by slot; operands found in `aliases` are written as their alias there. A graph is a
    DAG: written out it can be exponentially long. After `max_nodes` operands, "…" stands for the rest.
    """
    left = max_nodes

    def text(n: Node, depth: int) -> str:
        nonlocal left
        left -= 1
        if left < 0 or depth > _MAX_DEPTH:
            return "…"
        if depth and aliases and n in aliases:
            return aliases[n]
        if n.op == "in":
            return str(n.attr)
        if n.op == "const":
            return repr(n.attr)
        args = [text(a, depth + 1) for a in n.args]
        if n.op == "load":
            slot = int(n.attr)  # type: ignore[call-overload]
            name = names[slot] if slot < len(names) else f"capture{slot}"
            return f"{name}[{', '.join(args)}]" if args else name
        if n.op in _INFIX:
            return f"({args[0]} {_INFIX[n.op]} {args[1]})"
        return f"{n.dtype.value if n.op == 'cast' else n.op}({', '.join(args)})"

    return text(node, 0)


_MAX_DEPTH = 60  # nesting that to_text shows


def wrap(value: int, dtype: DType) -> int:
    """`value` modulo 2**32 or 2**64, as the two's complement number of that width."""
    half = 2**31 if dtype is I32 else 2**63
    return (value + half) % (2 * half) - half


def _fits(value: Number, dtype: DType) -> bool:
    """Does the integer type hold `value`, rounded to zero? Else a cast of it has no meaning to fold."""
    return math.isfinite(value) and wrap(int(value), dtype) == int(value)


def _keeps_value(cast: Node) -> bool:
    """Is this cast from a type whose every value the target holds? (F is fp32: it does not hold every i32.)"""
    source = cast.args[0].dtype
    return source is BOOL or (source is I32 and cast.dtype is I64)


def _int_dtype(value: int) -> DType:
    if wrap(value, I64) != value:
        raise ModDtypeError(f"the number {value} does not fit 64 bits", remedy="Write it as a float")
    return I32 if wrap(value, I32) == value else I64
