"""From the arguments of flex_attention to what the operators take: validate, choose the backend, plan.

What depends on sizes, dtypes and plain options is worked out once and remembered (`_Known`); mods, masks and what they
capture are looked at in every call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flexbwd import backends, ops, planning, validate
from flexbwd.errors import UnsupportedError
from flexbwd.plan import lookup
from flexbwd.planning import Mods, Numerics, Prepared, agreed_base, block_size_of, choose_mask, prepare
from flexbwd.problem import Problem
from flexbwd.sparsity import BlockMask
from flexbwd.sparsity.tensors import IndexBase

ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


class Options(NamedTuple):
    """The arguments of flex_attention that shape its plan."""

    score_mod: ScoreMod | None = None
    block_mask: BlockMask | None = None
    scale: float | None = None
    enable_gqa: bool | None = None
    kernel_options: Mapping[str, Any] | None = None
    score_mod_bwd: Callable[..., Tensor] | None = None
    mask_mod: MaskMod | Tensor | None = None
    deterministic: bool | None = None
    layout: str = "bhsd"
    backend: str = "auto"
    precision: str = "fast"
    index_base: IndexBase | None = None


class Call(NamedTuple):
    """One call, validated and planned: what the operators take, unless torch is to compute it."""

    backend: str
    query: Tensor
    key: Tensor
    value: Tensor
    captures: tuple[Tensor, ...] = ()
    static: ops.Static | None = None

    @property
    def operands(self) -> tuple[Any, ...]:
        return self.query, self.key, self.value, self.captures, self.static


@dataclass(eq=False)
class _Known:
    """What is the same for all calls with equal `_facts`. Holds nothing of the user's but block lists used lately."""

    backend: str
    problem: Problem
    numerics: Numerics
    statics: dict[int, tuple[Any, ops.Static]] = field(default_factory=dict)  # by plan: block lists, operands

    def static(self, prepared: Prepared, base: IndexBase | None) -> ops.Static:
        """The operands that carry no gradient."""
        found = self.statics.get(prepared.plan_id)
        if found is not None and found[0] is prepared.blocks and base is None:
            return found[1]
        made = ops.Static.of(prepared.blocks, base, prepared.plan_id, self.problem.scale)
        if len(self.statics) > 4:
            self.statics.clear()
        self.statics[prepared.plan_id] = (prepared.blocks, made)
        return made


_known: dict[tuple[Any, ...], _Known] = {}
_KNOWN = 512


def clear_caches() -> None:
    """Drop everything that calls have taught: facts, joined plans, built block lists (tests, memory)."""
    _known.clear()
    planning.forget()


def prepare_call(query: Tensor, key: Tensor, value: Tensor, options: Options) -> Call:
    """Validate, choose the backend, plan, and gather what the operator takes."""
    validate.no_transforms()
    facts = _facts(query, key, value, options)
    known = None if facts is None else _known.get(facts)
    base: IndexBase | None = None
    if known is None:
        check_options(options)
        query, key, value = checked(query, key, value, options.layout, options.enable_gqa)
        backend = validate.backend(options.backend, query.device)
        if backend == "torch":
            if options.backend == "auto":
                backends.notice(f"{query.device} is no Hopper GPU (compute capability 9.0)")
            return Call("torch", query, key, value)
        known, mods, base = _know(query, key, value, options, backend)
        if facts is not None:
            if len(_known) >= _KNOWN:
                _known.clear()
            _known[facts] = known
    else:
        mask = options.block_mask
        own: Any = options.mask_mod if mask is None or options.mask_mod is not None else mask.mask_mod
        mods = Mods(options.score_mod, options.score_mod_bwd, own, mask)
    prepared = prepare(mods, known.problem, known.numerics, base)
    if known.backend == "sm90" and prepared.plan_id not in known.statics:
        reason = backends.refusal(known.problem, lookup(prepared.plan_id), prepared.captures, base)
        if reason is not None:
            if options.backend == "sm90":
                raise UnsupportedError(f"backend='sm90': {reason}; backend='auto' takes torch's for this call")
            backends.notice(reason)
            return Call("torch", query, key, value)
    return Call(known.backend, query, key, value, prepared.captures, known.static(prepared, base))


_NUMBERS = (float, int, type(None))
_FLAGS = (bool, type(None))


def _facts(query: Tensor, key: Tensor, value: Tensor, o: Options) -> tuple[Any, ...] | None:
    """Everything that checks and `_know` look at, or None where that is more than can be compared at a glance."""
    plain = type(query) is type(key) is type(value) is Tensor and query.dim() == key.dim() == value.dim() == 4
    if not plain or query.is_meta or o.kernel_options is not None or o.index_base is not None or o.layout != "bhsd":
        return None
    if not (query.layout is key.layout is value.layout is torch.strided and query.stride(3) == 1):
        return None
    if not (key.stride(3) == value.stride(3) == 1 and query.shape[0] == key.shape[0]):
        return None
    if torch.is_autocast_enabled(query.device.type) or not (type(o.backend) is type(o.precision) is str):
        return None
    if not (type(o.scale) in _NUMBERS and type(o.enable_gqa) in _FLAGS and type(o.deterministic) in _FLAGS):
        return None
    if isinstance(o.mask_mod, Tensor) or not all(m is None or callable(m) for m in o[0:1] + o[5:7]):
        return None
    mask = o.block_mask
    own: Any = None
    if mask is not None:
        if type(mask) is not BlockMask or mask.index_base is not None:
            return None
        count = mask.q_to_kv.mask_block_cnt
        agrees = o.mask_mod is None or mask.mask_mod is None or mask.mask_mod is o.mask_mod
        own = (count.shape, count.device, mask.bits is None, mask.block_size, mask.seq_lengths, mask.bound, agrees)
    return (
        query.shape, key.shape, value.shape,
        query.dtype, key.dtype, value.dtype, query.device, key.device, value.device,
        o.score_mod is None, o.score_mod_bwd is None, o.mask_mod is None, own,
        o.scale, o.enable_gqa, o.deterministic, o.backend, o.precision,
        torch.are_deterministic_algorithms_enabled(),
    )  # fmt: skip


def _know(query: Tensor, key: Tensor, value: Tensor, o: Options, backend: str) -> tuple[_Known, Mods, IndexBase | None]:
    """The facts of a call with checked tensors, its mods and its index base."""
    problem = Problem.of(query, key, value, o.scale)
    mask, chosen = choose_mask(o.mask_mod, o.block_mask, problem)
    base = agreed_base(chosen, o.index_base)
    validate.index_base(base, problem.q_len, problem.kv_len, block_size_of(chosen, base))
    elements = validate.kernel_options(o.kernel_options)
    numerics = Numerics(o.precision, elements, backend, backend != "cpu" and is_deterministic(o))
    return _Known(backend, problem, numerics), Mods(o.score_mod, o.score_mod_bwd, mask, chosen), base


def is_deterministic(o: Options) -> bool:
    """Are bitwise equal runs demanded, here or of torch as a whole?"""
    return torch.are_deterministic_algorithms_enabled() if o.deterministic is None else o.deterministic


def check_options(o: Options) -> None:
    validate.flag("deterministic", o.deterministic)
    validate.choice("layout", o.layout, validate.LAYOUTS)
    validate.choice("precision", o.precision, validate.PRECISIONS)
    validate.scale(o.scale)
    validate.mods(o.score_mod, o.score_mod_bwd, None if isinstance(o.mask_mod, Tensor) else o.mask_mod)
    validate.index_base_type(o.index_base)


def checked(
    query: Tensor, key: Tensor, value: Tensor, layout: str, enable_gqa: bool | None
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v as BHSD views of one dtype, autocast applied, key and value expanded over the batch."""
    validate.tensors(query, key, value)
    device = query.device.type
    if device != "meta" and torch.is_autocast_enabled(device):  # torch knows no autocast of meta tensors
        dtype = torch.get_autocast_dtype(device)
        query, key, value = (t if t.dtype == torch.float64 else t.to(dtype) for t in (query, key, value))
    validate.one_dtype(query=query, key=key, value=value)
    if layout == "bshd":
        query, key, value = (t.transpose(1, 2) for t in (query, key, value))
    if key.shape[0] == 1 and query.shape[0] > 1:
        key, value = (t.expand(query.shape[0], *t.shape[1:]) for t in (key, value))
    validate.shapes(query, key, value)
    validate.heads(query.shape[1], key.shape[1], enable_gqa)
    query, key, value = (t if t.stride(-1) == 1 else t.contiguous() for t in (query, key, value))
    return query, key, value
