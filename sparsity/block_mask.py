"""BlockMask: which blocks of the score matrix are computed, in both directions, and the mask inside partial ones."""

from __future__ import annotations

import math
import threading
import weakref
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask as TorchBlockMask

from . import check, convert, evaluate, moving, render, slicing
from .combine import MaskMod
from .lists import ceil_div, class_grid
from .outside_graphs import outside_graphs
from .tabulate import tabulate_tensor
from .tensors import BlockBits, BlockLists, BlockSparseTensors, IndexBase


class BlockMask:
    """A block-sparse attention mask. Element (i, j) of batch b and head h is kept when

        its block is listed  ∧  (the block is full  ∨  mask_mod(b, h, i, j))

    Attributes:
        q_to_kv: by q block, the kv blocks it needs (forward, dQ).  kv_to_q: the transpose (dK, dV). int32.
        mask_mod: evaluated in partial blocks; None keeps every listed element.
        bits: element bits of the partial blocks, in place of mask_mod, for masks that cannot be traced.
        block_size: (q, kv) granule.  seq_lengths: (Sq, Skv).
        index_base: where the mask's coordinates lie in a larger problem, or None.
        built: the lists were made from mask_mod or bits, so that they list exactly what these keep.
        bound: "b" / "h" where the lists have size 1 but were made for that one entry, because mask_mod reads it.

    Made by `create_block_mask`, `from_kv_blocks` or `from_torch`. Leading dimensions of size 1 serve any batch or head
    count. Picklable when its mask_mod is. Compared by identity. A pytree node whose leaves are all its tensors.
    """

    def __init__(
        self,
        lists: BlockLists,
        block_size: tuple[int, int],
        seq_lengths: tuple[int, int],
        mask_mod: MaskMod | None = None,
        *,
        index_base: IndexBase | None = None,
        built: bool = False,
        bound: frozenset[str] = frozenset(),
    ) -> None:
        self.q_to_kv: BlockSparseTensors = lists.q_to_kv
        self.kv_to_q: BlockSparseTensors = lists.kv_to_q
        self.bits: BlockBits | None = lists.bits
        self.block_size = block_size
        self.seq_lengths = seq_lengths
        self.mask_mod = mask_mod
        self.index_base = index_base
        self.built = built
        self.bound = bound

    # -- other ways to make one ---------------------------------------------------------------------------------------
    @classmethod
    def of(cls, parts: convert.Parts) -> BlockMask:
        """A mask of checked parts."""
        return cls(parts.lists, parts.block_size, parts.seq_lengths, parts.mask_mod, bound=parts.bound)

    @classmethod
    @outside_graphs
    def from_kv_blocks(
        cls,
        kv_num_blocks: Tensor,
        kv_indices: Tensor,
        full_kv_num_blocks: Tensor | None = None,
        full_kv_indices: Tensor | None = None,
        BLOCK_SIZE: int | tuple[int, int] = 128,
        mask_mod: MaskMod | None = None,
        seq_lengths: tuple[int, int] | None = None,
        *,
        check: bool = False,
    ) -> BlockMask:
        """A mask from lists of kv blocks, one list for every q block, in any order.

        Args:
            kv_num_blocks: `[B|1, H|1, q blocks]` int32 or int64, entries used of each list; leading dims may be absent.
            kv_indices: `[B|1, H|1, q blocks, width]` partial blocks; entries past the count mean nothing.
            full_kv_num_blocks, full_kv_indices: the same for full blocks, where mask_mod is not asked.
            BLOCK_SIZE: multiple of 16, or a pair (q, kv).
            mask_mod: None keeps every listed element. One that cannot be traced is replaced by the bits it keeps.
            seq_lengths: (Sq, Skv); None means whole blocks, as many kv blocks as `kv_indices` is wide.
            check: also verify that the lists fit mask_mod, as `check()` does.
        Raises:
            MaskError: shapes, dtypes or devices disagree; an index or a count is out of range; a block is listed twice,
                or as both partial and full.
        """
        partial, full = (kv_num_blocks, kv_indices), (full_kv_num_blocks, full_kv_indices)
        made = cls.of(convert.parts_from_kv_blocks(partial, full, BLOCK_SIZE, seq_lengths, mask_mod))._settled()
        if check:
            made.check()
        return made

    @classmethod
    def from_torch(cls, mask: TorchBlockMask) -> BlockMask:
        """The same mask as torch's BlockMask; its noop mask_mod becomes None.

        Raises:
            MaskError: block sizes are no multiples of 16; the mask was sliced (torch then drops its mask_mod, and does
                not record which rows are left) or its lists break a rule of `from_kv_blocks`.
        """
        made = cls.of(convert.parts_from_torch(mask))
        if torch.compiler.is_compiling() or made.mask_mod is None:
            return made
        single = {letter for letter, n in zip("bh", made.shape, strict=False) if n == 1}
        made.bound = evaluate.lead_reads(made.mask_mod, made.device) & single if single else made.bound
        return made._settled()

    def _settled(self) -> BlockMask:
        """This mask or, when its mask_mod has no graph, one with bits."""
        if self.mask_mod is None or evaluate.is_traceable(self.mask_mod, self.device):
            return self
        batch, heads, q_len, kv_len = self.shape
        lists = tabulate_tensor(self.element_mask(), batch, heads, q_len, kv_len, self.block_size, self.device)
        return BlockMask(lists, self.block_size, self.seq_lengths, built=True, bound=self.bound)

    @outside_graphs
    def to_torch(self) -> TorchBlockMask:
        """The same lists, in the same order, as torch's BlockMask.

        The mask_mod stays the same object; that of a tabulated mask reads the bits. Mind that torch's eager path asks
        the mask_mod only and never looks at the lists: where these keep less than the mask_mod, compile torch's call.
        """
        return convert.to_torch(self)

    # -- torch's names ------------------------------------------------------------------------------------------------
    kv_num_blocks = property(lambda self: self.q_to_kv.mask_block_cnt)
    kv_indices = property(lambda self: self.q_to_kv.mask_block_idx)
    full_kv_num_blocks = property(lambda self: self.q_to_kv.full_block_cnt)
    full_kv_indices = property(lambda self: self.q_to_kv.full_block_idx)
    q_num_blocks = property(lambda self: self.kv_to_q.mask_block_cnt)
    q_indices = property(lambda self: self.kv_to_q.mask_block_idx)
    full_q_num_blocks = property(lambda self: self.kv_to_q.full_block_cnt)
    full_q_indices = property(lambda self: self.kv_to_q.full_block_idx)
    BLOCK_SIZE = property(lambda self: self.block_size)

    # -- sizes --------------------------------------------------------------------------------------------------------
    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(B or 1, H or 1, Sq, Skv)."""
        batch, heads = self.q_to_kv.mask_block_cnt.shape[:2]
        return (batch, heads, *self.seq_lengths)

    @property
    def device(self) -> torch.device:
        return self.q_to_kv.mask_block_cnt.device

    @property
    def lists(self) -> BlockLists:
        """All tensors of the mask."""
        return BlockLists(self.q_to_kv, self.kv_to_q, self.bits)

    @property
    def q_blocks(self) -> int:
        """Number of q blocks, the last may be ragged."""
        return ceil_div(self.seq_lengths[0], self.block_size[0])

    @property
    def kv_blocks(self) -> int:
        """Number of kv blocks, the last may be ragged."""
        return ceil_div(self.seq_lengths[1], self.block_size[1])

    def numel(self) -> int:
        """Elements of the dense mask."""
        return math.prod(self.shape)

    @outside_graphs
    def sparsity(self) -> float:
        """Percentage of blocks that are skipped."""
        cnt, _, full_cnt, _ = self.q_to_kv
        blocks = cnt.numel() * self.kv_blocks
        computed = int(cnt.sum()) + (0 if full_cnt is None else int(full_cnt.sum()))
        return 100.0 * (1 - computed / blocks) if blocks else 0.0

    # -- pictures -----------------------------------------------------------------------------------------------------
    def to_dense(self) -> Tensor:
        """Which blocks are computed: int32 0 / 1 `[B, H, q blocks, kv blocks]`."""
        return class_grid(self.q_to_kv, self.kv_blocks).clamp(max=1)

    @outside_graphs
    def element_mask(self) -> Tensor:
        """Which elements are kept: bool `[B, H, Sq, Skv]`. For looking and testing: it is dense."""
        return check.element_mask(self)

    @outside_graphs
    def to_string(self, grid_size: int | tuple[int, int] = (20, 20), limit: int = 4) -> str:
        """A picture in text: `█` full, `░` partly computed, blank skipped.

        Args:
            grid_size: (rows, columns) at most; larger masks are summarised. -1 shows every block.
            limit: batch and head pairs shown.
        """
        return render.render(self, grid_size, limit)

    def __str__(self) -> str:
        return f"BlockMask(shape={self.shape}, sparsity={self.sparsity():.2f}%,\n{self.to_string().rstrip()}\n)"

    def __repr__(self) -> str:
        return render.summary(self)

    # -- other masks from this one ------------------------------------------------------------------------------------
    @outside_graphs
    def to(self, device: torch.device | str) -> BlockMask:
        """The mask on another device, captured tensors of its mask_mod included; itself when all is there already.

        Raises:
            MaskError: mask_mod reads a tensor from a global variable, which cannot be moved for it.
        """
        return moving.moved(self, device)

    @outside_graphs
    def __getitem__(self, index: Any) -> BlockMask:
        """The mask of chosen batches, heads and q blocks: `mask[batch, head, q_block]`.

        Each index is an integer, a slice, or a vector of integers (bools); all four dimensions stay. Unlike torch's,
        the slice keeps its mask_mod, asked at the coordinates of this mask, and its length is that of the chosen q
        blocks. A single batch or head chosen from several is pinned and serves any batch or head count.

        Raises:
            MaskError: an index is out of range; a ragged last q block is put before others; the mask has an index_base.
        """
        return BlockMask.of(slicing.sliced_parts(self, index))

    __iter__ = None  # a mask is not a sequence of masks

    @outside_graphs
    def adjust(self, q_len: int, kv_len: int) -> BlockMask:
        """The mask of the first `q_len` queries and `kv_len` keys.

        Shorter lengths crop the lists; coordinates stay, so a mask_mod aligned to the lower right corner keeps looking
        from the old one. Longer ones evaluate the mask_mod anew.

        Raises:
            MaskError: a longer length is asked of a mask whose lists did not come from a mask_mod.
        """
        return slicing.adjusted(self, q_len, kv_len)

    def global_mask_mod(self) -> MaskMod | None:
        """mask_mod as a function of this mask's own coordinates, `index_base` applied."""
        if self.mask_mod is None or self.index_base is None:
            return self.mask_mod
        return slicing.BasedMask(self.mask_mod, self.index_base, self.block_size)

    @outside_graphs
    def check(self) -> None:
        """Verify the lists: both directions agree, nothing that mask_mod keeps is left out, full blocks are full.

        Raises:
            MaskError: naming the first block (batch, head, q block, kv block) at fault.
        """
        check.check_lists(self)


moving.register(BlockMask)


# -- torch masks met again ---------------------------------------------------------------------------------------------
_from_torch: weakref.WeakKeyDictionary[TorchBlockMask, tuple[tuple, tuple, BlockMask]] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def from_torch_cached(mask: TorchBlockMask) -> BlockMask:
    """`BlockMask.from_torch`, found again while the torch mask and everything it holds are unchanged."""
    if torch.compiler.is_compiling():
        return BlockMask.from_torch(mask)
    held = (mask.kv_num_blocks, mask.kv_indices, mask.full_kv_num_blocks, mask.full_kv_indices, mask.mask_mod)
    state = (*map(_version, held[:4]), mask.BLOCK_SIZE, mask.seq_lengths)
    with _lock:
        hit = _from_torch.get(mask)
    if hit is not None and hit[1] == state and all(x is y for x, y in zip(hit[0], held, strict=True)):
        return hit[2]
    made = BlockMask.from_torch(mask)
    with _lock:
        _from_torch[mask] = (held, state, made)
    return made


def _version(t: Tensor | None) -> int:
    return 0 if t is None or t.is_inference() else t._version
