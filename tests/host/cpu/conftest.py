"""A CPU attention problem whose mods are written once and run twice: as a graph, and as dense fp64 torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from flexbwd import cpu
from flexbwd.modgraph.ir import BOOL, I32, Builder, F, Node
from flexbwd.modgraph.modplan import CaptureSpec, ModPlan
from flexbwd.modgraph.plan_mods import build_mod_plan
from flexbwd.plan import BlockLists, Needs, Operands, Plan
from flexbwd.sparsity.tensors import BlockSparseTensors, IndexBase


class Sym:
    """A graph node with Python operators."""

    def __init__(self, builder: Builder, node: Node) -> None:
        self.builder, self.node = builder, node

    def _lift(self, other: Any) -> Node:
        return other.node if isinstance(other, Sym) else self.builder.const(other)

    def __getattr__(self, name: str) -> Callable[..., Sym]:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda: Sym(self.builder, self.builder.unary(name, self.node))

    def double(self) -> Sym:
        return Sym(self.builder, self.builder.cast(self.node, F))


def _operator(op: str, swap: bool = False, compare: bool = False) -> Callable[[Sym, Any], Sym]:
    def method(self: Sym, other: Any) -> Sym:
        x, y = self.node, self._lift(other)
        x, y = (y, x) if swap else (x, y)
        return Sym(self.builder, (self.builder.compare if compare else self.builder.arith)(op, x, y))

    return method


for _name, _op in {
    "add": "add",
    "sub": "sub",
    "mul": "mul",
    "truediv": "div",
    "floordiv": "fdiv",
    "mod": "mod",
}.items():
    setattr(Sym, f"__{_name}__", _operator(_op))
    setattr(Sym, f"__r{_name}__", _operator(_op, swap=True))
for _name, _op in {"and": "and", "or": "or"}.items():
    setattr(Sym, f"__{_name}__", _operator(_op))
for _name in ("lt", "le", "gt", "ge", "eq", "ne"):
    setattr(Sym, f"__{_name}__", _operator(_name, compare=True))


class SymCapture:
    def __init__(self, builder: Builder, slot: int, tensor: Tensor) -> None:
        self.builder, self.slot = builder, slot
        self.dtype = F if tensor.dtype.is_floating_point else BOOL if tensor.dtype is torch.bool else I32

    def __getitem__(self, index: Any) -> Sym:
        index = index if isinstance(index, tuple) else (index,)
        nodes = [i.node if isinstance(i, Sym) else self.builder.const(i) for i in index]
        return Sym(self.builder, self.builder.load(self.slot, self.dtype, nodes))


def where(c: Any, x: Any, y: Any) -> Any:
    if isinstance(c, Sym):
        return Sym(c.builder, c.builder.where(c.node, c._lift(x), c._lift(y)))
    return torch.where(c, x, y)


Mod = Callable[..., Any]  # score mods: (score, b, h, q, kv, *captures); mask mods: (b, h, q, kv, *captures)


def make_plan(
    score: Mod | None, mask: Mod | None, captures: Sequence[Tensor], mask_captures: Sequence[Tensor]
) -> ModPlan:
    return build_mod_plan(
        _traced(score, captures, ["score", "b", "h", "q_idx", "kv_idx"]),  # type: ignore[arg-type]
        None,
        _traced(mask, mask_captures, ["b", "h", "q_idx", "kv_idx"]),  # type: ignore[arg-type]
    )


def _traced(mod: Mod | None, captures: Sequence[Tensor], names: Sequence[str]) -> SimpleNamespace | None:
    if mod is None:
        return None
    builder = Builder()
    inputs = [Sym(builder, builder.input(n)) for n in names]
    result = mod(*inputs, *(SymCapture(builder, i, c) for i, c in enumerate(captures)))
    specs = tuple(CaptureSpec(f"c{i}", c.dtype, tuple(c.shape), c.requires_grad) for i, c in enumerate(captures))
    return SimpleNamespace(name="mod", where="", builder=builder, output=result.node, captures=specs, source_lines={})


@dataclass
class Attention:
    """One problem; fields not given are absent. `blocks` is a table of 0 (unlisted), 1 (partial), 2 (full)."""

    batch: int = 2
    heads: tuple[int, int] = (4, 2)
    lengths: tuple[int, int] = (100, 130)
    dims: tuple[int, int] = (16, 24)
    dtype: torch.dtype = torch.float64
    score: Mod | None = None
    mask: Mod | None = None
    captures: Sequence[Tensor] = ()
    mask_captures: Sequence[Tensor] = ()
    blocks: Tensor | None = None  # [B|1, H|1, q blocks, kv blocks]
    block_size: tuple[int, int] = (32, 16)
    base: IndexBase | None = None
    scale: float | None = None
    tile: int | None = None
    needs: Needs | None = None
    with_dlse: bool = True
    seed: int = 0
    shuffle: bool = False
    tensors: dict[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(self.seed)
        (hq, hkv), (sq, skv), (d, dv), b = self.heads, self.lengths, self.dims, self.batch
        shapes = {"q": (b, hq, sq, d), "k": (b, hkv, skv, d), "v": (b, hkv, skv, dv), "do": (b, hq, sq, dv)}
        for name, shape in {**shapes, "dlse": (b, hq, sq)}.items():
            made = torch.randn(shape, generator=generator, dtype=torch.float64)
            wide = torch.float64 if self.dtype == torch.float64 else torch.float32
            self.tensors.setdefault(name, made.to(wide if name == "dlse" else self.dtype))
        self.scale = d**-0.5 if self.scale is None else self.scale
        if self.blocks is None and self.mask is not None:
            rows, columns = (-(-n // m) for n, m in zip(self.lengths, self.block_size, strict=True))
            self.blocks = torch.ones(1, 1, rows, columns)

    # -- the backend under test ---------------------------------------------------------------------------------
    def operands(self, lists: BlockLists | None = None) -> Operands:
        plan = Plan(
            make_plan(self.score, self.mask, self.captures, self.mask_captures),
            self.block_size,
            tile_elements=self.tile,
        )
        if lists is None and self.blocks is not None:
            lists = lists_of(self.blocks, self.shuffle)
        q, k, v = (self.tensors[n] for n in "qkv")
        every = (*self.captures, *self.mask_captures)
        assert self.scale is not None
        return Operands(q, k, v, every, lists, self.base, self.scale, plan)

    def run(self, lists: BlockLists | None = None) -> dict[str, Tensor | None]:
        op = self.operands(lists)
        out, lse, top = cpu.forward(op, want_max=True)
        wanted = tuple(c.requires_grad for c in op.captures)
        needs = self.needs or Needs(captures=wanted)
        dlse = self.tensors["dlse"] if self.with_dlse else None
        grads = cpu.backward(op, out, lse, self.tensors["do"], dlse, needs)
        found = {"out": out, "lse": lse, "max": top, "dq": grads.query, "dk": grads.key, "dv": grads.value}
        found.update({f"dc{i}": g for i, g in enumerate(grads.captures) if i < len(wanted) and wanted[i]})
        return found

    # -- the oracle ---------------------------------------------------------------------------------------------
    def coordinates(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Global b, h, q, kv, each of full shape."""
        base = self.base or IndexBase()
        shape = (self.batch, self.heads[0], *self.lengths)
        grids = torch.meshgrid(*(torch.arange(n, dtype=torch.int32) for n in shape), indexing="ij")
        b, h, i, j = grids
        size = self.block_size if self.blocks is not None else base.block_size
        gi = i if base.q_base is None else i + base.q_base[(i // size[0]).long()]
        gj = j if base.kv_base is None else j + base.kv_base[(j // size[1]).long()]
        return b + base.b_off, h + base.h_off, gi, gj

    def keep(self) -> Tensor:
        shape = (self.batch, self.heads[0], *self.lengths)
        if self.blocks is None:
            return torch.ones(shape, dtype=torch.bool)
        kind = self.blocks.repeat_interleave(self.block_size[0], 2).repeat_interleave(self.block_size[1], 3)
        kind = kind[:, :, : shape[2], : shape[3]].expand(shape)
        inside = torch.ones(shape, dtype=torch.bool)
        if self.mask is not None:
            inside = self.mask(*self.coordinates(), *self.mask_captures)
        return (kind == 2) | ((kind == 1) & inside)

    def oracle(self) -> dict[str, Tensor]:
        """Dense fp64, by autograd; mods see kept elements only."""
        q, k, v = (self.tensors[n].detach().double().requires_grad_() for n in "qkv")
        caps = [c.detach().double().requires_grad_() if c.requires_grad else c for c in self.captures]
        group = self.heads[0] // self.heads[1]
        keep = self.keep()
        s = q @ k.repeat_interleave(group, 1).mT * self.scale
        if self.score is not None:
            place = [c[keep] for c in self.coordinates()]
            kept = self.score(s[keep], *place, *caps)
        else:
            kept = s[keep]
        s = torch.full(keep.shape, -math.inf, dtype=torch.float64).masked_scatter(keep, kept.expand(int(keep.sum())))
        dead = (s == -math.inf).all(-1, keepdim=True) if s.shape[-1] else torch.ones(*s.shape[:3], 1, dtype=torch.bool)
        lse = torch.where(dead, 0.0, s).logsumexp(-1, keepdim=True)
        p = torch.where(dead, 0.0, (s - lse).exp())
        out = p @ v.repeat_interleave(group, 1)
        lse = torch.where(dead, -math.inf, lse).squeeze(-1)
        loss = (out * self.tensors["do"].double()).sum()
        if self.with_dlse:
            loss = loss + torch.where(dead.squeeze(-1), 0.0, lse * self.tensors["dlse"].double()).sum()
        leaves = [q, k, v, *(c for c in caps if c.requires_grad)]
        grads = torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)
        names = ["dq", "dk", "dv", *(f"dc{i}" for i, c in enumerate(caps) if c.requires_grad)]
        top = s.detach().amax(-1) if s.shape[-1] else torch.full(s.shape[:3], -math.inf)
        return {"out": out.detach(), "lse": lse.detach(), "max": top, **dict(zip(names, grads, strict=True))}

    def check(self, lists: BlockLists | None = None, rtol: float = 1e-10) -> dict[str, Tensor | None]:
        """Run both; every result that both have agrees to `rtol` of its largest element."""
        got, want = self.run(lists), self.oracle()
        for name, value in want.items():
            if got.get(name) is not None:
                assert_close(got[name], value, rtol, name)  # type: ignore[arg-type]
        return got


def assert_close(got: Tensor, want: Tensor, rtol: float, label: str) -> None:
    assert got.shape == want.shape, f"{label}: {tuple(got.shape)} != {tuple(want.shape)}"
    finite = want.isfinite()
    assert torch.equal(got.double()[~finite], want[~finite].double()), f"{label}: other infinities"
    error = (got.double()[finite] - want[finite]).abs()
    assert not error.isnan().any(), f"{label}: NaN"
    limit = rtol * max(1.0, _largest(want[finite]))
    assert _largest(error) <= limit, f"{label}: off by {_largest(error):.3g}, allowed {limit:.3g}"


def _largest(x: Tensor) -> float:
    return float(x.abs().max()) if x.numel() else 0.0


def lists_of(table: Tensor, shuffle: bool = False) -> BlockLists:
    """Block lists of a table of kinds; shuffled ones have garbage past their counts."""
    return BlockLists(_one_way(table, shuffle), _one_way(table.mT, shuffle))


def _one_way(table: Tensor, shuffle: bool) -> BlockSparseTensors:
    rng = np.random.default_rng(0)
    tensors = []
    for kind in (1, 2):
        listed = table == kind
        count = listed.sum(-1).to(torch.int32)
        index = torch.full(table.shape, 2**30 if shuffle else 0, dtype=torch.int32)
        for place in np.ndindex(*table.shape[:3]):
            found = listed[place].nonzero().flatten().to(torch.int32)
            if shuffle:
                found = found[torch.from_numpy(rng.permutation(len(found)))]
            index[place][: len(found)] = found
        tensors += [count, index]
    return BlockSparseTensors(*tensors)


@pytest.fixture
def attention() -> type[Attention]:
    return Attention


@pytest.fixture
def tools() -> SimpleNamespace:
    return SimpleNamespace(where=where, lists_of=lists_of, assert_close=assert_close, make_plan=make_plan)
