"""flex_attention: validate, plan, call the operator. Nothing but the order of calls."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.attention.flex_attention import AuxOutput, AuxRequest

from flexbwd import backends, compiling, fallback, ops, validate
from flexbwd.calls import MaskMod, Options, ScoreMod, check_options, checked, is_deterministic, prepare_call
from flexbwd.errors import OptionError
from flexbwd.planning import agreed_base
from flexbwd.sparsity import BlockMask
from flexbwd.sparsity.tensors import IndexBase


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


def warmup(query: Tensor, key: Tensor, value: Tensor, *args: Any, **options: Any) -> None:
    """Prepare everything `flex_attention(query, key, value, ...)` will need, without computing attention.

    Mods are traced and joined into a plan, block lists are built, and kernels are compiled, in parallel, or loaded from
    disk, so that the first real call pays for the mathematics only. The values of q, k, v do not matter. Raises what
    `flex_attention` would.
    """
    try:
        given = _SIGNATURE.bind(query, key, value, *args, **options).arguments
    except TypeError as found:
        raise OptionError(
            f"warmup takes the arguments of flex_attention: {found}; known are {', '.join(_SIGNATURE.parameters)}"
        ) from None
    aux = validate.aux_request(given.get("return_lse", False), given.get("return_aux"))
    with query.fake_mode if isinstance(query, FakeTensor) else contextlib.nullcontext():
        call = prepare_call(query, key, value, Options(**{n: v for n, v in given.items() if n in Options._fields}))
        if call.backend == "sm90":
            needs = [t.requires_grad for t in (call.query, call.key, call.value, *call.captures)]
            backends.module("sm90").warm(ops.operands_of(*call.operands), needs, aux.max_scores)


_SIGNATURE = inspect.signature(flex_attention)


Results = tuple[Tensor, Tensor | None, Tensor | None]  # out, lse, max_scores


def _eager(query: Tensor, key: Tensor, value: Tensor, options: Options, aux: AuxRequest) -> Results:
    call = prepare_call(query, key, value, options)
    if call.static is None:
        return fallback.attention(call.query, call.key, call.value, options, aux)
    return ops.attention(call.query, call.key, call.value, call.captures, call.static, aux.max_scores)


def _compiled(query: Tensor, key: Tensor, value: Tensor, options: Options, aux: AuxRequest) -> Results:
    """The same inside a torch.compile region, where Dynamo traces this function."""
    check_options(options)
    query, key, value = checked(query, key, value, options.layout, options.enable_gqa)
    backend = validate.backend(options.backend, query.device)
    if backend == "torch":
        return fallback.attention(query, key, value, options, aux)
    validate.kernel_options(options.kernel_options)
    masks = compiling.mask_parts(options.mask_mod, options.block_mask)
    compiling.check_fit(options.block_mask, query, key)
    options = options._replace(index_base=agreed_base(options.block_mask, options.index_base))
    validate.index_base(options.index_base, query.shape[2], key.shape[2], masks[2])
    deterministic = backend != "cpu" and is_deterministic(options)
    return compiling.call(query, key, value, options, masks, backend, deterministic)
