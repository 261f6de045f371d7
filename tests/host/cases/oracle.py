"""One question for every case: does flex_attention agree with the fp64 reference, and with torch's own operator?"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from flexbwd.reference import kept_elements
from flexbwd.testing import (
    Case,
    assert_matches_reference,
    assert_within_budget,
    attention_grads,
    torch_operator_grads,
)

_TORCH_ELEMENTS = 2**19  # torch's eager operator holds a dozen dense score matrices


def check(
    case: Case,
    score_mod: Any = None,
    mask_mod: Any = None,
    *,
    captures: Mapping[str, Tensor] | None = None,
    block_mask: Any = None,
    torch_too: bool = True,
    **options: Any,
) -> dict[str, Tensor]:
    """Output, LSE and all gradients of one call, after they were compared with the reference and with torch.

    fp64 agrees to 1e-10 of the largest value; lower precision stays within twice the error of the same maths done
    eagerly. torch's operator is asked in fp64, about problems that are small and whose rows all keep something.
    """
    got = attention_grads(case, score_mod, mask_mod, captures=captures, block_mask=block_mask, **options)
    mask = {"block_mask": block_mask, "index_base": options.get("index_base")}
    assert_matches_reference(case, got, score_mod, mask_mod, captures=captures, **mask)
    if torch_too and case.query.dtype == torch.float64 and options.get("index_base") is None:
        _compare_with_torch(case, got, score_mod, kept_elements(case.shape, mask_mod, block_mask), captures)
    return got


def _compare_with_torch(
    case: Case, got: Mapping[str, Tensor], score_mod: Any, kept: Tensor, captures: Mapping[str, Tensor] | None
) -> None:
    if not 0 < kept.numel() <= _TORCH_ELEMENTS or not bool(kept.any(-1).all()):
        return
    want = torch_operator_grads(case, score_mod, lambda b, h, i, j: kept[b, h, i, j], captures=captures)
    for name in want:
        if got[name].dtype == torch.float64:  # torch adds up gradients of lower precision in that precision
            assert_within_budget(got[name], want[name], None, f"{name} against torch", floor=1e-12)


def causal(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return i >= j


def window(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return (i - j < 50) & (j - i < 30)


def param(*shape: int, seed: int = 7, dtype: torch.dtype = torch.float64) -> Tensor:
    """A seeded normal tensor that requires grad."""
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return values.to(dtype).requires_grad_(True)
