"""What `flexbwd bench` measures: seeded operands, packed documents, and the timing of rivals side by side."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from flexbwd import cpu, create_block_mask, flex_attention
from flexbwd.mods import causal, document_ids
from flexbwd.mods import document_causal as document_causal_mod

HEADS, HEAD_DIM = 8, 64
MEAN_DOCUMENT = 600  # tokens: at length 4096, seven documents and 88 % of the tiles skipped

Work = Callable[[], object]


def operands(length: int, heads: int = HEADS) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v that require grad, and the gradient of the output: fp32 `[1, heads, length, HEAD_DIM]`."""
    generator = torch.Generator().manual_seed(0)
    shape = (1, heads, length, HEAD_DIM)
    query, key, value, upstream = (torch.randn(shape, generator=generator) for _ in range(4))
    return query.requires_grad_(), key.requires_grad_(), value.requires_grad_(), upstream


def document_offsets(length: int, mean: int = MEAN_DOCUMENT) -> Tensor:
    """Edges of packed documents of very unequal lengths, `mean` tokens on average; at least three documents."""
    number = max(3, round(length / mean))
    weights = torch.rand(number, generator=torch.Generator().manual_seed(1)) + 0.25
    edges = torch.cumsum(weights / weights.sum(), 0) * length
    return torch.cat([torch.zeros(1), edges]).round().to(torch.int32)


def document_causal(length: int, mean: int = MEAN_DOCUMENT) -> Callable[..., Tensor]:
    """The mask of packed documents, each seeing itself and its past."""
    return document_causal_mod(document_ids(document_offsets(length, mean)))


def masks(length: int) -> dict[str, Callable[..., Tensor]]:
    """The masks that are timed."""
    return {"documents": document_causal(length), "causal": causal}


def fastest(rivals: Mapping[str, Work], repeats: int) -> dict[str, float]:
    """Best seconds of each; the rivals take turns, so that a busy machine slows all of them alike."""
    for work in rivals.values():
        work()
    times: dict[str, list[float]] = {name: [] for name in rivals}
    for _ in range(repeats):
        for name, work in rivals.items():
            begin = time.perf_counter()
            work()
            times[name].append(time.perf_counter() - begin)
    return {name: min(seconds) for name, seconds in times.items()}


def training_step_rivals(mask: Callable[..., Tensor], length: int) -> tuple[dict[str, Work], float]:
    """Forward and backward, ours and dense SDPA with a bool mask; and the percentage of skipped tiles."""
    query, key, value, upstream = operands(length)
    block_mask = create_block_mask(mask, None, None, length, length)
    keep = block_mask.element_mask().clone()
    sdpa = torch.nn.functional.scaled_dot_product_attention

    def step(attend: Callable[[], Tensor]) -> Work:
        return lambda: torch.autograd.grad(attend(), (query, key, value), upstream)

    rivals = {
        "ours": step(lambda: flex_attention(query, key, value, block_mask=block_mask)),  # type: ignore[arg-type,return-value]
        "dense": step(lambda: sdpa(query, key, value, attn_mask=keep)),
    }
    return rivals, float(block_mask.sparsity())


def forward(mask: Callable[..., Tensor], length: int) -> Work:
    """Our forward alone."""
    block_mask = create_block_mask(mask, None, None, length, length)
    return _forward(flex_attention, block_mask, length)


def peer_forward(mask: Callable[..., Tensor], length: int) -> Work:
    """The forward alone of torch's compiled flex_attention."""
    from torch.nn.attention import flex_attention as peer

    block_mask = peer.create_block_mask(mask, None, None, length, length, device="cpu")
    return _forward(torch.compile(peer.flex_attention), block_mask, length)


def _forward(attend: Callable[..., Any], block_mask: Any, length: int) -> Work:
    query, key, value = (t.detach() for t in operands(length)[:3])

    def work() -> object:
        with torch.no_grad():
            return attend(query, key, value, block_mask=block_mask)

    return work


def host_overhead(length: int, calls: int) -> float:
    """Median seconds that a call spends outside the backend's maths, once mods and shapes have been seen.

    CPU time of the calling thread, so that other processes do not count. The call has everything that must be
    recognised again: a score mod with a captured parameter, and a mask_mod without a block mask.
    """
    query, key, value, _ = operands(length)
    slopes = torch.rand(HEADS).requires_grad_()
    mask = document_causal(length)

    def alibi(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score + slopes[h] * (kv_idx - q_idx)

    inside = 0.0
    forward = cpu.forward

    def timed(*args: Any) -> Any:
        nonlocal inside
        begin = time.thread_time()
        result = forward(*args)
        inside = time.thread_time() - begin
        return result

    outside = []
    with mock.patch.object(cpu, "forward", timed):
        for _ in range(calls):
            begin = time.thread_time()
            flex_attention(query, key, value, alibi, mask_mod=mask)
            outside.append(time.thread_time() - begin - inside)
    return statistics.median(outside[1:])
