"""Fake arguments that describe a kernel's tensors to the compiler, and real ones brought into that form."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from flexbwd.jit.compile import load_dsl

ALIGN_BYTES = 16  # TMA: base addresses and strides in bytes are multiples of this


def dsl_dtype(dtype: torch.dtype) -> Any:
    """The DSL's name of a torch dtype."""
    load_dsl()
    import cutlass

    return {
        torch.float16: cutlass.Float16,
        torch.bfloat16: cutlass.BFloat16,
        torch.float32: cutlass.Float32,
        torch.int32: cutlass.Int32,
    }[dtype]


def fake_tensor(dtype: torch.dtype, rank: int, align_bytes: int = ALIGN_BYTES) -> Any:
    """A tensor of any extents and strides with a contiguous last dimension, `align_bytes` in base and strides."""
    cute = load_dsl()
    from cutlass.cute.runtime import make_fake_tensor

    step = max(1, align_bytes // dtype.itemsize)
    shape = tuple(cute.sym_int32(divisibility=step if d == rank - 1 else 1) for d in range(rank))
    stride = tuple(cute.sym_int64(divisibility=step) for _ in range(rank - 1)) + (1,)
    return make_fake_tensor(dsl_dtype(dtype), shape, stride, assumed_align=align_bytes)


def fake_compact(dtype: torch.dtype, rank: int, align_bytes: int | None = None) -> Any:
    """A contiguous (row-major) tensor of any extents."""
    cute = load_dsl()
    from cutlass.cute.runtime import make_fake_compact_tensor

    shape = tuple(cute.sym_int32() for _ in range(rank))
    order = tuple(reversed(range(rank)))
    align = dtype.itemsize if align_bytes is None else align_bytes
    return make_fake_compact_tensor(dsl_dtype(dtype), shape, stride_order=order, assumed_align=align)


def fake_stream() -> Any:
    """torch's current stream, read by TVM-FFI at each launch; not an argument of the compiled function."""
    load_dsl()
    from cutlass.cute.runtime import make_fake_stream

    return make_fake_stream(use_tvm_ffi_env_stream=True)


def tma_ready(tensor: Tensor) -> Tensor:
    """`tensor` itself where the copy engine can read it, else the nearest view or copy that it can.

    Rule: last dimension contiguous and a multiple of 16 bytes, the base and all other strides multiples of 16 bytes. A
    dimension of one element may carry any stride in torch: it gets a legal one without a copy. Fake tensors, of a
    warm-up without a GPU, count as aligned.
    """
    strides = tensor.stride()
    if _movable(strides, tensor.element_size()) and type(tensor) is Tensor and tensor.data_ptr() % ALIGN_BYTES == 0:
        return tensor  # the usual case, at a third of the cost
    step, shape = ALIGN_BYTES // tensor.element_size(), tensor.shape
    if strides[-1] == 1 and (isinstance(tensor, FakeTensor) or tensor.data_ptr() % ALIGN_BYTES == 0):
        bad = [d for d in range(tensor.dim() - 1) if strides[d] % step]
        if not bad:
            return tensor
        if all(shape[d] == 1 for d in bad):
            return tensor.as_strided(shape, [shape[-1] if d in bad else strides[d] for d in range(tensor.dim())])
    copy = torch.empty(shape, dtype=tensor.dtype, device=tensor.device)
    return copy.copy_(tensor)


@functools.lru_cache(maxsize=4096)
def _movable(strides: tuple[int, ...], size_bytes: int) -> bool:
    """Is the last dimension contiguous, and every other stride a multiple of 16 bytes?"""
    return strides[-1] == 1 and all(s * size_bytes % ALIGN_BYTES == 0 for s in strides[:-1])
