"""The torch operators `flexbwd::forward` and `flexbwd::backward`: schemas, real and fake kernels, autograd.

Callables cannot be operator arguments, so the operators take a registered plan id and plain tensors. The autograd
kernel calls the operators below the Autograd key, so every dispatch mode (fake tensors, functionalization, selective
checkpointing, `torch.compile`) sees each of them as one opaque call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flexbwd import backends
from flexbwd.errors import MaskError, UnsupportedError
from flexbwd.plan import BlockLists, Needs, Operands, lookup
from flexbwd.problem import empty_like_order, stat_dtype
from flexbwd.sparsity.tensors import BlockBits, BlockSparseTensors, IndexBase

_lib = torch.library.Library("flexbwd", "DEF")
_STATIC = "Tensor?[] blocks, Tensor?[] base, int[] offsets, int plan, float scale"
_lib.define(
    f"forward(Tensor query, Tensor key, Tensor value, Tensor[] captures, {_STATIC}, bool want_max)"
    " -> (Tensor out, Tensor lse, Tensor max_scores)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_lib.define(
    "backward(Tensor grad_out, Tensor? grad_lse, Tensor query, Tensor key, Tensor value, Tensor out, Tensor lse,"
    f" Tensor[] captures, {_STATIC}, bool[] needs) -> Tensor[]",
    tags=(torch.Tag.pt2_compliant_tag,),
)


class Static(NamedTuple):
    """The operands that carry no gradient, as the operators take them."""

    blocks: list[Tensor | None]  # BlockLists flattened, or []
    base: list[Tensor | None]  # [q_base, kv_base], or []
    offsets: list[int]  # [b_off, h_off]
    plan: int
    scale: float

    @classmethod
    def of(cls, lists: BlockLists | None, base: IndexBase | None, plan: int, scale: float) -> Static:
        """Flatten the groups; [] for lists when every block is kept, and for base when coordinates are local."""
        blocks: list[Tensor | None] = []
        if lists is not None:
            blocks = [*lists.q_to_kv, *lists.kv_to_q, *(lists.bits or ())]
        offsets = [0, 0] if base is None else [base.b_off, base.h_off]
        bases = [] if base is None else [base.q_base, base.kv_base]
        return cls(blocks, bases, offsets, plan, float(scale))


def _unflatten_blocks(flat: Sequence[Tensor | None]) -> BlockLists | None:
    if not flat:
        return None
    bits = BlockBits(*flat[8:11]) if len(flat) == 11 else None  # type: ignore[arg-type]
    return BlockLists(BlockSparseTensors(*flat[0:4]), BlockSparseTensors(*flat[4:8]), bits)  # type: ignore[arg-type]


def operands_of(query: Tensor, key: Tensor, value: Tensor, captures: Sequence[Tensor], static: Static) -> Operands:
    plan = lookup(static.plan)
    base = None
    if static.base:
        (b_off, h_off), (q_base, kv_base) = static.offsets, static.base
        base = IndexBase(b_off, h_off, q_base, kv_base, plan.block_size)
    blocks = _unflatten_blocks(static.blocks)
    return Operands(query, key, value, tuple(captures), blocks, base, static.scale, plan)


# -- real kernels: the plan names the backend --------------------------------------------------------------------------
def _forward_real(
    query: Tensor, key: Tensor, value: Tensor, captures: Sequence[Tensor], *static_and_max: Any
) -> tuple[Tensor, Tensor, Tensor]:
    *static, want_max = static_and_max
    return _run_forward(operands_of(query, key, value, captures, Static(*static)), want_max)


def _run_forward(op: Operands, want_max: bool) -> tuple[Tensor, Tensor, Tensor]:
    out, lse, max_scores = backends.module(op.plan.backend).forward(op, want_max)
    return out, lse, lse.new_empty(0) if max_scores is None else max_scores


def _backward_real(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    captures: Sequence[Tensor],
    *static_and_needs: Any,
) -> list[Tensor]:
    *static, needs = static_and_needs
    op = operands_of(query, key, value, captures, Static(*static))
    wanted = Needs(needs[0], needs[1], needs[2], tuple(needs[3:]))
    grads = backends.module(op.plan.backend).backward(op, out, lse, grad_out, grad_lse, wanted)
    found = [grads.query, grads.key, grads.value, *grads.captures]
    return [g for g, need in zip(found, needs, strict=True) if need]  # type: ignore[misc]


# -- fake kernels ------------------------------------------------------------------------------------------------------
def output_like(query: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Uninitialised out `[B, Hq, Sq, Dv]`, in query's memory order, and lse `[B, Hq, Sq]`."""
    out = empty_like_order(query, (*query.shape[:3], value.shape[3]))
    return out, query.new_empty(query.shape[:3], dtype=stat_dtype(query.dtype))


def _forward_fake(
    query: Tensor, key: Tensor, value: Tensor, captures: Sequence[Tensor], *static_and_max: Any
) -> tuple[Tensor, Tensor, Tensor]:
    out, lse = output_like(query, value)
    return out, lse, torch.empty_like(lse) if static_and_max[-1] else lse.new_empty(0)


def _backward_fake(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    captures: Sequence[Tensor],
    *static_and_needs: Any,
) -> list[Tensor]:
    needs = static_and_needs[-1]
    grads = [empty_like_order(t, t.shape) for t in (query, key, value)]
    grads += [torch.empty_like(c, memory_format=torch.contiguous_format) for c in captures]
    return [g for g, need in zip(grads, needs, strict=True) if need]


# -- autograd ----------------------------------------------------------------------------------------------------------
_PLAIN = (Tensor, torch.nn.Parameter)


def attention(
    query: Tensor, key: Tensor, value: Tensor, captures: Sequence[Tensor], static: Static, want_max: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """(out, lse, max_scores) as the operator `flexbwd::forward` gives them, without its detour where nobody watches.

    Packing and unpacking the operator's lists costs as much as planning; only dispatch modes, function transforms and
    the profiler can tell the difference.
    """
    if _unwatched(query) and not torch._C._are_functorch_transforms_active():
        if not (torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value, *captures))):
            return _run_forward(operands_of(query, key, value, captures, static), want_max)
        return _Attention.apply(static, want_max, query, key, value, *captures)  # type: ignore[no-any-return]
    return torch.ops.flexbwd.forward.default(query, key, value, captures, *static, want_max)  # type: ignore[no-any-return]


def _unwatched(query: Tensor) -> bool:
    """Would the operator's real kernel see exactly this call?"""
    return (
        type(query) in _PLAIN
        and query.device.type in ("cpu", "cuda")
        and not torch._C._len_torch_dispatch_stack()
        and not torch.autograd._profiler_enabled()
    )


def _forward(tensors: Sequence[Tensor], static: Static, want_max: bool) -> tuple[Tensor, Tensor, Tensor]:
    """The forward operator below autograd."""
    query, key, value, *captures = tensors
    if _unwatched(query):
        return _run_forward(operands_of(query, key, value, captures, static), want_max)
    with torch._C._AutoDispatchBelowAutograd():
        return torch.ops.flexbwd.forward.default(query, key, value, captures, *static, want_max)  # type: ignore[no-any-return]


def _versions(static: Static) -> list[int]:
    """How often each list was written to."""
    return [t._version for t in (*static.blocks, *static.base) if t is not None and not t.is_inference()]


class _Attention(torch.autograd.Function):
    """forward and backward operators joined; lists of tensors are spread so that autograd sees each capture."""

    @staticmethod
    def forward(ctx: Any, static: Static, want_max: bool, *tensors: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        out, lse, max_scores = _forward(tensors, static, want_max)
        # a table filled in inference mode: autograd saves normal tensors only
        ctx.save_for_backward(*[t.clone() if t.is_inference() else t for t in tensors], out, lse)
        ctx.static, ctx.versions = static, _versions(static)
        ctx.plan = lookup(static.plan)  # keeps it registered until the backward has run
        ctx.mark_non_differentiable(max_scores)
        ctx.set_materialize_grads(False)
        return out, lse, max_scores

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None, _: None) -> tuple[Any, ...]:
        needs = list(ctx.needs_input_grad[2:])
        if grad_out is None and grad_lse is None:
            return (None,) * (len(needs) + 2)
        query, key, value, *captures, out, lse = ctx.saved_tensors  # once: unpacking may recompute
        if ctx.versions != _versions(ctx.static):
            raise MaskError(
                "block_mask's lists or index_base were written to between forward and backward, which need the same "
                "blocks; write to a copy"
            )
        if grad_out is None:
            grad_out = torch.zeros_like(out)
        unseen = _unwatched(query) and _unwatched(grad_out) and not torch.is_grad_enabled()
        run = _backward_real if unseen else torch.ops.flexbwd.backward.default
        grads = iter(run(grad_out, grad_lse, query, key, value, out, lse, captures, *ctx.static, needs))
        return (None, None, *(next(grads) if need else None for need in needs))


class _FirstOrderOnly(torch.autograd.Function):
    """The backward operator as a differentiable call, so that a second backward meets our error."""

    @staticmethod
    def forward(ctx: Any, spread: Any, *tensors: Tensor | None) -> tuple[Tensor, ...]:
        with torch._C._AutoDispatchBelowAutograd():
            return tuple(torch.ops.flexbwd.backward(*spread(tensors)))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise UnsupportedError(
            "flex_attention was differentiated twice; only first derivatives exist: compute the second with "
            "flexbwd.reference.attention_reference, or detach the first gradient"
        )


def _forward_autograd(
    query: Tensor, key: Tensor, value: Tensor, captures: Sequence[Tensor], *static_and_max: Any
) -> tuple[Tensor, Tensor, Tensor]:
    *static, want_max = static_and_max
    return _Attention.apply(Static(*static), want_max, query, key, value, *captures)  # type: ignore[no-any-return]


def _backward_autograd(*args: Any) -> list[Tensor]:
    first, captures, last = args[:7], args[7], args[8:]
    return list(_FirstOrderOnly.apply(lambda t: (*t[:7], list(t[7:]), *last), *first, *captures))


for _name, _real, _fake, _autograd in (
    ("forward", _forward_real, _forward_fake, _forward_autograd),
    ("backward", _backward_real, _backward_fake, _backward_autograd),
):
    _lib.impl(_name, _real, "CPU")
    _lib.impl(_name, _real, "CUDA")
    _lib.impl(_name, _autograd, "Autograd")
    torch.library.register_fake(f"flexbwd::{_name}", _fake, lib=_lib)
