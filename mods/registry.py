"""The zoo's catalogue: for every mod its factory, a small sensible instance, its formula and its source.

Formula and source are read from the factory's docstring (first line, and the paragraph "Source: …"), so they are
written once.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flexbwd.errors import OptionError

from . import attention_gym as gym
from .alibi import alibi, alibi_learned
from .attention_sink import attention_sink
from .block_diffusion import block_diffusion
from .causal import causal, causal_offset
from .chunked_causal import chunked_causal
from .dilated_window import dilated_window
from .document import document, document_causal
from .document_interval import document_ids, document_interval, document_interval_causal
from .frame_causal import frame_causal
from .global_tokens import global_tokens
from .graphormer import graph_distances, graphormer
from .learned_bias import batch_bias, head_bias, key_bias, pair_bias
from .natten_2d import natten_2d
from .padding import padding_left, padding_right
from .prefix_lm import prefix_lm
from .relative_bias import relative_bias, relative_table
from .sandwich import sandwich
from .shared_prefix import shared_prefix
from .sigmoid_gate import sigmoid_gate
from .sliding_window import sliding_window
from .softcap import softcap
from .ssmax import ssmax
from .sta import sta
from .symmetric_window import symmetric_window
from .t5_bias import t5_bias
from .temperature import head_temperature
from .tree_verification import tree_ancestors, tree_verification


class Sizes(NamedTuple):
    """The problem that an example is made for."""

    batch: int
    heads: int
    q: int
    kv: int
    generator: torch.Generator
    dtype: torch.dtype  # of learned tensors

    @property
    def longest(self) -> int:
        return max(self.q, self.kv, 1)

    def learned(self, *shape: int, around: float = 0.0) -> Tensor:
        """A parameter: normal values, of small deviation, around a number."""
        noise = torch.randn(shape, generator=self.generator, dtype=torch.float64) * 0.3
        return (noise + around).to(self.dtype).requires_grad_(True)

    def integer(self, low: int, high: int, *shape: int) -> Tensor:
        """Uniform int32 in low … high, both ends included."""
        return torch.randint(low, high + 1, shape, generator=self.generator).to(torch.int32)

    def offsets(self, documents: int) -> Tensor:
        """Edges of `documents` packed documents of unequal lengths; some may be empty."""
        cuts = self.integer(0, self.longest, documents - 1).sort().values
        return torch.cat([cuts.new_zeros(1), cuts, cuts.new_full((1,), self.longest)])


@dataclass(frozen=True)
class ZooEntry:
    """One mod of the zoo.

    Attributes:
        kind: "score" or "mask".
        factory: what a user calls; for a plain mod (`causal`) the mod itself.
        arguments: from `Sizes` to the factory's arguments in `example`; None: a plain mod, there is nothing to call.
        attn_gym: from those arguments to attention-gym's mod of the same meaning; None where it has none.
    """

    name: str
    kind: str
    factory: Callable[..., Any]
    arguments: Callable[[Sizes], tuple[Any, ...]] | None
    attn_gym: Callable[..., Callable[..., Any]] | None = None

    def example(
        self,
        B: int,
        H: int,
        Sq: int,
        Skv: int,
        generator: torch.Generator | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> Callable[..., Any]:
        """A small instance for B batch entries, H query heads and these lengths; learned tensors require grad."""
        return self.instantiate(self.example_arguments(B, H, Sq, Skv, generator, dtype))

    def example_arguments(
        self,
        B: int,
        H: int,
        Sq: int,
        Skv: int,
        generator: torch.Generator | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> tuple[Any, ...]:
        """What `example` calls the factory with, and `attn_gym` takes."""
        generator = generator if generator is not None else torch.Generator().manual_seed(0)
        return self.arguments(Sizes(B, H, Sq, Skv, generator, dtype)) if self.arguments is not None else ()

    def instantiate(self, arguments: tuple[Any, ...]) -> Callable[..., Any]:
        return self.factory(*arguments) if self.arguments is not None else self.factory

    @property
    def formula(self) -> str:
        return (inspect.getdoc(self.factory) or "").split("\n", 1)[0].rstrip(".")

    @property
    def source(self) -> str:
        _, _, tail = (inspect.getdoc(self.factory) or "").partition("Source: ")
        return " ".join(tail.split()).rstrip(".")


def names() -> list[str]:
    """Names of all mods, sorted."""
    return sorted(_ENTRIES)


def get(name: str) -> ZooEntry:
    """The entry called `name`.

    Raises:
        OptionError: there is none.
    """
    if name not in _ENTRIES:
        raise OptionError(f"{name=} is not in the zoo; it has {', '.join(names())}")
    return _ENTRIES[name]


def zoo(kind: str | None = None) -> list[ZooEntry]:
    """All entries by name, or those of one kind, "score" or "mask"."""
    return [entry for _, entry in sorted(_ENTRIES.items()) if kind in (None, entry.kind)]


# -- examples that need more than a line ------------------------------------------------------------------------------
def _natten(s: Sizes) -> tuple[Any, ...]:
    side = max(3, int(s.longest**0.5))
    return (side, side), (3, 5 if side >= 5 else 3)


def _sta(s: Sizes) -> tuple[Any, ...]:
    frames = 2 * max(2, s.longest // 72)
    return (frames, 6, 4), (4, 6, 2), (2, 2, 2), 5


def _tree(s: Sizes) -> tuple[Any, ...]:
    prefix = max(s.kv - s.q, 0)
    nodes = max(s.q, s.kv - prefix, 1)
    parents = [-1] + [int(s.integer(max(0, n - 8), n - 1, 1)) for n in range(1, nodes)]
    return tree_ancestors(parents), prefix


def _shared_prefix(s: Sizes) -> tuple[Any, ...]:
    return s.offsets(6), torch.tensor([0, 0, 0, 3, 3, 3], dtype=torch.int32)


def _graphormer(s: Sizes) -> tuple[Any, ...]:
    edges = torch.rand((s.batch, s.longest, s.longest), generator=s.generator) < 2.0 / s.longest
    return s.learned(s.heads, 6), graph_distances(edges | edges.transpose(1, 2), 4)


def _global_tokens(s: Sizes) -> tuple[Any, ...]:
    return torch.rand(s.longest, generator=s.generator) < 0.05, max(s.longest // 8, 1)


_MASKS = (
    ZooEntry("attention_sink", "mask", attention_sink, lambda s: (4, s.longest // 6)),
    ZooEntry("block_diffusion", "mask", block_diffusion, lambda s: ((s.longest + 1) // 2, 16), gym.block_diffusion),
    ZooEntry("causal", "mask", causal, None, gym.causal),
    ZooEntry("causal_offset", "mask", causal_offset, lambda s: (s.kv - s.q,)),
    ZooEntry("chunked_causal", "mask", chunked_causal, lambda s: (s.longest // 3 + 1,), gym.chunked_causal),
    ZooEntry("dilated_window", "mask", dilated_window, lambda s: (s.longest // 5, 3), gym.dilated_window),
    ZooEntry("document", "mask", document, lambda s: (document_ids(s.offsets(5)),), gym.document),
    ZooEntry("document_causal", "mask", document_causal, lambda s: (document_ids(s.offsets(5)),), gym.document_causal),
    ZooEntry("document_interval", "mask", document_interval, lambda s: (s.offsets(5),), gym.document_interval),
    ZooEntry(
        "document_interval_causal",
        "mask",
        document_interval_causal,
        lambda s: (s.offsets(5),),
        gym.document_interval_causal,
    ),
    ZooEntry("frame_causal", "mask", frame_causal, lambda s: (s.longest // 7 + 1,)),
    ZooEntry("global_tokens", "mask", global_tokens, _global_tokens, gym.global_tokens),
    ZooEntry("natten_2d", "mask", natten_2d, _natten, gym.natten_2d),
    ZooEntry("padding_left", "mask", padding_left, lambda s: (s.integer(0, s.kv, s.batch), s.kv)),
    ZooEntry("padding_right", "mask", padding_right, lambda s: (s.integer(0, s.kv, s.batch),)),
    ZooEntry("prefix_lm", "mask", prefix_lm, lambda s: (s.longest // 4,), gym.prefix_lm),
    ZooEntry("prefix_lm_batch", "mask", prefix_lm, lambda s: (s.integer(0, s.kv, s.batch),)),
    ZooEntry("shared_prefix", "mask", shared_prefix, _shared_prefix, gym.shared_prefix),
    ZooEntry("sliding_window", "mask", sliding_window, lambda s: (s.longest // 5,), gym.sliding_window),
    ZooEntry("sta", "mask", sta, _sta, gym.sta),
    ZooEntry("symmetric_window", "mask", symmetric_window, lambda s: (s.longest // 7,)),
    ZooEntry("tree_verification", "mask", tree_verification, _tree, gym.tree_verification),
)

_SCORES = (
    ZooEntry("alibi", "score", alibi, lambda s: (s.heads,), gym.alibi),
    ZooEntry("alibi_learned", "score", alibi_learned, lambda s: (s.learned(s.heads),)),
    ZooEntry("batch_bias", "score", batch_bias, lambda s: (s.learned(s.batch, s.heads),)),
    ZooEntry("graphormer", "score", graphormer, _graphormer, gym.graphormer),
    ZooEntry("head_bias", "score", head_bias, lambda s: (s.learned(s.heads),)),
    ZooEntry("head_temperature", "score", head_temperature, lambda s: (s.learned(s.heads, around=1.5),)),
    ZooEntry("key_bias", "score", key_bias, lambda s: (s.learned(s.longest),)),
    ZooEntry("pair_bias", "score", pair_bias, lambda s: (s.learned(s.heads, s.q, s.kv),)),
    ZooEntry("relative_bias", "score", relative_bias, lambda s: (0.05,)),
    ZooEntry("relative_table", "score", relative_table, lambda s: (s.learned(s.heads, 2 * s.longest - 1),)),
    ZooEntry("sandwich", "score", sandwich, lambda s: (s.heads, s.longest, 16), gym.sandwich),
    ZooEntry("sigmoid_gate", "score", sigmoid_gate, lambda s: (s.learned(s.heads, s.longest),)),
    ZooEntry("softcap", "score", softcap, lambda s: (20.0,), gym.softcap),
    ZooEntry("ssmax", "score", ssmax, lambda s: (s.learned(s.heads, around=0.4),)),
    ZooEntry("t5_bidirectional", "score", t5_bias, lambda s: (s.learned(s.heads, 32), True, 64)),
    ZooEntry("t5_causal", "score", t5_bias, lambda s: (s.learned(s.heads, 16), False, 64)),
)

_ENTRIES = {entry.name: entry for entry in (*_MASKS, *_SCORES)}
