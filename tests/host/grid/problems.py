"""A row of the grid as one attention problem: tensors, mods and masks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from flexbwd import BlockMask, create_block_mask
from flexbwd.sparsity import IndexBase
from flexbwd.testing import Case, make_case
from tests.host.grid.axes import Row

Mod = Callable[..., Tensor]


@dataclass
class GridProblem:
    """What a test hands to flex_attention and to the reference."""

    case: Case
    score_mod: Mod | None = None
    mask_mod: Any = None
    block_mask: Any = None
    index_base: IndexBase | None = None
    captures: dict[str, Tensor] = field(default_factory=dict)


def make_problem(row: Row, dtype: torch.dtype = torch.float64) -> GridProblem:
    """The problem of one row; the axes it lacks have their plainest value."""
    row = {"q_len": 100, "kv_len": 129, "head_dim": 16, "heads": (2, 1), "mask": "none", "block_size": 64,
           "strides": "contiguous", "capture": "none", "loss": "out and lse", "base": "local", **row}  # fmt: skip
    lengths = row["q_len"], row["kv_len"]
    batch = 2 if row["strides"] == "stride-0 batch" or row["capture"] == "by b and k" else 1
    case = make_case(lengths, row["heads"], row["head_dim"], dtype, batch)
    case = _with_loss(_with_strides(case, row["strides"]), row["loss"])
    size = row["block_size"]
    size = tuple(-(-n // 16) * 16 for n in lengths) if size == "SxS" else size
    problem = GridProblem(case)
    if row["base"] == "global" and row["mask"] not in ("tensor", "torch's"):
        problem.index_base = _base(lengths, size)
    _add_mask(problem, row["mask"], lengths, size)
    _add_score_mod(problem, row["capture"], dtype)
    return problem


# -- tensors -----------------------------------------------------------------------------------------------------------
def _with_strides(case: Case, kind: str) -> Case:
    def view(t: Tensor) -> Tensor:
        if kind == "stride-0 heads":
            return t[:, :1].expand_as(t)
        if kind == "stride-0 batch":
            return t[:1].expand_as(t)
        if kind == "BSHD":
            return t.transpose(1, 2).contiguous().transpose(1, 2)
        if kind == "transposed":
            return t.mT.contiguous().mT
        if kind == "padded":
            wide = torch.full((*t.shape[:2], t.shape[2] + 1, t.shape[3] + 3), torch.nan, dtype=t.dtype)
            wide[:, :, :-1, :-3] = t
            return wide[:, :, :-1, :-3]
        return t

    grad_out = case.grad_out if kind in ("contiguous", "transposed") else view(case.grad_out)
    return replace(case, query=view(case.query), key=view(case.key), value=view(case.value), grad_out=grad_out)


def _with_loss(case: Case, kind: str) -> Case:
    if kind == "out":
        return replace(case, grad_lse=None)
    return replace(case, grad_out=torch.zeros_like(case.grad_out)) if kind == "lse" else case


def _base(lengths: tuple[int, int], size: Any) -> IndexBase:
    """Blocks of a longer sequence, in another order; the granule of a dense call is 128."""
    sizes = (size, size) if isinstance(size, int) else size
    q_blocks, kv_blocks = (-(-n // s) for n, s in zip(lengths, sizes, strict=True))
    q_base = torch.arange(q_blocks, dtype=torch.int32).flip(0) * 32
    kv_base = torch.arange(kv_blocks, dtype=torch.int32) % 3 * 16
    return IndexBase(b_off=1, h_off=2, q_base=q_base, kv_base=kv_base, block_size=sizes)


# -- masks -------------------------------------------------------------------------------------------------------------
def _band(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return (i - j < 90) & (j - i < 60 + 20 * (h % 2)) | (j < 3)


def _dead_rows(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return (i % 150 >= 20) & (i >= j)


def _empty_columns(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return (j % 300 < 40) | (j % 300 > 200) & (i > 5)


def _nothing(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return i < 0


def _checkered(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    """No block is full."""
    return ((i + j) % 5 != 1) & (j - i < 70)


_MODS = {"mask_mod only": _band, "both": _band, "no full blocks": _checkered, "dead rows": _dead_rows,
         "empty kv columns": _empty_columns, "everything dead": _nothing, "torch's": _band}  # fmt: skip


def _add_mask(p: GridProblem, kind: str, lengths: tuple[int, int], size: Any) -> None:
    if kind == "none":
        return
    if kind == "tensor":
        p.mask_mod = torch.rand(lengths, generator=torch.Generator().manual_seed(5)) < 0.4
    elif kind == "mask_mod only":
        p.mask_mod = _band
    elif kind == "torch's":
        from torch.nn.attention.flex_attention import create_block_mask as torch_block_mask

        p.block_mask = torch_block_mask(_band, None, p.case.shape[1], *lengths, device="cpu", BLOCK_SIZE=size)
    elif kind in ("lists only", "no partial blocks"):
        p.block_mask = _random_lists(lengths, size, full=kind == "no partial blocks")
    else:
        heads = p.case.shape[1] if kind == "both" else None
        args = (_MODS[kind], None, heads, *lengths)
        p.block_mask = create_block_mask(*args, BLOCK_SIZE=size, index_base=p.index_base)


def _random_lists(lengths: tuple[int, int], size: Any, full: bool) -> BlockMask:
    """Lists in no order, with entries past the count that lie outside; the first row may list nothing."""
    sizes = (size, size) if isinstance(size, int) else size
    rows, cols = (-(-n // s) for n, s in zip(lengths, sizes, strict=True))
    g = torch.Generator().manual_seed(rows * 31 + cols)
    count = torch.randint(0, cols + 1, (1, 1, rows), generator=g, dtype=torch.int32)
    index = torch.stack([torch.randperm(cols, generator=g) for _ in range(rows)]).int()
    index[torch.arange(cols) >= count[0, 0, :, None]] = 10**8
    pair = (count, index.view(1, 1, rows, cols))
    none = (torch.zeros_like(count), torch.zeros_like(pair[1]))
    lists = (*none, *pair) if full else pair
    return BlockMask.from_kv_blocks(*lists, BLOCK_SIZE=size, seq_lengths=lengths)


# -- score mods --------------------------------------------------------------------------------------------------------
def _add_score_mod(p: GridProblem, kind: str, dtype: torch.dtype) -> None:
    """Index ranges leave room for the offsets of a global call."""
    wide = 4096
    kept = dtype if dtype in (torch.float64, torch.float32) else torch.float32
    types = {"fp32": torch.float32, "bf16": torch.bfloat16}

    def new(*shape: int) -> Tensor:
        generator = torch.Generator().manual_seed(11 + len(p.captures))
        made = torch.randn(shape, generator=generator, dtype=torch.float64).to(types.get(kind, kept))
        p.captures[f"c{len(p.captures)}"] = made.requires_grad_(True)
        return made

    if kind != "none":
        p.score_mod = _SCORE_MODS[kind](new, wide)


def _two_scalars(new: Callable[..., Tensor], n: int) -> Mod:
    a, b = new(), new()
    return lambda s, _b, h, i, j: s * a + b * torch.tanh(s)


def _zero_dim(new: Callable[..., Tensor], n: int) -> Mod:
    t = new()
    return lambda s, b, h, i, j: s * t + t * j / n


def _one_element(new: Callable[..., Tensor], n: int) -> Mod:
    t = new(1)
    return lambda s, b, h, i, j: s * t[0]


def _by_h(new: Callable[..., Tensor], n: int) -> Mod:
    t = new(16)
    return lambda s, b, h, i, j: s + t[h] * (i - j) / 64


def _by_q(new: Callable[..., Tensor], n: int) -> Mod:
    t = new(n)
    return lambda s, b, h, i, j: s * t[i]


def _by_k(new: Callable[..., Tensor], n: int) -> Mod:
    t = new(n)
    return lambda s, b, h, i, j: s + t[j]


def _by_distance(new: Callable[..., Tensor], n: int) -> Mod:
    t = new(2 * n)
    return lambda s, b, h, i, j: 3 * torch.tanh(s / 3) + t[i - j + n]


def _two_dimensional(new: Callable[..., Tensor], n: int) -> Mod:
    t = new(16, n)
    return lambda s, b, h, i, j: s + t[h, j] * torch.sigmoid(t[h, i])


def _by_batch(new: Callable[..., Tensor], n: int) -> Mod:
    t = new(4, n)
    return lambda s, b, h, i, j: s + t[b, j]


def _expanded(new: Callable[..., Tensor], n: int) -> Mod:
    t = new(1, n)
    view = t.expand(16, n)
    return lambda s, b, h, i, j: s + view[h, j] * view[h, i]


def _used_twice(new: Callable[..., Tensor], n: int) -> Mod:
    t = new(n)
    return lambda s, b, h, i, j: s * torch.cos(t[i]) + t[j] * t[i]


def _int_table(new: Callable[..., Tensor], n: int) -> Mod:
    t, bucket, shift = new(5), torch.arange(2 * n) // 7 % 5, torch.arange(16, dtype=torch.int32)
    return lambda s, b, h, i, j: s + t[bucket[i - j + n]] * shift[h]


_SCORE_MODS: dict[str, Callable[[Callable[..., Tensor], int], Mod]] = {
    "0-d": _zero_dim, "[1]": _one_element, "by h": _by_h, "by q": _by_q, "by k": _by_k, "by q-k": _by_distance,
    "2-D": _two_dimensional, "by b and k": _by_batch, "expanded": _expanded, "used twice": _used_twice,
    "two scalars": _two_scalars, "fp32": _by_h, "bf16": _by_distance, "int": _int_table,
}  # fmt: skip
