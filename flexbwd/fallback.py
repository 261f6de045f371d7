"""torch's own flex_attention behind our arguments, for devices and calls that no flexbwd kernel serves.

Compiled on CUDA (its Triton kernels), eager elsewhere. What it cannot do (a hand-written backward, an index base) is an
error of ours; everything else, our block masks and bool tensors included, is translated.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import flex_attention as torch_flex
from torch.nn.attention.flex_attention import AuxRequest
from torch.nn.attention.flex_attention import BlockMask as TorchBlockMask
from torch.utils.weak import WeakTensorKeyDictionary

from flexbwd import sparsity
from flexbwd.errors import UnsupportedError
from flexbwd.planning import Mods, Numerics, choose_mask, prepare
from flexbwd.problem import Problem


def attention(
    query: Tensor, key: Tensor, value: Tensor, options: Any, aux: AuxRequest
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """(out, lse, max_scores) of checked BHSD operands; the statistics are None unless `aux` asks for them."""
    if options.kernel_options is not None:
        raise _cannot("kernel_options", "leave it out: its options are the CPU backend's")
    if options.score_mod_bwd is not None:
        raise _cannot("score_mod_bwd", "leave it out: torch derives the backward itself")
    if options.index_base is not None:
        raise _cannot("index_base", "add the offsets inside the mods")
    if query.device.type == "cpu":
        if torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value)):
            raise _cannot("a CPU tensor that requires grad", "use backend='cpu', or torch.no_grad()")
        if aux.max_scores:
            raise _cannot("return_aux with max_scores for CPU tensors", "use backend='cpu'")
    tracing = torch.compiler.is_dynamo_compiling()
    flex: Any = _compiled() if query.is_cuda and not tracing else torch_flex.flex_attention
    out, found = flex(
        query,
        key,
        value,
        score_mod=options.score_mod,
        block_mask=(_traced_mask if tracing else _mask)(query, key, value, options),
        scale=options.scale,
        enable_gqa=query.shape[1] != key.shape[1],
        return_aux=AuxRequest(lse=True, max_scores=aux.max_scores),
    )
    return out, found.lse, found.max_scores


def _traced_mask(query: Tensor, key: Tensor, value: Tensor, options: Any) -> TorchBlockMask | None:
    """The same inside a region that Dynamo traces."""
    given, mask_mod = options.block_mask, options.mask_mod
    if mask_mod is None:
        return given if given is None or isinstance(given, TorchBlockMask) else given.to_torch()
    if given is not None or isinstance(mask_mod, Tensor):
        raise _cannot("mask_mod beside block_mask, or as a tensor", "make one block mask outside the compiled region")
    (batch, heads, q_len, _), kv_len = query.shape, key.shape[2]
    return torch_flex.create_block_mask(mask_mod, batch, heads, q_len, kv_len, device=str(query.device))


def _mask(query: Tensor, key: Tensor, value: Tensor, options: Any) -> TorchBlockMask | None:
    """The call's mask_mod and block_mask as one torch BlockMask."""
    if options.block_mask is None and options.mask_mod is None:
        return None
    problem = Problem.of(query, key, value, options.scale)
    mask, chosen = choose_mask(options.mask_mod, options.block_mask, problem)
    if chosen is None or mask is not chosen.mask_mod:
        prepared = prepare(Mods(mask_mod=mask, block_mask=chosen), problem, Numerics(backend="torch"), None)
        size = (128, 128) if chosen is None else chosen.block_size
        blocks = prepared.blocks
        assert blocks is not None
        mask = None if blocks.bits is not None else mask
        chosen = sparsity.BlockMask(blocks, size, (problem.q_len, problem.kv_len), mask)
    return _translate(chosen, eager=not query.is_cuda)


_translated: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def _translate(mask: sparsity.BlockMask, eager: bool) -> TorchBlockMask:
    """One translation per set of lists, for as long as they live unchanged.

    torch's eager path asks mask_mod alone and never looks at the lists: there it gets the elements themselves.
    """
    lists = mask.q_to_kv.mask_block_idx
    found = _translated.get(lists)
    state = (*((id(t), t._version) for t in mask.q_to_kv if t is not None), mask.mask_mod)
    if found is None or found[0] != state:
        made = mask.to_torch()
        if eager:
            kept = mask.element_mask()
            made.mask_mod = lambda b, h, q_idx, kv_idx: kept[b % kept.shape[0], h % kept.shape[1], q_idx, kv_idx]
        found = _translated[lists] = (state, made)
    return found[1]  # type: ignore[no-any-return]


def _cannot(name: str, remedy: str) -> UnsupportedError:
    return UnsupportedError(
        f"{name} is given, but this call runs on torch's flex_attention, which cannot take it; {remedy}"
    )


@functools.cache
def _compiled() -> Callable[..., Any]:
    return torch.compile(torch_flex.flex_attention)
