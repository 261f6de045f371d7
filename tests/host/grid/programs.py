"""Random small mods, as a user would write them: text of a torch function over scores, indices and captured tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

HEADS, WIDE = 4, 64  # captured tensors have room for every index
NUMBERS = ("0.5", "-1.0", "2", "0.1", "3.0")
UNARY = (
    "torch.tanh({})", "torch.sigmoid({})", "torch.sin({})", "{}.abs()", "torch.relu({})", "-{}", "{}.clamp(-2.0, 1.5)",
    "torch.exp(-{}.abs())", "torch.log1p({}.abs())", "torch.sqrt({}.abs() + 1)", "{}.detach()", "torch.erf({})",
    "torch.nn.functional.silu({})", "torch.nn.functional.softplus({})", "1 / (1 + {} ** 2)",
)  # fmt: skip
BINARY = (
    "{} + {}", "{} - {}", "{} * {}", "torch.maximum({}, {})", "torch.minimum({}, {})", "{} / (2 + torch.cos({}))",
    "torch.where({} > {}, s, 0.3 * s)",
)  # fmt: skip
INDICES = ("b", "h", "i", "j", "(i - j)", "(i + j) % 7", "(i // 3)", "torch.maximum(i, j)", "(j - i).abs()")
LOADS = (
    "zero", "one[0]", "by_h[h]", "by_i[i]", "by_j[j]", "by_d[i - j + 32]", "plane[i, j]", "rows[h][i]",
    "cube[b, h, j]", "bucket_values[buckets[i - j + 32]]", "flags[h, j].to(s.dtype)", "ints[j]", "wide[h, j]",
    "by_i[j]", "low[h]", "by_d[(i * j) % 64]", "scale_of[h] * 2", "by_j.cos()[j]",
)  # fmt: skip
COMPARE = ("{} >= {}", "{} < {} + 5", "{} % 3 != {} % 3", "({} - {}).abs() <= 6", "{} + {} > 4")
MASK_LEAVES = ("ids[i] == ids[j]", "flags[h, j]", "lens[b] > j", "i >= 0", "j < 29", "ints[i] <= ints[j]")
JOIN = ("({}) & ({})", "({}) | ({})", "~({})", "({}) ^ ({})", "torch.where({}, {}, i >= j)")


@dataclass(frozen=True)
class Program:
    """`score` and `mask` are Python text; None: no such mod."""

    score: str | None
    mask: str | None


def _fill(template: str, parts: list[str], pick: Callable[[], int]) -> str:
    while "{}" in template:
        template = template.replace("{}", f"({parts[pick() % len(parts)]})", 1)
    return template


@st.composite
def score_texts(draw: st.DrawFn) -> str:
    """A few statements, each of one operation over what came before."""
    values, lines = ["s", "s"], []
    for n in range(draw(st.integers(1, 7))):
        kind = draw(st.sampled_from(("load", "load", "index", "number", "unary", "binary", "binary")))
        template = draw(st.sampled_from({"load": LOADS, "index": INDICES, "number": NUMBERS, "unary": UNARY,
                                         "binary": BINARY}[kind]))  # fmt: skip
        text = _fill(template, values, lambda: len(values) - 1 - draw(st.integers(0, 3)))
        text = {"index": f"({text}) * 0.1", "number": f"torch.where(s > 0, {text}, {text} / 3)"}.get(kind, text)
        lines.append(f"    v{n} = {text}")
        values.append(f"v{n}")
    used = " + ".join(draw(st.lists(st.sampled_from(values), min_size=1, max_size=3)))
    return "\n".join([*lines, f"    return (torch.tanh({used}) + {values[-1]}) * torch.ones_like(s)"])


@st.composite
def mask_texts(draw: st.DrawFn) -> str:
    parts = []
    for _ in range(draw(st.integers(1, 4))):
        if parts and draw(st.booleans()):
            parts.append(_fill(draw(st.sampled_from(JOIN)), parts, lambda: draw(st.integers(0, 3))))
        elif draw(st.booleans()):
            parts.append(draw(st.sampled_from(MASK_LEAVES)))
        else:
            parts.append(_fill(draw(st.sampled_from(COMPARE)), list(INDICES[2:]), lambda: draw(st.integers(0, 6))))
    return f"    return {parts[-1]}"


programs = st.builds(Program, st.none() | score_texts(), st.none() | mask_texts())


def captured(seed: int) -> dict[str, Tensor]:
    """What the texts name. Floating ones require grad."""
    g = torch.Generator().manual_seed(seed)

    def real(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
        return torch.randn(shape, generator=g, dtype=torch.float64).to(dtype).requires_grad_(True)

    return {
        "zero": real(), "one": real(1), "by_h": real(HEADS), "by_i": real(WIDE), "by_j": real(WIDE), "by_d": real(WIDE),
        "plane": real(WIDE, WIDE), "rows": real(HEADS, WIDE), "cube": real(2, HEADS, WIDE), "bucket_values": real(5),
        "low": real(HEADS, dtype=torch.bfloat16), "scale_of": real(HEADS, dtype=torch.float32),
        "wide": real(1, WIDE).expand(HEADS, WIDE), "buckets": torch.randint(5, (WIDE,), generator=g),
        "flags": torch.rand(HEADS, WIDE, generator=g) > 0.3, "ints": torch.randint(9, (WIDE,), generator=g).int(),
        "ids": torch.arange(WIDE) // 11, "lens": torch.tensor([30, 17]),
    }  # fmt: skip


def compiled(program: Program, tensors: dict[str, Tensor]) -> tuple[Any, Any]:
    """The mods as functions whose globals hold the tensors."""
    scope: dict[str, Any] = {"torch": torch, **tensors}
    if program.score is not None:
        exec(f"def score_mod(s, b, h, i, j):\n{program.score}\n", scope)
    if program.mask is not None:
        exec(f"def mask_mod(b, h, i, j):\n{program.mask}\n", scope)
    return scope.get("score_mod"), scope.get("mask_mod")
