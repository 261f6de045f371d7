"""Problem: the shapes, dtypes and scale of one attention call, derived once, and the layout of its outputs."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor


class Problem(NamedTuple):
    """Sizes of `query [B, Hq, Sq, D]`, `key [B, Hkv, Skv, D]`, `value [B, Hkv, Skv, Dv]`."""

    batch: int
    q_heads: int
    kv_heads: int
    q_len: int
    kv_len: int
    head_dim: int
    value_dim: int
    dtype: torch.dtype
    device: torch.device
    scale: float
    abstract: bool = False  # fake, functional or meta tensors: values cannot be looked at

    @classmethod
    def of(cls, query: Tensor, key: Tensor, value: Tensor, scale: float | None = None) -> Problem:
        """Read the sizes off validated tensors; `scale=None` means 1/sqrt(D)."""
        batch, q_heads, q_len, head_dim = query.shape
        _, kv_heads, kv_len, value_dim = value.shape
        if scale is None:
            scale = 1.0 / math.sqrt(head_dim) if head_dim else 1.0
        abstract = type(query) is not Tensor and isinstance(query, (FakeTensor, FunctionalTensor))
        sizes = (batch, q_heads, kv_heads, q_len, kv_len, head_dim, value_dim)
        return cls(*sizes, query.dtype, query.device, scale, abstract or query.is_meta)

    @property
    def lengths(self) -> tuple[int, int]:
        return self.q_len, self.kv_len

    @property
    def group(self) -> int:
        """Query heads per key head."""
        return self.q_heads // self.kv_heads if self.kv_heads else 1


def stat_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of LSE, delta and everything inside mods: fp64 for fp64 inputs, else fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def empty_like_order(like: Tensor, shape: Sequence[int], dtype: torch.dtype | None = None) -> Tensor:
    """A dense uninitialised tensor of `shape` whose dimensions are nested in memory as those of `like`.

    A `like` with an expanded (stride 0) dimension gives a contiguous result.
    """
    dtype = like.dtype if dtype is None else dtype
    shape = tuple(shape)
    find = _known_strides if type(like) is Tensor else _strides  # sizes of fake tensors may be symbols, with no hash
    return torch.empty_strided(shape, find(like.shape, like.stride(), shape), dtype=dtype, device=like.device)


def _strides(sizes: Sequence[int], strides: Sequence[int], shape: tuple[int, ...]) -> list[int]:
    """Strides of a dense tensor of `shape`, nested as one of these sizes and strides is."""
    found = [0] * len(shape)
    step = 1
    for dim in reversed(_memory_order(sizes, strides)):
        found[dim] = step
        step = step * max(shape[dim], 1)
    return found


_known_strides = functools.lru_cache(maxsize=4096)(_strides)


def _memory_order(sizes: Sequence[int], strides: Sequence[int]) -> list[int]:
    """Dimensions, outermost first; dimensions of size 1 stay where they stand."""
    dims = range(len(sizes))
    sized = [d for d in dims if sizes[d] != 1]
    if any(strides[d] == 0 for d in sized):
        return list(dims)
    by_stride = iter(sorted(sized, key=lambda d: -strides[d]))
    return [next(by_stride) if d in sized else d for d in dims]
