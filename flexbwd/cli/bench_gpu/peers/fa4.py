"""FlashAttention-4's CuTe kernels (`flash_attn.cute`).

flags   causal, window and softcap as the library's own options; ALiBi as a score_mod beside the causal flag
mods    everything as hand-written CuTe score_mod and mask_mod (fa4_mods.py), with block lists both ways
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor

from flexbwd.cli.bench_gpu.operands import Operands
from flexbwd.cli.bench_gpu.peers import Prepared
from flexbwd.cli.bench_gpu.workloads import LEARNED, SOFTCAP, Workload, document_lengths

_BLOCK = 128


def serves(w: Workload, variant: str) -> bool:
    if w.score in LEARNED:
        return False
    if variant == "varlen":
        return w.mask == "documents" and w.batch == 1
    if variant == "flags":
        return w.mask != "documents" and not (w.score == "alibi" and w.mask == "dense")
    return w.mask != "dense" or bool(w.score)


def prepare(w: Workload, given: Operands, variant: str) -> Prepared:
    from flash_attn.cute import flash_attn_func

    if variant == "varlen":
        return varlen(w, given)
    q, k, v = (heads_last(t).contiguous().requires_grad_() for t in (given.query, given.key, given.value))
    options = flags(w) if variant == "flags" else mods(w, given)

    def forward() -> Tensor:
        out = flash_attn_func(q, k, v, **options)
        assert isinstance(out[0], Tensor)
        return out[0]

    return Prepared(forward, (q, k, v), heads_last(given.grad_out).contiguous(), heads_last)


def varlen(w: Workload, given: Operands) -> Prepared:
    """`[S, H, D]` of one batch entry, documents one after the other."""
    from flash_attn.cute import flash_attn_varlen_func

    lengths = document_lengths(w.length)
    edges = given.query.new_tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    q, k, v = (tokens_first(t).contiguous().requires_grad_() for t in (given.query, given.key, given.value))
    longest = max(lengths)

    def forward() -> Tensor:
        out = flash_attn_varlen_func(
            q, k, v, cu_seqlens_q=edges, cu_seqlens_k=edges, max_seqlen_q=longest, max_seqlen_k=longest, causal=True
        )
        assert isinstance(out[0], Tensor)
        return out[0]

    return Prepared(forward, (q, k, v), tokens_first(given.grad_out).contiguous(), lambda t: heads_last(t[None]))


def tokens_first(t: Tensor) -> Tensor:
    """`[1, H, S, D]` as `[S, H, D]`."""
    return t[0].transpose(0, 1)


def heads_last(t: Tensor) -> Tensor:
    """`[B, H, S, D]` as `[B, S, H, D]`, and back."""
    return t.transpose(1, 2)


def flags(w: Workload) -> dict[str, Any]:
    """Options of flash_attn_func that need no user code, but for ALiBi."""
    options: dict[str, Any] = {"causal": w.mask == "causal"}
    if w.mask == "window":
        options["window_size"] = (w.window - 1, 0)
    if w.score == "softcap":
        options["softcap"] = SOFTCAP
    elif w.score:
        options |= _score(w)
    return options


def mods(w: Workload, given: Operands) -> dict[str, Any]:
    """score_mod and its backward, mask_mod, and the lists of blocks for both directions."""
    from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch

    from flexbwd import create_block_mask
    from flexbwd.cli.bench_gpu.peers import fa4_mods

    options = _score(w)
    if given.mask is not None:
        listed = create_block_mask(given.mask, None, None, w.length, w.length, device=given.query.device)
        for name, lists in (("block_sparse_tensors", listed.q_to_kv), ("block_sparse_tensors_bwd", listed.kv_to_q)):
            options[name] = BlockSparseTensorsTorch(*lists, block_size=(_BLOCK, _BLOCK))
        options["mask_mod"] = fa4_mods.mask_mod(w)
    if given.documents is not None:
        options["aux_tensors"] = [given.documents]
    return options


def _score(w: Workload) -> dict[str, Any]:
    from flexbwd.cli.bench_gpu.peers import fa4_mods

    if not w.score:
        return {}
    forward, backward = fa4_mods.score_mod(w)
    return {"score_mod": forward, "score_mod_bwd": backward}
