"""Every check of a user's arguments, one function per rule. Each raises one of ours: argument, value, rule, remedy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest

from flexbwd import backends
from flexbwd.errors import (
    DeviceError,
    DtypeError,
    MaskError,
    OptionError,
    ShapeError,
    UnsupportedError,
)
from flexbwd.sparsity.tensors import IndexBase

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
LAYOUTS = ("bhsd", "bshd")
PRECISIONS = ("fast", "accurate")


def tensors(query: Tensor, key: Tensor, value: Tensor) -> None:
    """query, key and value are dense 4-D tensors of supported dtypes on one device."""
    if type(query) is type(key) is type(value) is Tensor:
        same = query.dtype is key.dtype is value.dtype and query.device == key.device == value.device
        strided = query.layout is key.layout is value.layout is torch.strided and not query.is_nested
        if same and strided and query.dim() == key.dim() == value.dim() == 4 and query.dtype in DTYPES:
            return  # the usual call, at a third of the cost
    first_name, first = "query", query
    for name, t in (("query", query), ("key", key), ("value", value)):
        if not isinstance(t, Tensor):
            raise DtypeError(f"{name} is {_type_name(t)}; it must be a torch.Tensor")
        if t.is_nested or t.layout != torch.strided:
            raise UnsupportedError(
                f"{name} has layout {'nested' if t.is_nested else t.layout}; only dense tensors are served: pack the "
                "sequences into one and pass flexbwd.mods.document(...) as mask_mod"
            )
        if t.dim() != 4:
            raise ShapeError(f"{name} has shape {_shape(t)}; it must be [B, H, S, D]: add or merge dimensions")
        if t.dtype not in DTYPES:
            raise DtypeError(
                f"{name} has dtype {t.dtype}; allowed are {', '.join(map(str, DTYPES))}: cast it with {name}.to(...)"
            )
        if t.device != first.device:
            raise DeviceError(f"{name} is on {t.device} but {first_name} on {first.device}; move one with .to(device)")


def one_dtype(**named: Tensor) -> None:
    """query, key and value, autocast applied, are of one dtype."""
    (first_name, first), *others = named.items()
    for name, t in others:
        if t.dtype != first.dtype:
            raise DtypeError(f"{name} is {t.dtype} but {first_name} is {first.dtype}; one dtype is needed: cast one")


def no_transforms() -> None:
    """The call is not inside torch.func.grad, vmap, jvp and the like, which cannot see through it."""
    if torch._C._are_functorch_transforms_active():
        raise UnsupportedError(
            "flex_attention is called inside a torch.func transform (grad, vmap, jacrev, jvp); there is no rule for "
            "those: use torch.autograd.grad or .backward(), and fold a vmapped dimension into the batch"
        )


def shapes(query: Tensor, key: Tensor, value: Tensor) -> None:
    """Batch, lengths, head counts and head dims of q, k, v fit together."""
    if key.shape[:3] != value.shape[:3]:
        raise ShapeError(f"key {_shape(key)} and value {_shape(value)} must agree in batch, heads and length")
    if query.shape[3] != key.shape[3]:
        raise ShapeError(f"query has D={query.shape[3]} but key D={key.shape[3]}; their last dimensions must be equal")
    if key.shape[0] != query.shape[0]:
        raise ShapeError(
            f"query has batch {query.shape[0]} but key and value {key.shape[0]}; they must be equal, or 1 for key and "
            "value (then shared by the whole batch)"
        )


def heads(q_heads: int, kv_heads: int, enable_gqa: bool | None) -> None:
    """Query heads are a multiple of key heads; `enable_gqa=False` wants them equal."""
    if enable_gqa is not None and not isinstance(enable_gqa, bool):
        raise OptionError(f"{enable_gqa=} must be True, False or None (inferred from the head counts)")
    if q_heads == kv_heads:
        return
    if kv_heads == 0 or q_heads % kv_heads:
        raise ShapeError(f"query has {q_heads} heads and key {kv_heads}; query heads must be a multiple of key heads")
    if enable_gqa is False:
        raise ShapeError(
            f"query has {q_heads} heads and key {kv_heads} but enable_gqa=False; pass enable_gqa=True or leave it out"
        )


def scale(value: float | None) -> None:
    """`scale` is None or a finite number."""
    if isinstance(value, (torch.SymFloat, torch.SymInt)):
        return
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if value is None or (number and abs(value) < 1e38):  # an int may be too large for a float
        return
    raise OptionError(
        f"scale={value!r} must be a finite fp32 number or None (1/sqrt(D)); a tensor belongs into score_mod"
    )


def choice(name: str, value: Any, allowed: tuple[str, ...]) -> None:
    """A string option takes one of the listed values."""
    if not isinstance(value, str) or value not in allowed:
        raise OptionError(f"{name}={value!r} is not one of {', '.join(map(repr, allowed))}")


def flag(name: str, value: Any) -> None:
    """A switch is True, False or None."""
    if value is not None and not isinstance(value, bool):
        raise OptionError(f"{name}={value!r} must be True, False or None")


def callable_or_none(name: str, value: Any) -> None:
    """A mod is a callable."""
    if value is not None and not callable(value):
        raise OptionError(f"{name} is {_type_name(value)}; it must be a function of scalar tensors, or None")


def mods(score_mod: Any, score_mod_bwd: Any, mask_mod: Any) -> None:
    """Mods are callables; a backward needs the forward it belongs to."""
    callable_or_none("score_mod", score_mod)
    callable_or_none("score_mod_bwd", score_mod_bwd)
    callable_or_none("mask_mod", mask_mod)
    if score_mod_bwd is not None and score_mod is None:
        raise OptionError("score_mod_bwd is given without score_mod; pass the score_mod whose derivative it is")


def kernel_options(options: Mapping[str, Any] | None) -> int | None:
    """Known kernel options only. Returns `cpu_tile_elements`."""
    if options is None:
        return None
    if not isinstance(options, Mapping):
        raise OptionError(f"kernel_options is {_type_name(options)}; it must be a dict or None")
    unknown = sorted(set(options) - {"cpu_tile_elements"}, key=str)
    if unknown:
        raise OptionError(
            f"kernel_options has unknown keys {unknown}; known is 'cpu_tile_elements'. Triton's tuning options have no "
            "meaning here: leave them out"
        )
    elements = options.get("cpu_tile_elements")
    if elements is not None and (not isinstance(elements, int) or isinstance(elements, bool) or elements < 1):
        raise OptionError(f"kernel_options['cpu_tile_elements']={elements!r} must be a positive integer")
    return elements


def aux_request(return_lse: bool, return_aux: AuxRequest | None) -> AuxRequest:
    """What is returned beside the output."""
    flag("return_lse", return_lse)
    if return_aux is None:
        return AuxRequest(lse=bool(return_lse))
    if not isinstance(return_aux, AuxRequest):
        raise OptionError(f"return_aux is {_type_name(return_aux)}; pass flexbwd.AuxRequest(lse=..., max_scores=...)")
    if return_lse:
        raise OptionError("return_lse=True and return_aux are both given; use return_aux=AuxRequest(lse=True) alone")
    return return_aux


def index_base_type(base: Any) -> None:
    """`index_base` is an IndexBase or None."""
    if base is not None and not isinstance(base, IndexBase):
        raise OptionError(f"index_base is {_type_name(base)}; pass flexbwd.sparsity.IndexBase(...) or None")


def index_base(base: IndexBase | None, q_len: int, kv_len: int, block_size: tuple[int, int]) -> None:
    """One int32 base per q block and per kv block, on the granule of the block mask."""
    if base is None:
        return
    for name in ("b_off", "h_off"):
        off = getattr(base, name)
        if not isinstance(off, int) or isinstance(off, bool):
            raise OptionError(f"index_base.{name}={off!r} must be a Python int")
    for name, t, length, granule in (
        ("q_base", base.q_base, q_len, block_size[0]),
        ("kv_base", base.kv_base, kv_len, block_size[1]),
    ):
        if t is None:
            continue
        rows = -(-length // granule)
        if not isinstance(t, Tensor) or t.dtype != torch.int32 or tuple(t.shape) != (rows,):
            got = f"{t.dtype} {_shape(t)}" if isinstance(t, Tensor) else _type_name(t)
            raise MaskError(
                f"index_base.{name} is {got}; it must be int32 [{rows}], one per block of {granule} "
                f"of {length} positions"
            )


def backend(name: str, device: torch.device) -> str:
    """The backend that serves tensors on `device`."""
    choice("backend", name, backends.NAMES)
    return backends.choose(name, device)


def _shape(t: Tensor) -> str:
    return str(list(t.shape))


def _type_name(value: Any) -> str:
    return f"a {type(value).__name__}" if value is not None else "None"
