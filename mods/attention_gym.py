"""attention-gym's mods of the same meaning, built from the zoo's arguments: a second opinion for tests.

`attn_gym` is a development dependency, imported only when one of these is called.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Mod = Callable[..., Any]


def block_diffusion(length: int, block: int) -> Mod:
    return _masks().generate_block_diffusion_mask(length, block)


def causal() -> Mod:
    return _masks().causal_mask


def chunked_causal(chunk: int) -> Mod:
    return _masks().batchify_mask_mod(_masks().causal_mask, chunk)


def dilated_window(radius: int, dilation: int) -> Mod:
    return _masks().generate_dilated_sliding_window(radius, dilation)


def document_interval(offsets: Tensor) -> Mod:
    from torch.nn.attention.flex_attention import noop_mask

    return _masks().generate_doc_mask_mod(noop_mask, offsets)


def document_interval_causal(offsets: Tensor) -> Mod:
    return _masks().generate_packed_causal_doc_mask_mod(offsets)


def document(ids: Tensor) -> Mod:
    return document_interval(_offsets(ids))


def document_causal(ids: Tensor) -> Mod:
    return document_interval_causal(_offsets(ids))


def global_tokens(is_global: Tensor, radius: int) -> Mod:
    return _masks().generate_global_sliding_window(radius, is_global)


def natten_2d(canvas: tuple[int, int], kernel: tuple[int, int]) -> Mod:
    """Square canvases only: theirs clamps the row by the width. Their `w` is our row."""
    return _masks().generate_natten(canvas[0], canvas[1], kernel[0], kernel[1])


def prefix_lm(prefix: int) -> Mod:
    return _masks().generate_prefix_lm_mask(prefix)


def shared_prefix(offsets: Tensor, prefix_of: Tensor) -> Mod:
    return _masks().generate_shared_prefix_mask_mod(offsets, prefix_of)


def sliding_window(window: int) -> Mod:
    return _masks().generate_sliding_window(window)


def sta(canvas: Any, kernel: Any, tile: Any, text: int) -> Mod:
    return _masks().generate_sta_mask_mod_3d(canvas, kernel, tile, text)


def tree_verification(ancestors: Tensor, prefix: int) -> Mod:
    return _masks().generate_jetspec_tree_causal_mask_mod(prefix, ancestors)


def alibi(heads: int) -> Mod:
    """Powers of two only: theirs does not interleave slopes."""
    return _mods().generate_alibi_bias(heads)


def graphormer(table: Tensor, distance: Tensor) -> Mod:
    return _mods().generate_graphormer_spatial_bias(table, distance)


def sandwich(heads: int, length: int, width: int) -> Mod:
    return _mods().generate_sandwich_bias(heads, length, width)


def softcap(cap: float) -> Mod:
    return _mods().generate_tanh_softcap(cap)


def _offsets(ids: Tensor) -> Tensor:
    """Edges of contiguous documents, empty ones included, from their ids."""
    counts = torch.bincount(ids.long(), minlength=int(ids.max()) + 1)
    return torch.cat([counts.new_zeros(1), counts.cumsum(0)]).to(torch.int32)


def _masks() -> Any:
    import attn_gym.masks

    return attn_gym.masks


def _mods() -> Any:
    import attn_gym.mods

    return attn_gym.mods
