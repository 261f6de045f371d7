"""The definition of correct: dense attention with the user's own callables, differentiated by autograd.

    s = scale · q kᵀ;  s' = score_mod(s, b, h, i, j) on kept elements;  p = softmax(s');  out = p v;  lse = ln Σ exp(s')

Nothing here knows the mod compiler. The callables run under `torch.vmap` on flat lists of the kept elements, so what a
mod would yield where the mask is false is never computed and can reach nothing. fp64 operands give the oracle. fp16 and
bf16 operands give what eager code in that dtype gives (every matmul result is rounded to it, element-wise maths is
fp32), which is the error budget of a fused kernel. O(B·H·Sq·Skv) memory: for tests, not for use.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from flexbwd.errors import MaskError, ShapeError

if TYPE_CHECKING:
    from flexbwd.sparsity.tensors import IndexBase
    from flexbwd.testing import Case

Mod = Callable[..., Any]
Coordinates = tuple[Tensor, Tensor, Tensor, Tensor]  # b, h, q_idx, kv_idx: int64 [kept elements], local


def attention_reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Mod | None = None,
    mask_mod: Mod | Tensor | None = None,
    scale: float | None = None,
    *,
    block_mask: Any = None,
    keep: Tensor | None = None,
    index_base: IndexBase | None = None,
) -> tuple[Tensor, Tensor]:
    """Dense attention of design.md §1; differentiable in q, k, v and in every tensor `score_mod` captures.

    Args:
        query: `[B, Hq, Sq, D]`.  key: `[B, Hkv, Skv, D]`.  value: `[B, Hkv, Skv, Dv]`; Hq a multiple of Hkv.
        mask_mod: True keeps an element; or a bool tensor, broadcastable to `[B, Hq, Sq, Skv]`.
        block_mask: a flexbwd or torch BlockMask. Unlisted blocks are dropped whatever `mask_mod` says; full blocks are
            kept whole; partial ones ask `mask_mod`, or the block mask's own bits or mod when `mask_mod` is None.
        keep: bool, broadcastable to `[B, Hq, Sq, Skv]`; False drops an element whatever the masks say.
        index_base: offsets that make the coordinates seen by the mods global.
    Returns:
        out `[B, Hq, Sq, Dv]` in query's dtype; natural-log lse `[B, Hq, Sq]` in fp32 (fp64 for fp64 operands). A row
        that keeps nothing has out 0 and lse −inf, and all its gradients are 0.
    Raises:
        ShapeError: head counts that do not divide.  MaskError: block lists that name a block outside the lengths.
    """
    q, k, v = _align_heads(query, key, value)
    kept = kept_elements((*q.shape[:3], k.shape[2]), mask_mod, block_mask, keep, index_base, q.device)
    scores = _modified_scores(q, k, score_mod, scale, kept, _Base(index_base, block_mask))
    if query.dtype in (torch.float16, torch.bfloat16):
        out, lse = _RoundedAttention.apply(scores, v)
        return out, lse
    return _attend(scores, v)


def kept_elements(
    shape: tuple[int, ...],
    mask_mod: Mod | Tensor | None = None,
    block_mask: Any = None,
    keep: Tensor | None = None,
    index_base: IndexBase | None = None,
    device: torch.device | str = "cpu",
) -> Tensor:
    """keep(i, j) as a bool tensor of `shape` = [B, H, Sq, Skv]; arguments as in `attention_reference`."""
    undecided = torch.ones(shape, dtype=torch.bool, device=device)
    if keep is not None:
        undecided &= keep.expand(shape)
    kept = torch.zeros_like(undecided)
    if block_mask is not None:
        partial, full = _listed(block_mask, shape)
        kept = undecided & full
        undecided = undecided & partial
        bits = getattr(block_mask, "bits", None)
        if mask_mod is None and bits is not None:
            return kept | (undecided & _bits_to_dense(block_mask, shape))
        mask_mod = mask_mod if mask_mod is not None else block_mask.mask_mod
    if mask_mod is None:
        return kept | undecided
    if isinstance(mask_mod, Tensor):
        return kept | (undecided & mask_mod.expand(shape))
    where = _coordinates(undecided)
    inside = evaluate_mod(mask_mod, (), _Base(index_base, block_mask).global_of(where), torch.float32, torch.bool)
    return kept.index_put(where, inside.detach())


def reference_grads(
    case: Case,
    score_mod: Mod | None = None,
    mask_mod: Mod | Tensor | None = None,
    *,
    captures: Mapping[str, Tensor] | None = None,
    block_mask: Any = None,
    keep: Tensor | None = None,
    index_base: IndexBase | None = None,
) -> dict[str, Tensor]:
    """out, lse, dq, dk, dv and the gradient of each captured tensor, by name, for `case`'s upstream gradients.

    `captures` defaults to the tensors requiring grad that `score_mod`'s closure reaches, named as its variables.
    Gradients nobody can have (a capture that no kept element reads) are zeros, as are those of an empty problem.
    """
    from flexbwd.testing import captured_parameters, collect_grads

    captures = captured_parameters(score_mod) if captures is None else captures
    q, k, v = case.leaves()
    out, lse = attention_reference(
        q, k, v, score_mod, mask_mod, case.scale, block_mask=block_mask, keep=keep, index_base=index_base
    )
    return collect_grads(case, out, lse, (q, k, v), captures)


def sum_noise(
    case: Case,
    score_mod: Mod,
    mask_mod: Mod | Tensor | None = None,
    *,
    captures: Mapping[str, Tensor],
    block_mask: Any = None,
    keep: Tensor | None = None,
    index_base: IndexBase | None = None,
) -> dict[str, float]:
    """Root-sum-square of the terms Σ ds'·∂s'/∂c that make each captured tensor's gradient, largest entry, by name.

    Times the working precision it is the size of the error that rounding every term leaves. The gradient itself may be
    far smaller: a bias that softmax ignores sums to 0. Estimated from a few sums with random signs.
    """
    q, k, v = _align_heads(case.query, case.key, case.value)
    kept = kept_elements((*q.shape[:3], k.shape[2]), mask_mod, block_mask, keep, index_base, q.device)
    scores = _modified_scores(q, k, score_mod, case.scale, kept, _Base(index_base, block_mask))
    if not scores.requires_grad:
        return dict.fromkeys(captures, 0.0)
    leaf = scores.detach().requires_grad_(True)
    out, lse = _attend(leaf, v)
    upstream = (case.grad_out, torch.zeros_like(lse) if case.grad_lse is None else case.grad_lse)
    (terms,) = torch.autograd.grad((out, lse), leaf, upstream)
    generator = torch.Generator().manual_seed(0)
    tensors, squares = tuple(captures.values()), dict.fromkeys(captures, torch.zeros(()))
    for _ in range(8):
        signs = torch.randint(0, 2, terms.shape, generator=generator).to(terms) * 2 - 1
        sums = torch.autograd.grad(scores, tensors, terms * signs, retain_graph=True, allow_unused=True)
        for name, total in zip(captures, sums, strict=True):
            squares[name] = squares[name] + (0.0 if total is None else total.double().square())
    return {name: math.sqrt(float(total.max()) / 8) for name, total in squares.items() if total.numel()}


# -- attention over modified scores ---------------------------------------------------------------------------------
def _attend(scores: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """softmax(scores) @ value and the LSE; −inf means dropped, and a row of nothing else is zeros."""
    probabilities, lse = _softmax(scores)
    return probabilities.to(value.dtype) @ value, lse


def _softmax(scores: Tensor) -> tuple[Tensor, Tensor]:
    dead = (scores == -math.inf).all(-1, keepdim=True)
    top = scores.detach().amax(-1, keepdim=True) if scores.shape[-1] else scores.new_full(dead.shape, 0.0)
    top = top.masked_fill(dead, 0.0)
    weights = torch.exp(scores - top)
    total = weights.sum(-1, keepdim=True).masked_fill(dead, 1.0)
    lse = (torch.log(total) + top).masked_fill(dead, -math.inf)
    return weights / total, lse.squeeze(-1)


class _RoundedAttention(torch.autograd.Function):
    """`_attend` with the backward of design.md §1 spelt out: what a kernel computes, rounded as eager code rounds.

    delta comes from the rounded output, dP from a matmul in the low dtype; autograd's softmax backward would hide the
    first error and so promise more than any kernel of this maths can keep.
    """

    @staticmethod
    def forward(ctx: Any, scores: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        p, lse = _softmax(scores)
        out = p.to(value.dtype) @ value
        ctx.save_for_backward(p, value, out)
        return out, lse

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor, grad_lse: Tensor) -> tuple[Tensor, Tensor]:
        p, value, out = ctx.saved_tensors
        delta = (grad_out.float() * out.float()).sum(-1) - grad_lse
        grad_p = (grad_out @ value.transpose(-1, -2)).float()
        return p * (grad_p - delta.unsqueeze(-1)), p.to(value.dtype).transpose(-1, -2) @ grad_out


# -- evaluating the user's callables --------------------------------------------------------------------------------
def _align_heads(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Key and value repeated to query's heads and batch."""
    heads, kv_heads = query.shape[1], key.shape[1]
    if kv_heads == 0 or heads % kv_heads:
        raise ShapeError(f"query has {heads} heads and key {kv_heads}: query heads must be a multiple of key heads")
    k, v = (t.expand(query.shape[0], -1, -1, -1).repeat_interleave(heads // kv_heads, dim=1) for t in (key, value))
    return query, k, v


def _modified_scores(
    query: Tensor, key: Tensor, score_mod: Mod | None, scale: float | None, kept: Tensor, base: _Base
) -> Tensor:
    wide = torch.float64 if query.dtype == torch.float64 else torch.float32
    scale = 1.0 / math.sqrt(query.shape[-1]) if scale is None else scale
    scores = (query @ key.transpose(-1, -2)).to(wide) * scale
    return _apply_score_mod(scores, score_mod, kept, base, wide)


def _apply_score_mod(scores: Tensor, score_mod: Mod | None, kept: Tensor, base: _Base, wide: torch.dtype) -> Tensor:
    """Modified scores, −inf where not kept. Elements that the mod itself sends to −inf count as not kept."""
    if score_mod is None:
        return scores.masked_fill(~kept, -math.inf)
    where = _coordinates(kept)
    with torch.no_grad():
        finite = evaluate_mod(score_mod, (scores[where],), base.global_of(where), wide, wide) != -math.inf
    if not bool(finite.all()):
        b, h, i, j = (c[finite] for c in where)
        where = (b, h, i, j)
    values = evaluate_mod(score_mod, (scores[where],), base.global_of(where), wide, wide)
    return torch.full_like(scores, -math.inf).index_put(where, values)


def _coordinates(kept: Tensor) -> Coordinates:
    b, h, i, j = kept.nonzero(as_tuple=True)
    return b, h, i, j


def evaluate_mod(
    mod: Mod, leading: tuple[Tensor, ...], where: Coordinates, wide: torch.dtype, want: torch.dtype
) -> Tensor:
    """`mod` for every element of the flat lists, as `want`: what a compiled mod of working dtype `wide` means."""
    arguments = (*leading, *(c.to(torch.int32) for c in where))
    if where[0].numel() == 0:
        return arguments[0].to(want) if leading else where[0].to(want)
    with working_dtype(wide), _ScalarIndexing(wide):
        return torch.vmap(mod)(*arguments).to(want)


class _ScalarIndexing(TorchFunctionMode):
    """Lets `table[b, h, :, 0]` take vmapped 0-dim indices, and keeps float values in the working dtype.

    Captured floats are widened, once, so that the gradients of several reads are summed wide. `.float()` and
    `.to(torch.float32)` mean the working dtype: one meaning at every precision.
    """

    def __init__(self, wide: torch.dtype):
        super().__init__()
        self.wide = wide
        self.widened: dict[int, tuple[Tensor, Tensor]] = {}  # id -> (the captured tensor, kept alive; its wide copy)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.__getitem__:
            return self._getitem(*args)
        if func in (torch.Tensor.float, torch.Tensor.double):
            return args[0].to(self.wide)
        if func is torch.Tensor.to:
            real = (torch.float32, torch.float64)
            args = tuple(self.wide if a in real else a for a in args) if not _is_tensor(args[1:]) else args
            kwargs = {name: self.wide if name == "dtype" and a in real else a for name, a in kwargs.items()}
        return func(*args, **kwargs)

    def _getitem(self, table: Tensor, index: Any) -> Any:
        index = index if isinstance(index, tuple) else (index,)
        if table.dtype.is_floating_point and table.dtype != self.wide:
            table = self.widened.setdefault(id(table), (table, table.to(self.wide)))[1]
        scalar = [isinstance(i, Tensor) and i.ndim == 0 and i.dtype != torch.bool for i in index]
        if not any(scalar):
            return table[index]
        rest = tuple(slice(None) if s else i for s, i in zip(scalar, index, strict=True))
        table = table[rest]
        dims = _result_dims(rest, [n for n, s in enumerate(scalar) if s], table.ndim)
        table = table.movedim(dims, tuple(range(len(dims))))
        return torch.ops.aten.index.Tensor(table, [i for s, i in zip(scalar, index, strict=True) if s])


def _is_tensor(args: tuple[Any, ...]) -> bool:
    return bool(args) and isinstance(args[0], Tensor)


def _result_dims(index: tuple[Any, ...], positions: list[int], result_ndim: int) -> tuple[int, ...]:
    """Where the slices at `positions` of `index` end up in the indexed result."""
    dims = []
    for position in positions:
        before, after = index[:position], index[position + 1 :]
        if any(i is Ellipsis for i in before):
            dims.append(result_ndim - 1 - sum(not isinstance(i, int) for i in after))
        else:
            dims.append(sum(not isinstance(i, int) for i in before))
    return tuple(dims)


@contextlib.contextmanager
def working_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Inside, what torch makes of an int tensor and a Python float has `dtype`, as in a compiled mod."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


# -- coordinates and block lists -------------------------------------------------------------------------------------
class _Base:
    """Local coordinates to the global ones that mods see."""

    def __init__(self, base: IndexBase | None, block_mask: Any):
        self.base = base
        self.block = _block_size(block_mask) if block_mask is not None else base.block_size if base else (0, 0)

    def global_of(self, where: Coordinates) -> Coordinates:
        if self.base is None:
            return where
        b, h, i, j = where
        if self.base.q_base is not None:
            i = i + self.base.q_base.long()[i // self.block[0]]
        if self.base.kv_base is not None:
            j = j + self.base.kv_base.long()[j // self.block[1]]
        return b + self.base.b_off, h + self.base.h_off, i, j


def _block_size(block_mask: Any) -> tuple[int, int]:
    size = block_mask.block_size if hasattr(block_mask, "block_size") else block_mask.BLOCK_SIZE
    return (size, size) if isinstance(size, int) else (int(size[0]), int(size[1]))


def _lists(block_mask: Any) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Counts and indices of the partial, then of the full kv blocks of each q block; a flexbwd or torch BlockMask."""
    if hasattr(block_mask, "q_to_kv"):
        return tuple(block_mask.q_to_kv)
    return block_mask.kv_num_blocks, block_mask.kv_indices, block_mask.full_kv_num_blocks, block_mask.full_kv_indices


def _listed(block_mask: Any, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Which elements lie in partial blocks, and which in full ones: two bool tensors of `shape`."""
    (count, index, full_count, full_index), size = _lists(block_mask), _block_size(block_mask)
    partial = _spread(_list_to_blocks(count, index, shape, size), shape, size)
    if full_count is None or full_index is None:
        return partial, torch.zeros_like(partial)
    return partial, _spread(_list_to_blocks(full_count, full_index, shape, size), shape, size)


def _list_to_blocks(count: Tensor, index: Tensor, shape: tuple[int, ...], size: tuple[int, int]) -> Tensor:
    """One list as bool `[B|1, H|1, q blocks, kv blocks]`; entries past the count are never read."""
    cols = -(-shape[3] // size[1])
    valid = torch.arange(index.shape[-1], device=index.device) < count.unsqueeze(-1)
    b, h, row, slot = valid.nonzero(as_tuple=True)
    named = index[b, h, row, slot].long()
    if named.numel() and not (int(named.min()) >= 0 and int(named.max()) < cols):
        raise MaskError(f"block_mask lists kv block {int(named.max())}, but kv length {shape[3]} has {cols} blocks")
    blocks = torch.zeros((*count.shape, cols), dtype=torch.bool, device=index.device)
    return blocks.index_put((b, h, row, named), torch.ones_like(named, dtype=torch.bool))


def _spread(blocks: Tensor, shape: tuple[int, ...], size: tuple[int, int]) -> Tensor:
    dense = blocks.repeat_interleave(size[0], dim=2).repeat_interleave(size[1], dim=3)
    return dense[:, :, : shape[2], : shape[3]].expand(shape)


def _bits_to_dense(block_mask: Any, shape: tuple[int, ...]) -> Tensor:
    """The element bits of partial blocks as a bool tensor of `shape`."""
    (count, index, _, _), (q_block, kv_block) = _lists(block_mask), _block_size(block_mask)
    words, slots = block_mask.bits.words, block_mask.bits.q_to_kv_slot
    rows, cols = count.shape[2], -(-shape[3] // kv_block)
    dense = torch.zeros((*count.shape[:2], rows * q_block, cols * kv_block), dtype=torch.bool, device=words.device)
    lane = torch.arange(kv_block, device=words.device)
    for b, h, row in torch.cartesian_prod(*(torch.arange(n) for n in count.shape)).tolist():
        for n in range(int(count[b, h, row])):
            col = int(index[b, h, row, n])
            block = words[int(slots[b, h, row, n])]
            bits = (block[:, lane // 32] >> (lane % 32)) & 1
            dense[b, h, row * q_block : (row + 1) * q_block, col * kv_block : (col + 1) * kv_block] = bits.bool()
    return dense[:, :, : shape[2], : shape[3]].expand(shape)
