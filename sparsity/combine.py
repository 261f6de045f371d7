"""mask_mods made of mask_mods. Small callable objects, so that they pickle whenever their parts do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from flexbwd.errors import OptionError

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


class _Combined:
    """Several mask_mods as one; `masks` are its parts."""

    symbol = ""

    def __init__(self, masks: tuple[MaskMod, ...]) -> None:
        self.masks = masks

    @property
    def __name__(self) -> str:
        return f"({self.symbol.join(map(mask_name, self.masks))})"

    def __repr__(self) -> str:
        return self.__name__


class AndMasks(_Combined):
    symbol = " & "

    def __call__(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        first, *others = self.masks
        kept = first(b, h, q_idx, kv_idx)
        for mask in others:
            kept = kept & mask(b, h, q_idx, kv_idx)
        return kept


class OrMasks(_Combined):
    symbol = " | "

    def __call__(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        first, *others = self.masks
        kept = first(b, h, q_idx, kv_idx)
        for mask in others:
            kept = kept | mask(b, h, q_idx, kv_idx)
        return kept


class NotMask:
    def __init__(self, mask: MaskMod) -> None:
        self.mask = mask

    @property
    def __name__(self) -> str:
        return f"~{mask_name(self.mask)}"

    def __repr__(self) -> str:
        return self.__name__

    def __call__(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return ~self.mask(b, h, q_idx, kv_idx)


def and_masks(*mask_mods: MaskMod) -> MaskMod:
    """keep where every one of `mask_mods` (one or more) keeps.

    Raises:
        OptionError: no mask is given, or one is not callable.
    """
    _check("and_masks", mask_mods)
    return mask_mods[0] if len(mask_mods) == 1 else AndMasks(mask_mods)


def or_masks(*mask_mods: MaskMod) -> MaskMod:
    """keep where any of `mask_mods` (one or more) keeps.

    Raises:
        OptionError: no mask is given, or one is not callable.
    """
    _check("or_masks", mask_mods)
    return mask_mods[0] if len(mask_mods) == 1 else OrMasks(mask_mods)


def not_mask(mask_mod: MaskMod) -> MaskMod:
    """keep where `mask_mod` does not.

    Raises:
        OptionError: `mask_mod` is not callable.
    """
    _check("not_mask", (mask_mod,))
    return NotMask(mask_mod)


def noop_mask(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    """keep everything."""
    return q_idx == q_idx


def mask_name(mask_mod: Any) -> str:
    """How messages and pictures call a mask_mod."""
    return str(getattr(mask_mod, "__name__", None) or repr(mask_mod))


def _check(what: str, mask_mods: tuple[Any, ...]) -> None:
    if not mask_mods:
        raise OptionError(f"{what}() got no mask; pass one or more mask_mods, or use noop_mask to keep everything")
    for position, mask in enumerate(mask_mods):
        if not callable(mask):
            raise OptionError(
                f"{what}: argument {position} is {mask!r} of type {type(mask).__name__}; it must be a mask_mod "
                "(b, h, q_idx, kv_idx) -> bool. Pass the function itself, not its result or a BlockMask"
            )
