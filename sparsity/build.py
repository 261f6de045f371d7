"""Block lists from a mask's graph, in time and memory of the order of the blocks. The result equals brute force."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flexbwd.errors import MaskError
from flexbwd.modgraph.ir import BOOL, Node, topological

from .assemble import hand_out, lists_from_classes
from .classify import Classifier
from .grid import BlockGrid, check_block_size, check_sizes
from .tensors import BlockLists, IndexBase


def build_lists(
    mask_root: Node,
    captures: Sequence[Tensor],
    B: int | None,
    H: int | None,
    Q_LEN: int,
    KV_LEN: int,
    block_size: int | tuple[int, int] = 128,
    index_base: IndexBase | None = None,
    device: torch.device | str | None = None,
) -> BlockLists:
    """Lists of the blocks a mask keeps: full where it keeps every real element, partial where it keeps some.

    Args:
        mask_root: BOOL graph over `b, h, q_idx, kv_idx`.  captures: its captured tensors, by load slot, any device.
        B, H: number of batch entries and query heads; None broadcasts (leading dim 1).
        block_size: (q, kv) granule, multiples of 16; the last block of a length may be ragged.
        index_base: where the local problem lies in a global one.
        device: of the lists; None is the CPU.
    Returns:
        Ascending lists in both directions. Where B or H is given but the mask does not read it, that dimension is
        expanded (stride 0).
    Raises:
        MaskError: the mask reads `b` or `h` while B or H is None; sizes or index_base break a rule.
    """
    check_sizes(B, H, Q_LEN, KV_LEN)
    reads = _inputs(mask_root)
    _check_reads(reads, B, H)
    grid = BlockGrid.make(
        (B, "b" in reads), (H, "h" in reads), (Q_LEN, KV_LEN), check_block_size(block_size), index_base
    )
    classifier = Classifier(mask_root, captures, grid)
    strips = list(grid.strips())
    q_to_kv = lists_from_classes(grid, strips, (classifier.classify(*strip) for strip in strips))
    return hand_out(grid, q_to_kv, None, device)


def _inputs(root: Node) -> set[str]:
    if root.dtype is not BOOL:
        raise MaskError(f"mask_mod yields {root.dtype.value}: it must yield a bool; compare, or test != 0")
    names = {str(n.attr) for n in topological([root]) if n.op == "in"}
    if names & {"score", "grad"}:
        raise MaskError("mask_mod reads the score: a mask may read b, h, q_idx, kv_idx and captured tensors only")
    return names


def _check_reads(reads: set[str], B: int | None, H: int | None) -> None:
    for name, argument, value in (("b", "B", B), ("h", "H", H)):
        if value is None and name in reads:
            what = "batch entries" if name == "b" else "query heads"
            raise MaskError(
                f"{argument}=None broadcasts one mask over all {what}, but mask_mod reads `{name}`: "
                f"pass {argument}=the number of {what}"
            )
