"""The inputs of one attention call on the GPU, ready for the copy engine."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flexbwd.errors import UnsupportedError
from flexbwd.jit.launch import tma_ready

MAX_HEAD_DIM = 256


@dataclass(frozen=True, eq=False)
class Operands:
    """query [B, Hq, Sq, D], key [B, Hkv, Skv, D], value [B, Hkv, Skv, Dv] of one 16-bit dtype, any strides that TMA
    reads; scale."""

    query: Tensor
    key: Tensor
    value: Tensor
    scale: float

    @classmethod
    def of(cls, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Operands:
        """Check what these kernels can do, and copy only what TMA cannot address.

        Raises:
            UnsupportedError: a dtype other than fp16/bf16, or a head dim above 256 or not a multiple of 8.
        """
        if query.dtype not in (torch.float16, torch.bfloat16):
            raise UnsupportedError(
                f"dtype {query.dtype}: the sm90 kernels take float16 and bfloat16; pass one of these"
            )
        dim, value_dim = query.shape[3], value.shape[3]
        if (dim | value_dim) % 8 or not (0 < dim <= MAX_HEAD_DIM and 0 < value_dim <= MAX_HEAD_DIM):
            raise UnsupportedError(
                f"head dims {dim} and {value_dim}: the sm90 kernels take multiples of 8 up to {MAX_HEAD_DIM}; pad them"
            )
        return cls(_ready(query), _ready(key), _ready(value), float(scale))

    @property
    def batch(self) -> int:
        return self.query.shape[0]

    @property
    def q_heads(self) -> int:
        return self.query.shape[1]

    @property
    def kv_heads(self) -> int:
        return self.key.shape[1]

    @property
    def group(self) -> int:
        """Query heads per key head."""
        return self.q_heads // self.kv_heads if self.kv_heads else 1

    @property
    def q_len(self) -> int:
        return self.query.shape[2]

    @property
    def kv_len(self) -> int:
        return self.key.shape[2]

    @property
    def head_dim(self) -> int:
        return self.query.shape[3]

    @property
    def value_dim(self) -> int:
        return self.value.shape[3]


def _ready(tensor: Tensor) -> Tensor:
    """`tma_ready`, whose answer for a tensor that is ready, of 16-bit elements, is found in a microsecond."""
    b, h, s, d = tensor.stride()
    if type(tensor) is Tensor and d == 1 and (b | h | s) % 8 == 0 and tensor.data_ptr() % 16 == 0:
        return tensor
    return tma_ready(tensor)
