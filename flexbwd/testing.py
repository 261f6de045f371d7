"""What tests share: seeded problems, gradients by name, error budgets, poisoned memory.

case = make_case((113, 203), heads=(4, 2), head_dim=64, dtype=torch.bfloat16)
got = attention_grads(case, score_mod=mod)                # outputs pre-filled with NaN
want = reference_grads(case.double(), score_mod=mod)      # fp64 oracle
rough = reference_grads(case, score_mod=mod)              # the same maths, eager, in bf16: the budget
for name in want:
    assert_within_budget(got[name], want[name], rough[name], label=name)
"""

from __future__ import annotations

import contextlib
import math
import types
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from flexbwd.reference import attention_reference, kept_elements, reference_grads, sum_noise, working_dtype

__all__ = [
    "Case",
    "assert_matches_reference",
    "assert_within_budget",
    "attention_grads",
    "attention_reference",
    "captured_parameters",
    "collect_grads",
    "kept_elements",
    "make_case",
    "mod_name",
    "poisoned",
    "reference_grads",
    "sum_noise",
    "torch_operator_grads",
]

BUDGET_FACTOR = 2.0
_FLOOR = {
    torch.float64: 1e-10,
    torch.float32: 16 * torch.finfo(torch.float32).eps,
    torch.float16: torch.finfo(torch.float16).eps,
    torch.bfloat16: torch.finfo(torch.bfloat16).eps,
}


@dataclass(frozen=True)
class Case:
    """One attention problem with upstream gradients: the same values at every precision."""

    query: Tensor  # [B, Hq, Sq, D]
    key: Tensor  # [B, Hkv, Skv, D]
    value: Tensor  # [B, Hkv, Skv, Dv]
    grad_out: Tensor  # [B, Hq, Sq, Dv]
    grad_lse: Tensor | None  # [B, Hq, Sq]; None: the loss does not use the LSE
    scale: float | None = None

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """B, Hq, Sq, Skv."""
        return self.query.shape[0], self.query.shape[1], self.query.shape[2], self.key.shape[2]

    def to(self, dtype: torch.dtype) -> Case:
        """The same values in `dtype` (the LSE's gradient in fp32, or fp64)."""
        q, k, v, do = (t.to(dtype) for t in (self.query, self.key, self.value, self.grad_out))
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        grad_lse = None if self.grad_lse is None else self.grad_lse.to(wide)
        return replace(self, query=q, key=k, value=v, grad_out=do, grad_lse=grad_lse)

    def on(self, device: torch.device | str) -> Case:
        """The same problem on another device; strides are kept."""
        q, k, v, do = (t.to(device) for t in (self.query, self.key, self.value, self.grad_out))
        grad_lse = None if self.grad_lse is None else self.grad_lse.to(device)
        return replace(self, query=q, key=k, value=v, grad_out=do, grad_lse=grad_lse)

    def double(self) -> Case:
        return self.to(torch.float64)

    def leaves(self) -> tuple[Tensor, Tensor, Tensor]:
        """Fresh q, k, v that require grad; strides are kept."""
        q, k, v = (t.detach().requires_grad_(True) for t in (self.query, self.key, self.value))
        return q, k, v


def make_case(
    seqlens: tuple[int, int],
    heads: int | tuple[int, int] = (2, 2),
    head_dim: int | tuple[int, int] = 64,
    dtype: torch.dtype = torch.float64,
    batch: int = 1,
    seed: int = 0,
    lse_grad: bool = True,
) -> Case:
    """A seeded problem: `seqlens` (q, kv), `heads` (Hq, Hkv) or one number, `head_dim` (D, Dv) or one number.

    Values are normal, rounded to `dtype`, so that `case.double()` holds exactly the values of `case`.
    """
    hq, hkv = (heads, heads) if isinstance(heads, int) else heads
    d, dv = (head_dim, head_dim) if isinstance(head_dim, int) else head_dim
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    (sq, skv), wide = seqlens, torch.float64 if dtype == torch.float64 else torch.float32
    query, key, value = normal(batch, hq, sq, d), normal(batch, hkv, skv, d), normal(batch, hkv, skv, dv)
    grad_out = normal(batch, hq, sq, dv)
    return Case(query, key, value, grad_out, normal(batch, hq, sq).to(wide) if lse_grad else None)


# -- gradients by name -----------------------------------------------------------------------------------------------
def attention_grads(
    case: Case,
    score_mod: Callable[..., Any] | None = None,
    mask_mod: Callable[..., Any] | None = None,
    *,
    captures: Mapping[str, Tensor] | None = None,
    block_mask: Any = None,
    **options: Any,
) -> dict[str, Tensor]:
    """`reference_grads`' dict as `flexbwd.flex_attention` computes it, in poisoned memory."""
    import flexbwd

    captures = captured_parameters(score_mod) if captures is None else captures
    options.setdefault("deterministic", False)  # `poisoned` asks torch for determinism, the caller did not
    q, k, v = case.leaves()
    with poisoned():
        result: Any = flexbwd.flex_attention(
            q, k, v, score_mod, block_mask, case.scale, mask_mod=mask_mod, return_lse=True, **options
        )
        out, lse = result
        return collect_grads(case, out, lse, (q, k, v), captures)


def torch_operator_grads(
    case: Case,
    score_mod: Callable[..., Any] | None = None,
    mask_mod: Callable[..., Any] | None = None,
    *,
    captures: Mapping[str, Tensor] | None = None,
) -> dict[str, Tensor]:
    """The same dict from torch's own flex_attention operator, run eagerly: an independent oracle, on CPU and in fp64.

    Captured tensors reach the operator as inputs, so it returns their gradients. Its limits are torch's: a capture
    with a gradient is indexed by tensors and ints only.
    """
    from torch._higher_order_ops.flex_attention import flex_attention as operator
    from torch.nn.attention.flex_attention import _create_empty_block_mask

    captures = captured_parameters(score_mod) if captures is None else captures
    q, k, v = case.leaves()
    names, tensors = list(captures), list(captures.values())
    mod = lift(score_mod, tensors) if score_mod is not None else lambda score, *_: score
    mask = mask_mod if mask_mod is not None else lambda b, h, i, j: b.new_ones((), dtype=torch.bool)
    blocks = (*_create_empty_block_mask(q, k).as_tuple()[:-1], mask)
    scale = 1.0 / math.sqrt(q.shape[-1]) if case.scale is None else case.scale
    with working_dtype(torch.float64 if q.dtype == torch.float64 else torch.float32):
        out, lse_log2, _ = operator(q, k, v, mod, blocks, scale, {}, tuple(tensors), ())
        return collect_grads(case, out, lse_log2 * math.log(2), (q, k, v), dict(zip(names, tensors, strict=True)))


def collect_grads(
    case: Case, out: Tensor, lse: Tensor, leaves: tuple[Tensor, Tensor, Tensor], captures: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """out, lse, dq, dk, dv and the captures' gradients by name, for the upstream gradients of `case`."""
    outputs, upstream = [out], [case.grad_out]
    if case.grad_lse is not None and lse.requires_grad:  # no: a score_mod that reads no score and no parameter
        outputs, upstream = [out, lse], [case.grad_out, case.grad_lse]
    wanted = (*leaves, *captures.values())
    grads = torch.autograd.grad(outputs, wanted, upstream, allow_unused=True)
    named = dict(zip(("dq", "dk", "dv", *captures), grads, strict=True))
    zeroed = {n: torch.zeros_like(w) if g is None else g for (n, g), w in zip(named.items(), wanted, strict=True)}
    return {"out": out.detach(), "lse": lse.detach(), **zeroed}


def captured_parameters(mod: Callable[..., Any] | None) -> dict[str, Tensor]:
    """Tensors requiring grad that `mod`'s closure, its globals or the functions among them hold; by variable name."""
    found: dict[str, Tensor] = {}
    pending: list[Any] = [mod]
    while pending:
        current = pending.pop()
        for name, held in _reached(current):
            if isinstance(held, Tensor) and held.requires_grad:
                found.setdefault(name, held)
            elif isinstance(held, types.FunctionType):
                pending.append(held)
    return found


def lift(mod: Callable[..., Any], tensors: Sequence[Tensor]) -> Callable[..., Any]:
    """`mod` with its captured `tensors` replaced by trailing arguments."""

    def lifted(*args: Any) -> Any:
        return _rebind(mod, dict(zip(map(id, tensors), args[-len(tensors) :], strict=True)))(*args[: -len(tensors)])

    return lifted if tensors else mod


def _rebind(function: Any, by_id: Mapping[int, Tensor]) -> Any:
    """A copy of `function` whose closure and globals hold the replacements, in nested functions too."""
    if not isinstance(function, types.FunctionType):
        return function

    def fresh(held: Any) -> Any:
        return by_id[id(held)] if id(held) in by_id else _rebind(held, by_id)

    cells = tuple(types.CellType(fresh(cell.cell_contents)) for cell in function.__closure__ or ())
    names = {name: fresh(held) for name, held in _global_values(function)}
    scope = {**function.__globals__, **names}
    copy = types.FunctionType(function.__code__, scope, function.__name__, function.__defaults__, cells)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def _reached(function: Any) -> Iterator[tuple[str, Any]]:
    """What the variables of `function` that come from outside hold: closure cells, then globals."""
    if isinstance(function, types.FunctionType):
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        yield from ((name, cell.cell_contents) for name, cell in cells)
        yield from _global_values(function)


def _global_values(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """Tensors and functions of the user's own module that the code names."""
    for name in function.__code__.co_names:
        held = function.__globals__.get(name)
        if isinstance(held, Tensor) or (
            isinstance(held, types.FunctionType) and held.__globals__ is function.__globals__ and held is not function
        ):
            yield name, held


# -- budgets ----------------------------------------------------------------------------------------------------------
def assert_within_budget(got: Tensor, want: Tensor, rough: Tensor | None, label: str, floor: float = 0.0) -> None:
    """Fails unless `got` is as near to `want` as the arithmetic allows; the message says where and by how much.

    The largest and the root-mean-square error may each be twice those of `rough` (the same maths, eager, in the dtype
    at hand) plus a rounding floor, relative to the largest value: 1e-10 for fp64 results, 16 ulp for fp32 (whose sums
    run in another order), 1 ulp for fp16 and bf16. Infinities must agree element by element; a NaN always fails.

    Args:
        got, want, rough: equal shapes; `want` in fp64. `rough` may be None in an fp64 problem: only the floor counts.
        floor: error that is allowed besides, for sums whose terms cancel, such as the gradient of a bias that softmax
            ignores: it is 0, and all that is left is rounding.
    """
    assert got.shape == want.shape, f"{label}: shape {tuple(got.shape)}, expected {tuple(want.shape)}"
    assert rough is not None or got.dtype == torch.float64, f"{label}: {got.dtype} needs a rough result as its budget"
    value, truth = got.detach().double(), want.detach().double()
    assert not bool(value.isnan().any()), f"{label}: {_first(value.isnan(), 'is NaN')}"
    endless = truth.isinf() | value.isinf()
    assert not bool((endless & (value != truth)).any()), f"{label}: {_first(endless & (value != truth), 'differs')}"
    if not truth.numel():
        return
    error = (value - truth).masked_fill(endless, 0.0).abs()
    slack = (rough.detach().double() - truth).masked_fill(endless, 0.0).abs() if rough is not None else error * 0.0
    size = truth.masked_fill(endless, 0.0).abs()
    relative = _FLOOR[got.dtype]
    most = BUDGET_FACTOR * float(slack.max()) + relative * float(size.max()) + floor + 1e-13
    assert float(error.max()) <= most, _over(label, error, value, truth, most)
    allowed = BUDGET_FACTOR * _rms(slack) + relative * _rms(size) + floor + 1e-13
    assert _rms(error) <= allowed, f"{label}: root-mean-square error {_rms(error):.3g} > {allowed:.3g}"


def assert_matches_reference(
    case: Case,
    got: Mapping[str, Tensor],
    score_mod: Callable[..., Any] | None = None,
    mask_mod: Callable[..., Any] | None = None,
    **reference: Any,
) -> None:
    """Every entry of `got` (as `attention_grads` returns it) is within the budget of its dtype; one call for a test.

    A captured tensor's gradient may be a sum whose terms cancel: if it is over, the rounding of its terms is counted.
    """
    want = reference_grads(case.double(), score_mod, mask_mod, **reference)
    rough = want if case.query.dtype == torch.float64 else reference_grads(case, score_mod, mask_mod, **reference)
    assert got.keys() == want.keys(), f"got {sorted(got)}, expected {sorted(want)}"
    captures = reference.pop("captures", None) or captured_parameters(score_mod)
    noise: dict[str, float] = {}
    for name in want:
        try:
            assert_within_budget(got[name], want[name], rough[name], name)
        except AssertionError:
            if name not in captures or score_mod is None:
                raise
            noise = noise or sum_noise(case.double(), score_mod, mask_mod, captures=captures, **reference)
            floor = _FLOOR[case.query.dtype] * noise.get(name, 0.0)
            assert_within_budget(got[name], want[name], rough[name], name, floor)


def _rms(values: Tensor) -> float:
    return math.sqrt(float(values.square().mean()))


def _over(label: str, error: Tensor, got: Tensor, want: Tensor, most: float) -> str:
    at = tuple(int(i) for i in torch.unravel_index(error.argmax(), error.shape))
    share = float((error > most).double().mean())
    return (
        f"{label}: error {float(error.max()):.3g} > {most:.3g} at {at} (got {float(got[at]):.9g}, expected "
        f"{float(want[at]):.9g}); {share:.1%} of elements are over"
    )


def _first(bad: Tensor, verb: str) -> str:
    at = tuple(int(i) for i in bad.nonzero()[0])
    return f"element {at} {verb}; so do {int(bad.sum())} of {bad.numel()}"


# -- poisoned memory ---------------------------------------------------------------------------------------------------
@contextlib.contextmanager
def poisoned() -> Iterator[None]:
    """Inside, torch.empty and its kin return NaN (the largest value for integers), so that unwritten memory shows."""
    deterministic: Any = torch.utils.deterministic
    mode, fill = torch.get_deterministic_debug_mode(), deterministic.fill_uninitialized_memory
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*does not have a deterministic implementation")
        torch.use_deterministic_algorithms(True, warn_only=True)
        deterministic.fill_uninitialized_memory = True
        try:
            yield
        finally:
            torch.set_deterministic_debug_mode(mode)
            deterministic.fill_uninitialized_memory = fill


def mod_name(mod: Any) -> str:
    """A test id: the mod's own name."""
    return getattr(mod, "__name__", type(mod).__name__) if mod is not None else "none"
