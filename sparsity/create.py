"""create_block_mask: a block mask from a mask_mod, or from anything that says which elements are kept."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flexbwd.errors import DeviceError, MaskError, OptionError

from .block_mask import BlockMask
from .build import build_lists
from .combine import MaskMod
from .evaluate import is_traceable, lead_reads, traced
from .grid import check_block_size, check_sizes
from .outside_graphs import outside_graphs
from .rebind import captured_tensors
from .tabulate import tabulate_callable, tabulate_tensor
from .tensors import BlockLists, IndexBase

_TORCH_OPTIONS = {
    "_compile": "building needs no compilation here and never makes a dense mask",
    "separate_full_blocks": "full blocks are always listed apart; use BlockMask.from_kv_blocks for lists without them",
    "compute_dq_write_order": "it belongs to torch's FLASH backend; pass deterministic=True to flex_attention",
    "dq_kv_order": "it belongs to torch's FLASH backend; pass deterministic=True to flex_attention",
}


@outside_graphs
def create_block_mask(
    mask_mod: MaskMod | Tensor,
    B: int | None,
    H: int | None,
    Q_LEN: int,
    KV_LEN: int,
    device: torch.device | str | None = None,
    BLOCK_SIZE: int | tuple[int, int] = 128,
    *,
    index_base: IndexBase | None = None,
    **torch_options: Any,
) -> BlockMask:
    """The block mask of what `mask_mod(b, h, q_idx, kv_idx)` keeps, in time of the order of the blocks.

    Args:
        mask_mod: a function of four scalar tensors that yields a bool scalar; one that cannot be traced (Python
            control flow on an index, unusual ops) is evaluated on every element, and the mask keeps their bits. Or a
            dense bool tensor that broadcasts to `[B, H, Q_LEN, KV_LEN]`, true where kept.
        B, H: batch entries and *query* heads; None shares one mask among all.
        device: where the lists live; None takes that of captured tensors, else the accelerator or the CPU, as torch.
        BLOCK_SIZE: multiple of 16, or a pair (q, kv). 128 and 64 are the fast ones.
        index_base: where the lengths lie in a larger problem; mask_mod gets global coordinates.
    Raises:
        MaskError: sizes break a rule, or the mask reads b or h while B or H is None.
        OptionError: an option of torch's create_block_mask that has no meaning here.
        ModError: mask_mod is no valid mask; the class says why.
    """
    _check_options(torch_options, index_base)
    check_sizes(B, H, Q_LEN, KV_LEN)
    size = check_block_size(BLOCK_SIZE)
    if isinstance(mask_mod, Tensor):
        return _from_tensor(mask_mod, (B, H, Q_LEN, KV_LEN), device, size, index_base)
    if not callable(mask_mod):
        raise MaskError(
            f"mask_mod is a {type(mask_mod).__name__}; it must be a function (b, h, q_idx, kv_idx) -> bool, or a bool "
            "tensor. Use noop_mask to keep everything"
        )
    where = _device_of(mask_mod) if device is None else _usable(device)
    if is_traceable(mask_mod, where):
        lists: BlockLists = build_lists(
            *traced(mask_mod, where), B, H, Q_LEN, KV_LEN, size, index_base=index_base, device=where
        )
        kept_mod: MaskMod | None = mask_mod
    else:
        lists, kept_mod = tabulate_callable(mask_mod, B, H, Q_LEN, KV_LEN, size, index_base, where), None
    single = frozenset(letter for letter, n in (("b", B), ("h", H)) if n == 1)
    bound = lead_reads(mask_mod, where) & single if single else single
    return BlockMask(lists, size, (Q_LEN, KV_LEN), kept_mod, index_base=index_base, built=True, bound=bound)


def _from_tensor(
    mask: Tensor,
    sizes: tuple[int | None, int | None, int, int],
    device: torch.device | str | None,
    block_size: tuple[int, int],
    index_base: IndexBase | None,
) -> BlockMask:
    if index_base is not None:
        raise OptionError("index_base is given with a mask tensor, which has no coordinates to move; leave it out")
    lists = tabulate_tensor(mask, *sizes, block_size, mask.device if device is None else _usable(device))
    return BlockMask(lists, block_size, sizes[2:], built=True)


def _check_options(torch_options: dict[str, Any], index_base: Any) -> None:
    for name, value in torch_options.items():
        why = _TORCH_OPTIONS.get(name)
        if why is None:
            raise OptionError(
                f"create_block_mask has no option {name}={value!r}; it takes mask_mod, B, H, Q_LEN, KV_LEN, device, "
                "BLOCK_SIZE and index_base"
            )
        raise OptionError(f"create_block_mask has no option {name}={value!r} of torch's: {why}. Leave it out")
    if index_base is not None and not isinstance(index_base, IndexBase):
        raise OptionError(f"index_base is a {type(index_base).__name__}; pass flexbwd.sparsity.IndexBase(...) or None")


def _usable(device: torch.device | str) -> torch.device:
    """The device with its index, after a look at whether it is there."""
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError, TypeError) as found:
        first_line = (str(found).splitlines() or ["no reason given"])[0]
        raise DeviceError(
            f"device={device!r} cannot hold the block mask here: {first_line}; pass a device this machine has, or None "
            "for that of the captured tensors"
        ) from found


def _device_of(mask_mod: MaskMod) -> torch.device:
    """Where a mask_mod's tensors are; without any, where torch's create_block_mask would put the mask."""
    sized = [t for t in captured_tensors(mask_mod) if t.dim()]
    if sized:
        return sized[0].device
    return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
