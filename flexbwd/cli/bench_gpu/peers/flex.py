"""torch's flex_attention, compiled (Triton); the same callables, and the same blocks listed."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from flexbwd.cli.bench_gpu.operands import Operands
from flexbwd.cli.bench_gpu.peers import Prepared
from flexbwd.cli.bench_gpu.workloads import LEARNED, Workload


def serves(w: Workload, variant: str) -> bool:
    return w.score not in LEARNED


def prepare(w: Workload, given: Operands, variant: str) -> Prepared:
    import torch
    import torch._inductor.compile_fx  # the compiler's own import is not part of a first call
    from torch.nn.attention.flex_attention import flex_attention

    from flexbwd import create_block_mask

    torch._dynamo.reset()  # else a limit on recompilations of flex_attention is met after some workloads
    attend: Any = torch.compile(flex_attention, fullgraph=True, dynamic=False)
    q, k, v = given.leaves()
    score, mask = given.score(given.capture), None
    if given.mask is not None:  # built by ours: torch's own builder evaluates every element
        mask = create_block_mask(given.mask, None, None, w.length, w.length, device=q.device).to_torch()

    def forward() -> Tensor:
        out = attend(q, k, v, score_mod=score, block_mask=mask, enable_gqa=w.group > 1)
        assert isinstance(out, Tensor)
        return out

    return Prepared(forward, (q, k, v), given.grad_out)
