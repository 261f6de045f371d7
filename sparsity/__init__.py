"""Block-sparse masks: which blocks of the score matrix are computed, and which elements inside them."""

from .block_mask import BlockMask, from_torch_cached
from .check import validate_for
from .combine import and_masks, noop_mask, not_mask, or_masks
from .create import create_block_mask
from .tensors import BlockBits, BlockLists, BlockSparseTensors, IndexBase

__all__ = [
    "BlockBits",
    "BlockLists",
    "BlockMask",
    "BlockSparseTensors",
    "IndexBase",
    "and_masks",
    "create_block_mask",
    "from_torch_cached",
    "noop_mask",
    "not_mask",
    "or_masks",
    "validate_for",
]
