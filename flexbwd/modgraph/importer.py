"""From aten calls to graph nodes: what the trace's dispatch mode does with every operator.

An operator that no index reaches becomes a step of the prologue. One that an index does reach is looked up: a view or
gather renames coordinates, an elementwise operator emits nodes, another is decomposed by torch's own table, and what is
left is an error that names the operator and the user's line.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from flexbwd.errors import (
    ModCaptureError,
    ModDataDependentError,
    ModDtypeError,
    ModRandomError,
    ModShapeError,
    ModUnsupportedOpError,
)

from .ir import BOOL, I32, I64, Node
from .locate import user_line
from .prologue import Register, Step
from .recorder import Recorder, op_name, plain_torch
from .scalar_ops import CANNOT_OVERFLOW, ELEMENTWISE, Emit, is_comparison
from .values import NARROW_INTS, WIDE, Coords, Value, aligned, ir_dtype
from .view_ops import FREE_VIEWS, SPLITS, VIEWS

aten = torch.ops.aten

_CREATE = {"zeros_like": 0, "ones_like": 1, "new_zeros": 0, "new_ones": 1, "empty_like": 0, "new_empty": 0}
_FILL = ("full_like", "new_full")
_REDUCE = (
    "sum", "mean", "prod", "amax", "amin", "max", "min", "any", "all", "dot", "mm", "mv", "bmm", "addmm", "logsumexp",
    "_softmax", "_log_softmax", "var", "std", "argmax", "argmin", "linalg_vector_norm", "norm",
)  # fmt: skip
_LITERAL_LIMIT = 1024
_REMEDY = {
    "sort": "sort outside the mod and capture the result",
    "cumsum": "accumulate outside the mod and capture the result",
    "bucketize": "write the buckets as comparisons, or tabulate them outside and capture the table",
    "isin": "capture a bool table and index it",
    "atan2": "tabulate it outside the mod and capture the table",
}
_SUPPORTED = "supported are torch's arithmetic, comparisons, where, clamp, rounding, exp/log/tanh/sigmoid/sin/erf, "
_SUPPORTED += "activations and indexing of captured tensors; or compute it outside the mod and capture the result"


@functools.cache
def _decompositions() -> Mapping[Any, Callable[..., Any]]:
    from torch._decomp import core_aten_decompositions

    return core_aten_decompositions()


def _real(a: Any) -> Any:
    """An integer tensor as WIDE numbers, anything else as it is."""
    return a.to(WIDE) if isinstance(a, Tensor) and a.dtype in (torch.int32, torch.int64, *NARROW_INTS) else a


class Importer(Recorder):
    """A Recorder that also knows the operators."""

    # -- dispatch ----------------------------------------------------------------------------------------------------
    def dispatch(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], reenter: Any) -> Any:
        """The result of `func(*args, **kwargs)`, recorded; `reenter` is the mode, for decompositions."""
        if func.namespace == "prim":
            return func(*args, **kwargs)
        name = op_name(func)
        if torch.Tag.nondeterministic_seeded in func.tags:
            remedy = "draw the numbers outside the mod and capture the tensor"
            raise self.error(ModRandomError, f"{name} draws random numbers", op=name, remedy=remedy)
        values = {id(t): self.value(t) for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        if func._schema.is_mutable:
            self._check_mutation(func, args, kwargs, values)
        if any(v.is_indexed for v in values.values()):
            return self._indexed(func, args, kwargs, values, reenter)
        return self._free(func, args, kwargs, values)

    def _check_mutation(self, func: Any, args: tuple[Any, ...], kwargs: Any, values: Mapping[int, Value]) -> None:
        name = op_name(func)
        for formal, actual in zip(func._schema.arguments, args, strict=False):
            if formal.alias_info is not None and formal.alias_info.is_write and isinstance(actual, Tensor):
                value = values[id(actual)]
                own = not value.is_indexed and value.register is not None and value.register.step >= 0
                if not own or any(v.is_indexed for v in values.values()):
                    raise self.mutation(name)
        if any(a.is_out for a in func._schema.arguments):
            raise self.mutation(name)

    # -- what no index reaches ---------------------------------------------------------------------------------------
    def _free(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], values: Mapping[int, Value]) -> Any:
        name = op_name(func)
        out = self._run_fake(func, args, kwargs)
        if name in ("detach", "alias") and values[id(args[0])].literal is not None:
            self.bind(out, values[id(args[0])])
            return out
        outs = [out] if isinstance(out, Tensor) else list(out) if isinstance(out, (tuple, list)) else []
        if not outs or not all(isinstance(o, Tensor) for o in outs):
            raise self.data_dependent(name, captured=True)

        def named(a: Any) -> Any:
            if isinstance(a, Tensor):
                return values[id(a)].register
            return tuple(named(x) for x in a) if isinstance(a, (tuple, list)) else a

        detach = not torch.is_grad_enabled() and any(o.dtype.is_floating_point for o in outs)
        step = Step(func, named(args), tuple((k, named(a)) for k, a in kwargs.items()), detach)
        shown = ", ".join(self.names[v.register] for v in values.values() if v.register is not None)
        base = self._record(step, f"{name}({shown})", len(outs))
        literals = self._literals_of(func, args, kwargs, values, outs)
        view = FREE_VIEWS.get(name)
        for item, o in enumerate(outs):
            pull = None
            if view is not None and args and isinstance(args[0], Tensor) and literals is None:
                pull = view(self.builder, values[id(args[0])], tuple(o.shape), *args[1:], **kwargs)
            literal = None if literals is None else literals[item]
            self.bind(o, self._free_value(o, Register(base.step, item), literal, pull))
        return out

    def _literals_of(
        self, func: Any, args: Any, kwargs: Any, values: Mapping[int, Value], outs: Sequence[Tensor]
    ) -> list[Tensor] | None:
        """The results' contents, where they follow from the mod's text alone and are few; fp32 ones are held WIDE."""
        small = sum(o.numel() for o in outs) <= _LITERAL_LIMIT and all(ir_dtype(o.dtype) for o in outs)
        if not small or any(v.literal is None for v in values.values()) or func._schema.is_mutable:
            return None

        def literal(a: Any) -> Any:
            if isinstance(a, Tensor):
                return values[id(a)].literal
            return torch.device("cpu") if isinstance(a, torch.device) else a

        kwargs = dict(kwargs)
        if outs[0].dtype is torch.float32 and any(a.name == "dtype" for a in func._schema.arguments):
            kwargs["dtype"] = WIDE
        with plain_torch(), torch.no_grad():
            out = func(*tree_map(literal, args), **tree_map(literal, kwargs))
            if isinstance(out, Tensor) and out.dtype is torch.float32:  # of integers: tanh(torch.tensor(2))
                out = func(*tree_map(_real, tree_map(literal, args)), **tree_map(literal, kwargs))
        return [out] if isinstance(out, Tensor) else list(out)

    # -- what an index reaches ---------------------------------------------------------------------------------------
    def _indexed(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], values: Mapping[int, Value], reenter: Any
    ) -> Any:
        name = op_name(func)
        if name in _CREATE or name in _FILL:
            return self._created(func, args, kwargs, reenter)
        known = name in VIEWS or name in SPLITS or name in ELEMENTWISE
        if not known:
            return self._unknown(func, args, kwargs, values, reenter)
        self._check_devices(args, kwargs, values)
        if name == "index":
            self._check_index(args)
        out = self._run_fake(func, args, kwargs)
        if name in SPLITS:
            pulls = SPLITS[name](self.builder, values[id(args[0])], [tuple(o.shape) for o in out], *args[1:], **kwargs)
            for o, pull in zip(out, pulls, strict=True):
                self._bind_indexed(o, pull)
            return out
        if name in VIEWS:

            def lifted(a: Any) -> Any:
                return values[id(a)] if isinstance(a, Tensor) else a

            rest = tree_map(lifted, args[1:])
            pull = VIEWS[name](self.builder, values[id(args[0])], tuple(out.shape), *rest, **tree_map(lifted, kwargs))
            self._bind_indexed(out, pull)
            return out
        first = out[0] if isinstance(out, tuple) else out
        self._bind_indexed(first, self._elementwise(func, args, kwargs, values, first))
        return out

    def _bind_indexed(self, out: Tensor, pull: Callable[[Coords], Node]) -> None:
        detach = not torch.is_grad_enabled() and out.dtype.is_floating_point

        def at(coords: Coords) -> Node:
            node = pull(coords)
            return self.builder.emit("detach", node) if detach else node

        if out.dim() == 0:
            node = at(())
            self.lines.setdefault(node, user_line())
            self.bind(out, Value((), out.dtype, lambda _: node))
        else:
            self.bind(out, Value(tuple(out.shape), out.dtype, at))

    def _created(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], reenter: Any) -> Any:
        """zeros_like and its kin: constants, whatever they are like."""
        out, name = self._run_fake(func, args, kwargs), op_name(func)
        fill = _CREATE[name] if name in _CREATE else kwargs.get("fill_value", args[-1])
        with reenter:
            return aten.full.default(list(out.shape), fill, dtype=out.dtype, device=out.device)

    def _unknown(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], values: Mapping[int, Value], reenter: Any
    ) -> Any:
        name = op_name(func)
        if name in ("_local_scalar_dense", "equal", "is_nonzero"):
            raise self.data_dependent(name)
        if name in _REDUCE and all(not v.shape for v in values.values()):
            return self._reduced_scalar(func, args, kwargs, values)
        table = _decompositions()
        if name not in _REDUCE and func in table:
            with reenter:
                result = table[func](*args, **kwargs)
            if result is not NotImplemented:
                return result
        if any(v.is_indexed and v.shape for v in values.values()) or name in ("stack", "cat"):
            remedy = "compute it outside the mod and capture the result; inside a mod every value is a scalar"
            problem = f"{name.strip('_')} works on a vector that depends on an index"
            raise self.error(ModShapeError, problem, op=name, remedy=remedy)
        remedy = _REMEDY.get(name, _SUPPORTED)
        raise self.error(ModUnsupportedOpError, f"torch operator {name} is not supported", op=name, remedy=remedy)

    def _reduced_scalar(self, func: Any, args: Any, kwargs: Any, values: Mapping[int, Value]) -> Any:
        """A reduction over no dimension is its operand."""
        name = op_name(func)
        out = self._run_fake(func, args, kwargs)
        if name not in ("sum", "mean", "prod", "amax", "amin", "max", "min", "any", "all") or out is None:
            raise self.error(ModUnsupportedOpError, f"torch operator {name} is not supported", op=name)
        if not isinstance(out, Tensor):
            raise self.error(ModUnsupportedOpError, f"{name} with a dimension is not supported", op=name)
        node = values[id(args[0])].scalar()
        if name in ("any", "all") and node.dtype is not BOOL:
            node = self.builder.compare("ne", node, self.builder.const(0))
        kind = ir_dtype(out.dtype)
        assert kind is not None
        self._bind_indexed(out, lambda _: self.builder.cast(node, kind))
        return out

    def _check_devices(self, args: Any, kwargs: Any, values: Mapping[int, Value]) -> None:
        for t in tree_leaves((args, kwargs)):
            if isinstance(t, Tensor) and t.dim() and t.device != self.device and not values[id(t)].is_indexed:
                register = values[id(t)].register
                assert register is not None
                problem = f"{self.names[register]} is on {t.device}, the query on {self.device}"
                remedy = (
                    f"move it there before the call, .to({str(self.device)!r}), or make it with device=q_idx.device"
                )
                raise self.error(ModCaptureError, problem, remedy=remedy)

    def _check_index(self, args: tuple[Any, ...]) -> None:
        for t in tree_leaves(args[1:]):
            if isinstance(t, Tensor) and t.dtype in (torch.bool, torch.uint8):
                remedy = "select with torch.where(condition, a, b), or index with condition.int()"
                problem = f"a {t.dtype} tensor as an index selects by value, so the result's shape would vary"
                raise self.error(ModDataDependentError, problem, op="index", remedy=remedy)

    # -- elementwise ---------------------------------------------------------------------------------------------------
    def _elementwise(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], values: Mapping[int, Value], out: Tensor
    ) -> Callable[[Coords], Node]:
        name = op_name(func)
        kind = ir_dtype(out.dtype)
        if kind is None or (out.dtype in NARROW_INTS and name not in CANNOT_OVERFLOW):
            remedy = "convert the operands first: .int(), .long() or .float()"
            raise self.error(ModDtypeError, f"{name} in {out.dtype} is not supported", op=name, remedy=remedy)
        self._note_narrowing(name, out)
        options = {k: a for k, a in kwargs.items() if k not in _FACTORY}
        common = self._common(args) if is_comparison(name) else kind
        emit, operator, line = Emit(self.builder, kind, common), ELEMENTWISE[name], user_line()
        self._check_numbers(name, args, emit)

        def pull(coords: Coords) -> Node:
            zero = self.builder.const(0)

            def operand(a: Any) -> Any:
                if isinstance(a, Tensor):
                    value = values[id(a)]
                    return value.at(aligned(coords, value.shape, zero))
                return self.builder.const(a) if isinstance(a, (bool, int, float)) else a

            node = operator(emit, *map(operand, args), **{k: operand(a) for k, a in options.items()})
            self.lines.setdefault(node, line)
            return node

        return pull

    def _note_narrowing(self, name: str, out: Tensor) -> None:
        if name == "_to_copy" and out.dtype == torch.float64:
            self.narrowed.append(f"the conversion to float64 at {user_line()}")

    def _common(self, args: tuple[Any, ...]) -> Any:
        kind = ir_dtype(self._run_fake(torch.result_type, args[:2], {}))
        big = any(type(a) is int and not -(2**31) <= a < 2**31 for a in args)
        return I64 if kind is I32 and big else kind

    def _check_numbers(self, name: str, args: tuple[Any, ...], emit: Emit) -> None:
        if emit.out is I32 and any(type(a) is int and not -(2**31) <= a < 2**31 for a in args):
            remedy = "convert the tensor first: .long()"
            raise self.error(ModDtypeError, f"a number in {name} does not fit int32", op=name, remedy=remedy)


_FACTORY = frozenset({"dtype", "layout", "device", "pin_memory", "non_blocking", "memory_format"})
