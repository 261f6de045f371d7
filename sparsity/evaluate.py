"""What a mask keeps, asked of the mask itself: element by element, or block by block."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from flexbwd.errors import ModDataDependentError, ModShapeError, ModUnsupportedOpError
from flexbwd.modgraph.ir import Node, topological
from flexbwd.modgraph.to_torch import TorchProgram

from .build import build_lists
from .combine import MaskMod
from .convert import bits_mask_mod
from .eager_mask import EagerMask
from .lists import class_grid
from .tabulate import tabulate_callable

if TYPE_CHECKING:
    from .block_mask import BlockMask

UNTRACEABLE = (ModDataDependentError, ModShapeError, ModUnsupportedOpError)  # a mask that raises these is tabulated


def traced(mask_mod: MaskMod, device: torch.device) -> tuple[Node, tuple[Tensor, ...]]:
    """The graph of a mask_mod and its captured tensors by load slot."""
    from flexbwd.modgraph.frontend import ModKind, trace  # make_fx is slow to import, and lists alone do not need it

    found, tensors = trace(mask_mod, ModKind.MASK, device=device)
    return found.output, found.prologue.run(tensors)


def reads(root: Node) -> frozenset[str]:
    """Names of the coordinates that a graph depends on."""
    return frozenset(str(n.attr) for n in topological([root]) if n.op == "in")


def lead_reads(mask_mod: MaskMod, device: torch.device) -> frozenset[str]:
    """Which of "b" and "h" a mask_mod reads. An untraceable one is watched in one call."""
    try:
        return reads(traced(mask_mod, device)[0]) & {"b", "h"}
    except UNTRACEABLE:
        found = EagerMask(mask_mod, device).reads()
        return frozenset(letter for letter, read in zip("bh", found, strict=True) if read)


def is_traceable(mask_mod: MaskMod, device: torch.device) -> bool:
    """Whether a mask_mod has a graph. Mods that are plainly wrong raise ModError."""
    try:
        traced(mask_mod, device)
    except UNTRACEABLE:
        return False
    return True


class MaskElements:
    """The mask of partial blocks, evaluated densely: `(rows) -> bool [B, H, rows, Skv]`."""

    def __init__(self, mask: BlockMask) -> None:
        self._shape, self._device = mask.shape, mask.device
        self._call: Any = None
        mod = mask.global_mask_mod()
        if mask.bits is not None:
            self._call = bits_mask_mod(mask.q_to_kv, mask.bits, mask.block_size, mask.seq_lengths[1])
        elif mod is not None:
            self._call = _element_function(mod, mask.device)

    def __call__(self, rows: range) -> Tensor:
        batch, heads, _, kv_len = self._shape
        if self._call is None:
            return torch.ones((batch, heads, len(rows), kv_len), dtype=torch.bool, device=self._device)
        b, h, kv = (torch.arange(n, dtype=torch.int32, device=self._device) for n in (batch, heads, kv_len))
        q = torch.arange(rows.start, rows.stop, dtype=torch.int32, device=self._device)
        kept = self._call(b[:, None, None, None], h[:, None, None], q[:, None], kv)
        return kept.expand(batch, heads, len(rows), kv_len)


def _element_function(mod: MaskMod, device: torch.device) -> MaskMod:
    """`mod` over broadcastable coordinates: as its graph, or called eagerly when it has none."""
    try:
        root, captures = traced(mod, device)
    except UNTRACEABLE:
        return _eager_function(mod, device)
    program = TorchProgram([root])

    def evaluate(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        inputs = {"b": b, "h": h, "q_idx": q_idx, "kv_idx": kv_idx}
        return program(inputs, captures, torch.float32)[0]

    return evaluate


def _eager_function(mod: MaskMod, device: torch.device) -> MaskMod:
    def evaluate(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        batches, heads, q, kv = (_flat(x) for x in (b, h, q_idx, kv_idx))
        eager = EagerMask(mod, device)
        eager.total = len(batches) * len(heads) * len(q) * len(kv)
        pairs = (np.repeat(batches, len(heads)), np.tile(heads, len(batches)))
        kept = torch.from_numpy(eager(*pairs, q, kv))
        return kept.reshape(len(batches), len(heads), len(q), len(kv)).to(device)

    return evaluate


def _flat(x: Tensor) -> np.ndarray:
    return x.flatten().cpu().numpy()


def block_classes(mask: BlockMask) -> Tensor:
    """Class of every block according to mask_mod: int32 `[B, H, q blocks, kv blocks]` on the mask's device.

    Lists shared by all batches or heads (size 1) are compared with entry 0.
    """
    assert mask.mask_mod is not None
    arguments = (*mask.shape, mask.block_size, mask.index_base, mask.device)
    try:
        root, captures = traced(mask.mask_mod, mask.device)
    except UNTRACEABLE:
        lists = tabulate_callable(mask.mask_mod, *arguments)
    else:
        lists = build_lists(root, captures, *arguments)
    return class_grid(lists.q_to_kv, mask.kv_blocks)
