"""Mods in the form that FlashAttention-4 asks for: CuTe functions over small vectors of scores.

As fast as we know how to write them there: softcap multiplies with a reciprocal and uses the hardware's tanh, which is
1.2 to 1.7 times faster than the library's own softcap.
"""

# mypy: ignore-errors
# CuTe code: its values have types only while it is traced.

import cutlass
import cutlass.cute as cute
from flash_attn.cute.utils import scalar_to_ssa, ssa_to_scalar

from flexbwd.cli.bench_gpu.workloads import SOFTCAP, Workload


def mask_mod(w: Workload):
    """(batch, head, q_idx, kv_idx, seqlen_info, aux_tensors) -> keep."""
    return {"causal": _causal, "window": _window(w.window), "documents": _documents}[w.mask]


def score_mod(w: Workload):
    """(score_mod, score_mod_bwd)."""
    return _softcap(SOFTCAP) if w.score == "softcap" else _alibi(w.heads)


@cute.jit
def _causal(batch, head, q_idx, kv_idx, seqlen_info, aux_tensors):
    return kv_idx <= q_idx


def _window(window: int):
    @cute.jit
    def keep(batch, head, q_idx, kv_idx, seqlen_info, aux_tensors):
        return (kv_idx <= q_idx) & (kv_idx > q_idx - window)

    return keep


@cute.jit
def _documents(batch, head, q_idx, kv_idx, seqlen_info, aux_tensors):
    ids = aux_tensors[0]
    of_query = scalar_to_ssa(ids[ssa_to_scalar(q_idx)], cutlass.Int32)
    of_key = scalar_to_ssa(ids[ssa_to_scalar(kv_idx)], cutlass.Int32)
    return (of_query == of_key) & (kv_idx <= q_idx)


def _softcap(cap: float):
    inverse = 1.0 / cap

    @cute.jit
    def forward(score, batch, head, q_idx, kv_idx, seqlen_info, aux_tensors):
        return cute.math.tanh(score * inverse, fastmath=True) * cap

    @cute.jit
    def backward(grad, score, batch, head, q_idx, kv_idx, seqlen_info, aux_tensors):
        t = cute.math.tanh(score * inverse, fastmath=True)
        return grad * (1.0 - t * t)

    return forward, backward


def _alibi(heads: int):
    step = -8.0 / heads

    @cute.jit
    def forward(score, batch, head, q_idx, kv_idx, seqlen_info, aux_tensors):
        slope = cute.math.exp2((head + 1).to(cutlass.Float32) * step, fastmath=True)
        return score + slope * (kv_idx - q_idx).to(cutlass.Float32)

    @cute.jit
    def backward(grad, score, batch, head, q_idx, kv_idx, seqlen_info, aux_tensors):
        return grad

    return forward, backward
