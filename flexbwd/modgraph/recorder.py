"""The state of one trace: captured tensors, prologue steps, load slots, and what is known of every tensor."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from flexbwd.errors import (
    ModCaptureError,
    ModDataDependentError,
    ModDtypeError,
    ModError,
    ModMutationError,
    ModShapeError,
    ModTraceError,
)

from .ir import Builder, Node
from .locate import user_line
from .prologue import Register, Step
from .values import WIDE, Coords, Value, ir_dtype

_PLAIN = (Tensor, torch.nn.Parameter, torch.nn.Buffer, FakeTensor)


_SPELLED = {"_local_scalar_dense": "a slice bound or other Python number", "equal": "torch.equal"}
_tracing = threading.local()


class _Quiet(logging.Filter):
    """Drops torch's own report of an operator that rejects its arguments: the user gets ours."""

    def filter(self, record: logging.LogRecord) -> bool:
        return not getattr(_tracing, "on", False)


logging.getLogger("torch._subclasses.fake_tensor").addFilter(_Quiet())


@contextlib.contextmanager
def quiet_fakes() -> Iterator[None]:
    """No log lines from fake tensors in this thread."""
    before, _tracing.on = getattr(_tracing, "on", False), True
    try:
        yield
    finally:
        _tracing.on = before


@contextlib.contextmanager
def plain_torch() -> Iterator[None]:
    """Tensors are just tensors here: no mode of the trace sees what is done with them."""
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        yield


def op_name(func: Any) -> str:
    """`add` of `aten::add.Tensor`."""
    return func._schema.name.split("::")[-1]


class Recorder:
    """All that one trace collects.

    Attributes:
        captures: the user's tensors in order of first use.  steps: of the prologue, unpruned.
        slots: register of every load slot.  lines: user's line of the first call that made a node.
    """

    def __init__(self, mod: str, device: torch.device, given: Mapping[int, str]) -> None:
        self.mod, self.device, self._given = mod, device, given
        self.builder = Builder()
        self.fake_mode = FakeTensorMode()
        self.captures: list[Tensor] = []
        self.steps: list[Step] = []
        self.slots: list[Register] = []
        self.lines: dict[Node, str] = {}
        self.names: dict[Register, str] = {}
        self.tensors: dict[Register, Tensor] = {}
        self.narrowed: list[str] = []
        self.in_literal = False  # inside torch.tensor(...): an unknown tensor is the mod's own
        self.literal_data: Any = None  # what torch.tensor(...) was given
        self._values: dict[int, tuple[Tensor, Value]] = {}
        self._stand_ins: dict[int, Tensor] = {}
        self._slot_of: dict[Register, int] = {}

    # -- values and tensors ------------------------------------------------------------------------------------------
    def error(self, kind: type[ModError], problem: str, *, op: str = "", remedy: str = "") -> ModError:
        return kind(problem, mod=self.mod, where=user_line(), op=op, remedy=remedy)

    def input(self, name: str, dtype: torch.dtype) -> Tensor:
        """The scalar that stands for one of the mod's arguments."""
        node = self.builder.input(name)
        tensor = self._empty((), dtype, self.device)
        self.bind(tensor, Value((), dtype, lambda _: node))
        return tensor

    def _empty(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        with self.fake_mode:
            return torch.empty(tuple(shape), dtype=dtype, device=device)

    def bind(self, tensor: Tensor, value: Value) -> None:
        self._values[id(tensor)] = (tensor, value)
        if value.register is not None:
            self.tensors[value.register] = tensor

    def value(self, tensor: Tensor) -> Value:
        """What is known of a tensor; one never seen is a captured tensor."""
        found = self._values.get(id(tensor))
        if found is not None:
            return found[1]
        if isinstance(tensor, FakeTensor) and tensor.fake_mode is self.fake_mode:
            raise self.error(ModTraceError, "a tensor came from an operation that cannot be followed")
        value = self._literal(tensor) if self.in_literal else self._capture(tensor)
        self.bind(tensor, value)
        return value

    def _capture(self, tensor: Tensor) -> Value:
        name = self._given.get(id(tensor), "captured tensor")
        self._check_capture(tensor, name)
        register = Register(-1 - len(self.captures))
        self.captures.append(tensor)
        self.names[register] = name
        with self.fake_mode:
            shape, stride = [int(n) for n in tensor.shape], [int(n) for n in tensor.stride()]
            stand_in = torch.empty_strided(shape, stride, dtype=tensor.dtype, device=tensor.device)
        self._stand_ins[id(tensor)] = stand_in
        return Value(tuple(shape), tensor.dtype, self._loader(register, tensor.dtype), register)

    def _check_capture(self, t: Tensor, name: str) -> None:
        kind = type(t).__name__
        layout = "a nested tensor" if t.is_nested else "" if t.layout == torch.strided else f"{t.layout}"
        if layout or t.is_quantized:
            remedy = "capture a dense tensor: .to_dense(), or .to_padded_tensor(0)"
            raise self.error(ModCaptureError, f"{name} is {layout or 'quantized'}", remedy=remedy)
        if type(t) not in _PLAIN and type(t).__torch_dispatch__ is not torch._C._disabled_torch_dispatch_impl:
            raise self.error(ModCaptureError, f"{name} is a {kind}", remedy="capture a plain local tensor")
        if torch._C._functorch.is_functorch_wrapped_tensor(t):
            remedy = "call flexbwd outside torch.func transforms"
            raise self.error(ModCaptureError, f"{name} belongs to a torch.func transform", remedy=remedy)
        if t.device.type == "meta":
            raise self.error(ModCaptureError, f"{name} is on device meta", remedy=f"move it to {self.device}")
        if ir_dtype(t.dtype) is None:
            remedy = "convert it to a float, int32, int64 or bool tensor outside the mod"
            raise self.error(ModDtypeError, f"{name} has dtype {t.dtype}", remedy=remedy)

    def _literal(self, tensor: Tensor) -> Value:
        """A tensor written out in the mod's own text."""
        numbers = all(isinstance(x, (int, float)) for x in tree_leaves(self.literal_data))
        with plain_torch():
            held = tensor.detach().clone()
            wide = tensor.dtype is torch.float32 and numbers
            contents = torch.tensor(self.literal_data, dtype=WIDE, device="cpu") if wide else held.cpu()
        register = self._record(Step(torch.ops.aten.lift_fresh_copy.default, (held,)), "constant")
        self._stand_ins[id(tensor)] = self._empty(tensor.shape, tensor.dtype, tensor.device)
        return self._free_value(tensor, register, contents, None)

    def _loader(self, register: Register, dtype: torch.dtype) -> Callable[[Coords], Node]:
        kind = ir_dtype(dtype)

        def load(coords: Coords) -> Node:
            if kind is None:
                raise self.error(ModDtypeError, f"{self.names[register]} has dtype {dtype}", remedy="convert it")
            slot = self._slot_of.setdefault(register, len(self.slots))
            if slot == len(self.slots):
                self.slots.append(register)
            return self.builder.load(slot, kind, coords)

        return load

    # -- steps and fake results ----------------------------------------------------------------------------------------
    def _record(self, step: Step, name: str, outs: int = 1) -> Register:
        index = len(self.steps)
        self.steps.append(step)
        for item in range(outs):
            self.names[Register(index, item)] = name if outs == 1 else f"{name}[{item}]"
        return Register(index)

    def _free_value(
        self, out: Tensor, register: Register, literal: Tensor | None, pull: Callable[[Coords], Node] | None
    ) -> Value:
        load = pull or self._loader(register, out.dtype)
        detach = pull is not None and not torch.is_grad_enabled() and out.dtype.is_floating_point

        def at(coords: Coords) -> Node:
            if literal is not None and all(c.is_const for c in coords):
                with plain_torch():
                    number = literal[tuple(int(c.value) for c in coords)].item()
                return self.builder.const(number, ir_dtype(out.dtype))
            node = load(coords)
            return self.builder.emit("detach", node) if detach else node

        return Value(tuple(out.shape), out.dtype, at, register, literal)

    def _run_fake(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The operator on stand-ins: shapes, dtypes and devices of its result."""

        def stand_in(a: Any) -> Any:
            return self._stand_ins.get(id(a), a) if isinstance(a, Tensor) else a

        try:
            with self.fake_mode:
                return func(*tree_map(stand_in, args), **tree_map(stand_in, kwargs))
        except DynamicOutputShapeException:
            problem = f"the shape of {op_name(func)}'s result depends on the values of a captured tensor"
            remedy = "compute it outside the mod and capture the result"
            raise self.error(ModShapeError, problem, op=op_name(func), remedy=remedy) from None
        except DataDependentOutputException:
            raise self.data_dependent(op_name(func), captured=True) from None

    def data_dependent(self, name: str, captured: bool = False) -> ModError:
        """`captured`: the value is a captured tensor's, which may change between calls."""
        name = _SPELLED.get(name, name)
        if captured:
            problem = f"{name} reads the value of a captured tensor, which may be another at the next call"
            remedy = "capture a Python number instead, or stay with tensor operations"
            return self.error(ModDataDependentError, problem, op=name, remedy=remedy)
        problem = f"{name} asks for a Python value of a tensor, which is known only inside the kernel"
        remedy = "write torch.where(condition, a, b) for if/else, & | ~ for and/or/not, torch functions for math's"
        return self.error(ModDataDependentError, problem, op=name, remedy=remedy)

    def mutation(self, name: str) -> ModError:
        remedy = "write the functional form: s = s + x, torch.where(...)"
        return self.error(ModMutationError, f"{name} changes a tensor in place", op=name, remedy=remedy)
