"""flex_attention: validate, plan, call the operator. Nothing but the order of calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxOutput, AuxRequest

from flexbwd import backends, compiling, fallback, ops, validate
from flexbwd.errors import OptionError, UnsupportedError
from flexbwd.plan import lookup
from flexbwd.planning import Mods, Numerics, agreed_base, block_size_of, choose_mask, prepare
from flexbwd.problem import Problem
from flexbwd.sparsity import BlockMask
from flexbwd.sparsity.tensors import IndexBase

ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: ScoreMod | None = None,
    block_mask: BlockMask | None = None,
    scale: float | None = None,
    enable_gqa: bool | None = None,
    return_lse: bool = False,
    kernel_options: Mapping[str, Any] | None = None,
    *,
    score_mod_bwd: Callable[..., Tensor] | None = None,
    mask_mod: MaskMod | Tensor | None = None,
    return_aux: AuxRequest | None = None,
    deterministic: bool | None = None,
    layout: str = "bhsd",
    backend: str = "auto",
    precision: str = "fast",
    index_base: IndexBase | None = None,
) -> Tensor | tuple[Tensor, Tensor] | tuple[Tensor, AuxOutput]:
    """Attention with a programmable score and mask; only listed blocks are computed.

        s = scale · <q_i, k_j>;   s' = score_mod(s, b, h, i, j);   out_i = Σ_kept softmax(s')_ij · v_j

    Call-compatible with `torch.nn.attention.flex_attention.flex_attention`.

    Args:
        query: `[B, Hq, Sq, D]`; key: `[B, Hkv, Skv, D]`; value: `[B, Hkv, Skv, Dv]`. fp16, bf16, fp32 or fp64. Hq is a
            multiple of Hkv. key and value may have batch 1, then shared. `layout="bshd"` swaps heads and length.
        score_mod: `(score, b, h, q_idx, kv_idx) -> score`, all scalar tensors. Its captured tensors get gradients.
        block_mask: a flexbwd or torch BlockMask: which blocks are walked, and the mask_mod inside partial ones.
        scale: multiplies <q, k> before score_mod; None means 1/sqrt(D).
        enable_gqa: None infers grouped heads from the shapes; False refuses them.
        return_lse: also return the natural-log LSE `[B, Hq, Sq]`, fp32 (fp64 for fp64), differentiable.
        kernel_options: `{"cpu_tile_elements": int}` bounds the scores the CPU backend holds at a time.
        score_mod_bwd: `(grad, score, b, h, q_idx, kv_idx) -> d score`, used instead of the derived derivative.
        mask_mod: `(b, h, q_idx, kv_idx) -> bool`, or a bool tensor broadcastable to `[B, Hq, Sq, Skv]`. Enough by
            itself: the block mask is built and cached. With block_mask, the mask of its partial blocks.
        return_aux: `AuxRequest(lse=..., max_scores=...)`; the second result is then an `AuxOutput`.
        deterministic: True demands bitwise equal runs; None follows torch.use_deterministic_algorithms. The CPU backend
            always is.
        backend: "auto" (CPU tensors: the CPU backend; compute capability 9.0: the Hopper kernels; otherwise, and where
            these cannot do the call, torch's flex_attention with a notice), or "cpu", "sm90", "torch" to insist.
        precision: "fast" or "accurate" forms inside mods; the CPU backend is always accurate.
        index_base: where this call lies in a larger problem, so that mods see global coordinates.

    Returns:
        `[B, Hq, Sq, Dv]` in query's dtype and memory order; rows that keep nothing are 0, with lse = -inf. With
        return_lse `(out, lse)`; with return_aux `(out, AuxOutput)`.

    Raises:
        ShapeError, DtypeError, DeviceError, MaskError, OptionError, UnsupportedError, ModError: see `flexbwd.errors`.
    """
    aux = validate.aux_request(return_lse, return_aux)
    options = Options(
        score_mod,
        block_mask,
        scale,
        enable_gqa,
        kernel_options,
        score_mod_bwd,
        mask_mod,
        deterministic,
        layout,
        backend,
        precision,
        index_base,
    )
    run = _compiled if torch.compiler.is_dynamo_compiling() else _eager
    out, lse, max_scores = run(query, key, value, options, aux)
    if layout == "bshd":
        out = out.transpose(1, 2)
    if return_aux is not None:
        return out, AuxOutput(lse if aux.lse else None, max_scores if aux.max_scores else None)
    if not return_lse:
        return out
    assert lse is not None
    return out, lse


def warmup(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> None:
    """Prepare everything `flex_attention(query, key, value, **options)` will need, without computing attention.

    Mods are traced and joined into a plan, block lists are built, and kernels are compiled, in parallel, or loaded from
    disk, so that the first real call pays for the mathematics only. The values of q, k, v do not matter. Raises what
    `flex_attention` would.
    """
    unknown = sorted(set(options) - set(Options._fields))
    if unknown:
        raise OptionError(f"warmup got unknown options {unknown}; known are {', '.join(Options._fields)}")
    call = _prepare(query, key, value, Options(**options))
    if call.backend == "sm90":
        needs = [t.requires_grad for t in (call.query, call.key, call.value, *call.captures)]
        backends.module("sm90").warm(ops.operands_of(*call.operands), needs)


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


Results = tuple[Tensor, Tensor | None, Tensor | None]  # out, lse, max_scores


class Call(NamedTuple):
    """One call, validated and planned: what the operators take, unless torch is to compute it."""

    backend: str
    query: Tensor
    key: Tensor
    value: Tensor
    captures: list[Tensor] = []  # noqa: RUF012  (never written to)
    static: ops.Static | None = None

    @property
    def operands(self) -> tuple[Any, ...]:
        return self.query, self.key, self.value, self.captures, self.static


def _eager(query: Tensor, key: Tensor, value: Tensor, options: Options, aux: AuxRequest) -> Results:
    call = _prepare(query, key, value, options)
    if call.static is None:
        return fallback.attention(call.query, call.key, call.value, options, aux)
    return ops.attention(call.query, call.key, call.value, call.captures, call.static, aux.max_scores)


def _prepare(query: Tensor, key: Tensor, value: Tensor, options: Options) -> Call:
    """Validate, choose the backend, plan, and gather what the operator takes."""
    o = options
    validate.no_transforms()
    _check_options(o)
    query, key, value = _checked(query, key, value, o.layout, o.enable_gqa)
    backend = validate.backend(o.backend, query.device)
    if backend == "torch":
        if o.backend == "auto":
            backends.notice(f"{query.device} is no Hopper GPU (compute capability 9.0)")
        return Call(backend, query, key, value)
    problem = Problem.of(query, key, value, o.scale)
    mask, chosen = choose_mask(o.mask_mod, o.block_mask, problem)
    base = agreed_base(chosen, o.index_base)
    validate.index_base(base, problem.q_len, problem.kv_len, block_size_of(chosen, base))
    elements = validate.kernel_options(o.kernel_options)
    numerics = Numerics(o.precision, elements, backend, backend != "cpu" and _deterministic(o))
    prepared = prepare(Mods(o.score_mod, o.score_mod_bwd, mask, chosen), problem, numerics, base)
    if backend == "sm90":
        reason = backends.module(backend).refusal(problem, lookup(prepared.plan_id), prepared.captures, base)
        if reason is not None:
            if o.backend == "sm90":
                raise UnsupportedError(
                    f"backend='sm90': {reason}; use backend='auto', which takes torch's for this call"
                )
            backends.notice(reason)
            return Call("torch", query, key, value)
    static = ops.Static.of(prepared.blocks, base, prepared.plan_id, problem.scale)
    return Call(backend, query, key, value, list(prepared.captures), static)


def _deterministic(o: Options) -> bool:
    return torch.are_deterministic_algorithms_enabled() if o.deterministic is None else o.deterministic


def _compiled(query: Tensor, key: Tensor, value: Tensor, options: Options, aux: AuxRequest) -> Results:
    """The same inside a torch.compile region, where Dynamo traces this function."""
    _check_options(options)
    query, key, value = _checked(query, key, value, options.layout, options.enable_gqa)
    backend = validate.backend(options.backend, query.device)
    if backend == "torch":
        return fallback.attention(query, key, value, options, aux)
    validate.kernel_options(options.kernel_options)
    masks = compiling.mask_parts(options.mask_mod, options.block_mask)
    compiling.check_fit(options.block_mask, query, key)
    options = options._replace(index_base=agreed_base(options.block_mask, options.index_base))
    validate.index_base(options.index_base, query.shape[2], key.shape[2], masks[2])
    deterministic = backend != "cpu" and _deterministic(options)
    return compiling.call(query, key, value, options, masks, backend, deterministic)


def _check_options(o: Options) -> None:
    validate.flag("deterministic", o.deterministic)
    validate.choice("layout", o.layout, validate.LAYOUTS)
    validate.choice("precision", o.precision, validate.PRECISIONS)
    validate.scale(o.scale)
    validate.mods(o.score_mod, o.score_mod_bwd, None if isinstance(o.mask_mod, Tensor) else o.mask_mod)
    validate.index_base_type(o.index_base)


def _checked(
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
