"""cuDNN's attention through torch's scaled_dot_product_attention."""

from __future__ import annotations

import functools

from torch import Tensor

from flexbwd.cli.bench_gpu.operands import Operands
from flexbwd.cli.bench_gpu.peers import Prepared
from flexbwd.cli.bench_gpu.workloads import Workload


def serves(w: Workload, variant: str) -> bool:
    return w.mask in ("dense", "causal") and not w.score


def prepare(w: Workload, given: Operands, variant: str) -> Prepared:
    import torch

    _only_cudnn()
    attend = torch.nn.functional.scaled_dot_product_attention
    q, k, v = given.leaves()
    causal = w.mask == "causal"
    grouped = w.group > 1
    if grouped and not _takes_groups(w, q):

        def repeated() -> Tensor:
            keys, values = (t.repeat_interleave(w.group, 1) for t in (k, v))
            return attend(q, keys, values, is_causal=causal)

        return Prepared(repeated, (q, k, v), given.grad_out)

    def forward() -> Tensor:
        return attend(q, k, v, is_causal=causal, enable_gqa=grouped)

    return Prepared(forward, (q, k, v), given.grad_out)


def _takes_groups(w: Workload, like: Tensor) -> bool:
    """Whether this version runs grouped heads, tried on a short call."""
    import torch

    q = like.new_zeros(1, w.heads, 128, w.dim).requires_grad_()
    k = like.new_zeros(1, w.key_heads, 128, w.dim).requires_grad_()
    try:
        out = torch.nn.functional.scaled_dot_product_attention(q, k, k, is_causal=True, enable_gqa=True)
        torch.autograd.grad(out, (q, k), torch.zeros_like(out))
    except RuntimeError:
        return False
    return True


@functools.cache
def _only_cudnn() -> None:
    """For the rest of the process: entering a context at each call would count as the peer's host time."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    sdpa_kernel(SDPBackend.CUDNN_ATTENTION).__enter__()
