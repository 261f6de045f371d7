"""Seeded inputs of a workload, and its mods as torch functions: what ours, torch flex and the oracle are given."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from flexbwd import mods
from flexbwd.cli.bench_gpu.workloads import SOFTCAP, Workload, document_lengths
from flexbwd.mods import MaskMod, ScoreMod


@dataclass(frozen=True, eq=False)
class Operands:
    """query, grad_out `[B, H, S, D]`; key, value `[B, Hkv, S, D]`, all bf16 and contiguous.

    Attributes:
        mask: None where every score is kept.
        score: makes the score mod, or None, from `capture`, which may be a leaf that requires grad.
        capture: what a learned score mod trains: slopes `[H]`, a relative table `[2S - 1]` or a bias per key `[S]`.
        documents: document number of every token, int32 `[S]`, for packed documents.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    grad_out: Tensor
    mask: MaskMod | None
    score: Callable[[Tensor | None], ScoreMod | None]
    capture: Tensor | None = None
    documents: Tensor | None = None

    def leaves(self) -> tuple[Tensor, Tensor, Tensor]:
        """Fresh q, k, v that require grad, over the same memory."""
        q, k, v = (t.detach().requires_grad_() for t in (self.query, self.key, self.value))
        return q, k, v


def operands(w: Workload, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> Operands:
    """The same numbers at each call."""
    generator = torch.Generator(device).manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device).to(dtype)

    query, grad_out = (draw(w.batch, w.heads, w.length, w.dim) for _ in range(2))
    key, value = (draw(w.batch, w.key_heads, w.length, w.dim) for _ in range(2))
    ids = None
    if w.mask == "documents":
        lengths = torch.tensor([0, *document_lengths(w.length)])
        ids = mods.document_ids(lengths.cumsum(0).to(torch.int32)).to(device)
    return Operands(query, key, value, grad_out, _mask(w, ids), _score(w), _capture(w, device), ids)


def _mask(w: Workload, ids: Tensor | None) -> MaskMod | None:
    if w.mask == "documents":
        assert ids is not None
        return mods.document_causal(ids)
    return {"dense": None, "causal": mods.causal, "window": mods.sliding_window(max(w.window - 1, 0))}[w.mask]


def _capture(w: Workload, device: torch.device) -> Tensor | None:
    if w.score == "slopes":
        return torch.exp2(-8 * torch.arange(1, w.heads + 1, device=device) / w.heads)
    generator = torch.Generator(device).manual_seed(2)
    size = {"table": 2 * w.length - 1, "key bias": w.length}.get(w.score)
    return None if size is None else torch.randn(size, generator=generator, device=device)


def _score(w: Workload) -> Callable[[Tensor | None], ScoreMod | None]:
    def make(capture: Tensor | None) -> ScoreMod | None:
        if w.score == "softcap":
            return mods.softcap(SOFTCAP)
        if w.score == "alibi":
            return mods.alibi(w.heads)
        if not w.score:
            return None
        assert capture is not None
        learned = {"slopes": mods.alibi_learned, "table": mods.relative_table, "key bias": mods.key_bias}
        return learned[w.score](capture)

    return make
