"""All tensors that a block mask holds, its mask_mod's included, and a like mask that holds others.

This is what `BlockMask.to` needs, and what makes a mask a pytree node: `tree_map` over it sees every tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from flexbwd.errors import MaskError

from .rebind import captured_tensors, global_tensors, map_tensors
from .tensors import BlockBits, BlockLists, BlockSparseTensors, IndexBase

if TYPE_CHECKING:
    from .block_mask import BlockMask


class Held:
    """The distinct tensors of a mask; `like(tensors)` is a mask of the same structure."""

    def __init__(self, mask: BlockMask) -> None:
        self.mask = mask
        base = mask.index_base
        self._fields: list[Tensor | None] = [*mask.q_to_kv, *mask.kv_to_q, *(mask.bits or (None,) * 3)]
        self._fields += [None, None] if base is None else [base.q_base, base.kv_base]
        captured = [] if mask.mask_mod is None else captured_tensors(mask.mask_mod)
        self.tensors = list({id(t): t for t in (*self._fields, *captured) if t is not None}.values())

    def like(self, tensors: Iterable[Any]) -> BlockMask:
        """The mask with its tensors replaced one by one; itself when they are the same ones."""
        new = list(tensors)
        if all(x is y for x, y in zip(self.tensors, new, strict=True)):
            return self.mask
        by_id = {id(old): t for old, t in zip(self.tensors, new, strict=True)}
        f: list[Any] = [None if t is None else by_id[id(t)] for t in self._fields]
        mask, base, mod = self.mask, self.mask.index_base, self.mask.mask_mod
        lists = BlockLists(
            BlockSparseTensors(*f[0:4]),
            BlockSparseTensors(*f[4:8]),
            None if mask.bits is None else BlockBits(*f[8:11]),
        )
        moved = None if base is None else IndexBase(base.b_off, base.h_off, f[11], f[12], base.block_size)
        mod = None if mod is None else map_tensors(mod, lambda t: by_id[id(t)])
        facts: dict[str, Any] = {"index_base": moved, "built": mask.built, "bound": mask.bound}
        return type(mask)(lists, mask.block_size, mask.seq_lengths, mod, **facts)

    def __eq__(self, other: object) -> bool:
        """As a pytree context: the same structure, whatever the tensors."""
        if not isinstance(other, Held):
            return NotImplemented
        return self._structure() == other._structure()

    def __hash__(self) -> int:
        return hash(self._structure())

    def _structure(self) -> tuple:
        mask, base = self.mask, self.mask.index_base
        offsets = None if base is None else (base.b_off, base.h_off, base.block_size)
        there = tuple(t is not None for t in self._fields)
        return (id(mask.mask_mod), mask.block_size, mask.seq_lengths, mask.built, mask.bound, offsets, there)


def moved(mask: BlockMask, device: torch.device | str) -> BlockMask:
    """See `BlockMask.to`."""
    target = torch.empty(0, device=device).device
    if mask.mask_mod is not None:
        for name, t in global_tensors(mask.mask_mod).items():
            if t.device != target and t.dim():
                raise MaskError(
                    f"mask_mod reads the global tensor {name} on {t.device}, which cannot be moved to {target} for it "
                    "alone; hold it in a closure or as a default argument instead"
                )
    held = Held(mask)
    return held.like(t if t.device == target else _copied(t, target) for t in held.tensors)


def _copied(t: Tensor, device: torch.device) -> Tensor:
    """`t.to(device)` that leaves expanded dimensions expanded."""
    one = t[tuple(slice(0, 1) if s == 0 and n > 1 else slice(None) for n, s in zip(t.shape, t.stride(), strict=True))]
    return one.to(device).expand(t.shape)


def register(cls: type[BlockMask]) -> None:
    """Make masks pytree nodes whose leaves are `Held.tensors`."""

    def flatten(mask: BlockMask) -> tuple[list[Tensor], Held]:
        held = Held(mask)
        return held.tensors, held

    unflatten: Callable[[Iterable[Any], Held], BlockMask] = lambda leaves, held: held.like(leaves)  # noqa: E731
    pytree.register_pytree_node(cls, flatten, unflatten)
