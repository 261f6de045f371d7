"""The named workloads, and the arithmetic that their masks leave."""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from flexbwd.errors import OptionError

Mask = Literal["dense", "causal", "window", "documents"]
Score = Literal["", "softcap", "alibi", "slopes", "table", "key bias"]
Pass = Literal["fwd", "bwd"]
PASSES: tuple[Pass, ...] = ("fwd", "bwd")

SOFTCAP = 20.0
LEARNED = ("slopes", "table", "key bias")  # scores of captured tensors that can be trained
_QUICK = 8  # how many times shorter, and with fewer heads, the workloads of --quick are
_DOCUMENT_TOKENS = 64, 8192


@dataclass(frozen=True)
class Workload:
    """Attention of bf16 q, k, v, dO: `[batch, heads, length, dim]`, k and v with `kv_heads`.

    Attributes:
        window: keys that a row of a causal window sees, itself included.
        variants: further ways of ours that are compared with ours: "deterministic", "learned".
        host_bound: so short that the Python call counts: a whole round trip is measured too.
    """

    name: str
    mask: Mask
    batch: int
    length: int
    heads: int
    dim: int
    score: Score = ""
    kv_heads: int = 0
    window: int = 0
    variants: tuple[str, ...] = ()
    host_bound: bool = False

    @property
    def key_heads(self) -> int:
        return self.kv_heads or self.heads

    @property
    def group(self) -> int:
        return self.heads // self.key_heads

    @property
    def title(self) -> str:
        """ "causal, softcap, D128 B2 S8192 H32/8"."""
        mask = f"window {self.window}" if self.mask == "window" else self.mask
        score = {"": "", "slopes": ", ALiBi slopes", "table": ", relative table", "alibi": ", ALiBi"}
        heads = f"H{self.heads}" + (f"/{self.kv_heads}" if self.kv_heads else "")
        mods = score.get(self.score, f", {self.score}")
        return f"{mask}{mods}, D{self.dim} B{self.batch} S{self.length} {heads}"

    def smaller(self) -> Workload:
        """For a smoke test: shorter, one batch entry, few heads; the same mods and ratio of heads."""
        key_heads = max(1, self.key_heads // _QUICK)
        return dataclasses.replace(
            self,
            batch=1,
            length=max(256, self.length // _QUICK),
            heads=key_heads * self.group,
            kv_heads=key_heads if self.kv_heads else 0,
            window=self.window // _QUICK,
        )

    def live_elements(self) -> int:
        """Score elements that the mask keeps, of all heads and batch entries."""
        s = self.length
        one = {
            "dense": lambda: s * s,
            "causal": lambda: triangle(s),
            "window": lambda: triangle(s) - triangle(max(0, s - self.window)),
            "documents": lambda: sum(map(triangle, document_lengths(s))),
        }[self.mask]()
        return one * self.batch * self.heads

    def flops(self, which: Pass) -> float:
        """Forward two products, 4·D per live element; backward five, counted as 2.5 times the forward."""
        return self.live_elements() * 4.0 * self.dim * (1.0 if which == "fwd" else 2.5)


def triangle(n: int) -> int:
    """1 + 2 + … + n."""
    return n * (n + 1) // 2


def document_lengths(total: int, seed: int = 1) -> list[int]:
    """Log-normal lengths (median e^7 ≈ 1100, sigma 1), 64 to 8192 tokens, until `total` is full; the last is cut.

    The scale shrinks with totals below 32768, so that small workloads have as many documents.
    """
    scale = min(1.0, total / 32768)
    low, high = (max(1, round(scale * n)) for n in _DOCUMENT_TOKENS)
    drawn = torch.empty(4096).log_normal_(7.0, 1.0, generator=torch.Generator().manual_seed(seed))
    lengths: list[int] = []
    left = total
    for length in (drawn * scale).clamp(low, high).to(torch.int64).tolist():
        lengths.append(min(length, left))
        left -= lengths[-1]
        if not left:
            return lengths
    raise OptionError(f"{total=}: 4096 documents do not fill so many tokens; use at most 4 million")


def _table() -> tuple[Workload, ...]:
    w = Workload
    return (
        w("dense-d64", "dense", 2, 8192, 32, 64),
        w("causal-d64", "causal", 2, 8192, 32, 64),
        w("dense-d128", "dense", 2, 8192, 16, 128),
        w("causal-d128", "causal", 2, 8192, 16, 128),
        w("dense-d256", "dense", 2, 8192, 8, 256),
        w("causal-d256", "causal", 2, 8192, 8, 256),
        w("causal-gqa-d128", "causal", 1, 16384, 32, 128, kv_heads=8),
        w("window-d128", "window", 1, 16384, 16, 128, window=1024),
        w("documents-d128", "documents", 1, 32768, 16, 128, variants=("deterministic",)),
        w("documents-gqa-d128", "documents", 1, 32768, 32, 128, kv_heads=8),
        w("softcap-d128", "causal", 2, 8192, 16, 128, score="softcap"),
        w("alibi-causal-d128", "causal", 2, 8192, 16, 128, score="alibi"),
        w("alibi-d64", "dense", 2, 8192, 16, 64, score="alibi"),
        w("small-d128", "causal", 8, 512, 16, 128, host_bound=True),
        w("causal-16k-d128", "causal", 1, 16384, 16, 128, variants=("deterministic",)),
        w("slopes-d128", "causal", 2, 8192, 16, 128, score="slopes", variants=("learned",)),
        w("table-d128", "causal", 2, 8192, 16, 128, score="table", variants=("learned",)),
        w("key-bias-d128", "causal", 2, 8192, 16, 128, score="key bias", variants=("learned",)),
    )


WORKLOADS = {w.name: w for w in _table()}


def select(patterns: Sequence[str]) -> list[Workload]:
    """The workloads that any of the globs matches; all of them for none."""
    chosen = [w for w in WORKLOADS.values() if not patterns or any(fnmatch.fnmatch(w.name, p) for p in patterns)]
    dead = [p for p in patterns if not fnmatch.filter(WORKLOADS, p)]
    if dead:
        raise OptionError(f"--workload {' '.join(dead)} matches none of {', '.join(WORKLOADS)}")
    return chosen
