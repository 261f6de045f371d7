"""Ours, through the public call: masks as mask_mod, with the block mask built beforehand."""

from __future__ import annotations

from torch import Tensor

from flexbwd.cli.bench_gpu.operands import Operands
from flexbwd.cli.bench_gpu.peers import Prepared
from flexbwd.cli.bench_gpu.workloads import Workload


def serves(w: Workload, variant: str) -> bool:
    return not variant or variant in w.variants


def prepare(w: Workload, given: Operands, variant: str) -> Prepared:
    from flexbwd import create_block_mask, flex_attention

    q, k, v = given.leaves()
    capture = given.capture
    if variant == "learned":
        assert capture is not None
        capture = capture.detach().requires_grad_()
    score = given.score(capture)
    mask = None
    if given.mask is not None:
        mask = create_block_mask(given.mask, None, None, w.length, w.length, device=q.device)
    deterministic = True if variant == "deterministic" else None

    def forward() -> Tensor:
        out = flex_attention(q, k, v, score, mask, deterministic=deterministic, backend="sm90")
        assert isinstance(out, Tensor)
        return out

    trained = () if capture is None or not capture.requires_grad else (capture,)
    return Prepared(forward, (q, k, v, *trained), given.grad_out)
