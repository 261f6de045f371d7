"""Mods over a score fragment: what the kernels call, and what of the mods a kernel is static about.

Host side (needs no DSL):

    use = ModUse(extents, tile, backward=..., partial=..., precision=...)
    mods, arguments = ModConfig.of(mod_plan, captures, use, index_base)      # cached; a few microseconds when known
    FwdConfig(..., mods=mods)                       `ModConfig` is a small key; its graph takes no part in equality
    kernel(..., arguments)                          ONE kernel argument: a tuple, never empty
    mods.fake_arguments()                           the same tuple for cute.compile

    mods.has_score   there is a score_mod: prescale must be off, `tile.score` does the scaling
    mods.has_keep    score_keep is there: call `tile.mask` on every tile, full ones too
    mods.has_mask    mask_mod is there: call `tile.mask(..., partial=True)` on tiles of the partial run
    mods.j_class     ONE, CONST, LINEAR: factor from coordinates, call `tile.times_factor(dS)`;  ONE: nothing to call
                     NONLINEAR: keep the factor that `tile.score_and_factor` writes

Kernel side, at trace time; nothing here is a jit function, all loops are unrolled by Python. Values are made where a
call stands, so a call must stand in the region that its tier belongs to:

    head = mods.head(arguments, b, h, scale_log2)    (b, h) tier: once per work item, before any tile loop
    rows = head.rows(axis, rows_are)                 stationary tier: once per work item, before the tile loop
    tile = rows.tile(axis)                           once per tile, inside the loop body (or a jit method called there)

    b, h          Int32, local: h is the query head
    scale_log2    Float32, scale * log2(e)
    axis          Axis(first, offsets): LOCAL index of the thread's first held row (column), and static Python ints;
                  element [r, j] of a fragment lies at row first + offsets[r], column first + offsets[j]
    rows_are      "q" (forward, dq kernel: rows = queries) or "kv" (by keys: rows = keys, columns = queries)

    tile.score(frag)                      raw q·k  →  s' * log2(e), in place; scaling included
    tile.score_and_factor(frag, factor)   the same, and J = ds'/ds into `factor` (a fragment of any float type)
    tile.times_factor(frag, factor=None)  frag *= J; J from `factor` or, without it, from coordinates. 0 where frag is 0
    tile.mask(frag, partial, limits)      -inf where not kept: by score_keep always, by mask_mod if `partial`, by
                                          `limits` = Limits(row_end, col_end, lo, hi) if given: LOCAL row < row_end,
                                          column < col_end, lo <= q - kv <= hi; each None or Int32
    tile.sites                            loads with a gradient: see `CaptureGrad`; reduction is the kernel's

Offsets of 0, 1, 8, 9, 16, 17, … (`numerics.column_of`) or 0, 1, 2, … let masks be words of 32 columns; others are
compared one by one. Global coordinates are taken to be below 2**30. Captured tensors are read as constant memory: they
must not change while the kernel runs.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flexbwd.errors import UnsupportedError
from flexbwd.modgraph.extents import Extents
from flexbwd.modgraph.ir import canonical_hash, topological
from flexbwd.modgraph.modplan import JClass, ModPlan
from flexbwd.modgraph.to_cute.prepare import Lowering, ModGraph, prepare
from flexbwd.sparsity.tensors import IndexBase

_DSL_TYPES = {
    torch.float64: "Float64", torch.float32: "Float32", torch.float16: "Float16", torch.bfloat16: "BFloat16",
    torch.int64: "Int64", torch.int32: "Int32", torch.int16: "Int16", torch.int8: "Int8", torch.uint8: "Uint8",
    torch.bool: "Uint8",
}  # fmt: skip


class Axis(NamedTuple):
    """Rows or columns of a fragment: element k lies at first + offsets[k], a local index."""

    first: Any  # Int32
    offsets: tuple[int, ...]


class Limits(NamedTuple):
    """What `tile.mask` hides beside the mods: by local rows, local columns, and lo <= q - kv <= hi. None: no limit."""

    row_end: Any = None
    col_end: Any = None
    lo: Any = None
    hi: Any = None


@dataclass(frozen=True)
class ModUse:
    """How a kernel uses mods; `Extents` are local: batch, query heads, query rows, key rows.

    Attributes:
        tile: (query rows, key rows) of a kernel tile: masked lanes index up to a multiple of these.
        partial: some tiles are partial, so mask_mod is needed.
        host: for the DSL's CPU JIT, in tests.
    """

    extents: Extents
    tile: tuple[int, int]
    backward: bool = False
    partial: bool = True
    precision: str = "fast"
    host: bool = False


@dataclass(frozen=True)
class CaptureKey:
    """What compiled code assumes of one captured tensor."""

    slot: int
    dtype: str  # the DSL's name
    rank: int
    unit: int  # dimension of stride 1, or -1
    number: bool  # a 0-dim CPU tensor: passed by value
    empty: bool
    wide: bool  # offsets need 64 bits

    @classmethod
    def of(cls, slot: int, tensor: Tensor) -> CaptureKey:
        number = tensor.dim() == 0 and tensor.device.type == "cpu"
        unit = next((d for d in reversed(range(tensor.dim())) if tensor.stride(d) == 1 and tensor.shape[d] > 1), -1)
        strides = [s for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n > 1]
        span = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
        wide = max([span, *strides, 0]) >= 2**31
        return cls(slot, _DSL_TYPES[tensor.dtype], max(tensor.dim(), 1), unit, number, tensor.numel() == 0, wide)

    def argument(self, tensor: Tensor) -> Any:
        """The run-time value of a kernel argument."""
        if self.number:
            return tensor.item()
        tensor = tensor.detach() if tensor.requires_grad else tensor
        tensor = tensor if tensor.dim() else tensor.reshape(1)
        return tensor.view(torch.uint8) if tensor.dtype is torch.bool else tensor

    def fake(self) -> Any:
        """What stands for it in cute.compile."""
        import cutlass
        import cutlass.cute as cute
        from cutlass.cute.runtime import make_fake_tensor

        dtype = getattr(cutlass, self.dtype)
        if self.number:
            wide = self.dtype == "Int64"
            return cutlass.Int64(0) if wide else (cutlass.Float32(0.0) if "Float" in self.dtype else cutlass.Int32(0))
        shape = tuple(cute.sym_int32() for _ in range(self.rank))
        step = cute.sym_int64 if self.wide else cute.sym_int32
        stride = tuple(1 if d == self.unit else step() for d in range(self.rank))
        return make_fake_tensor(dtype, shape, stride, assumed_align=dtype.width // 8)


@dataclass(frozen=True)
class BaseKey:
    """An IndexBase: which offsets there are, and the blocks they belong to."""

    q_block: int  # 0: no offsets per query block
    kv_block: int


@dataclass(frozen=True)
class ModConfig:
    """What compiled code is static about; equal configurations mean equal code."""

    key: str = ""  # canonical hash of graphs and guards; "" without mods
    captures: tuple[CaptureKey, ...] = ()
    base: BaseKey | None = None
    precision: str = "fast"
    host: bool = False
    j_class: JClass = JClass.ONE
    graph: ModGraph | None = field(default=None, compare=False, repr=False)

    @classmethod
    def of(
        cls, mods: ModPlan, captures: Sequence[Tensor], use: ModUse, base: IndexBase | None = None
    ) -> tuple[ModConfig, tuple[Any, ...]]:
        """The configuration, and the kernel's run-time arguments (a tuple, never empty).

        Args:
            captures: by load slot of `mods`.
        Raises:
            UnsupportedError: `base` has blocks that are no multiple of the kernel's tiles.
        """
        facts = tuple((t.dtype, t.shape, t.stride(), t.device.type) for t in captures)
        known = _known.get(mods)
        if known is None:
            known = _known[mods] = {}
        base_key = None if base is None else _base_key(base, use.tile)
        config = known.get((facts, use, base_key))
        if config is None:
            if len(known) >= _MOST_KNOWN:
                known.clear()
            config = known[facts, use, base_key] = cls._find(mods, captures, facts, use, base_key)
        arguments = () if base is None else _base_arguments(base)
        arguments += tuple(key.argument(captures[key.slot]) for key in config.captures if not key.empty)
        return config, arguments or (0,)

    @classmethod
    def _find(
        cls, mods: ModPlan, captures: Sequence[Tensor], facts: tuple, use: ModUse, base: BaseKey | None
    ) -> ModConfig:
        """One that serves all shorter sequences, if lengths do not matter; else one for these."""
        if max(use.extents.q_idx, use.extents.kv_idx) <= _LONG:
            long = replace(use, extents=use.extents._replace(q_idx=_LONG, kv_idx=_LONG))
            known = _known[mods]
            config = known.get((facts, long, base))
            if config is None:
                config = known[facts, long, base] = cls._make(mods, captures, long, base)
            if config.graph is None or config.graph.any_length:
                return config
        return cls._make(mods, captures, use, base)

    @classmethod
    def _make(cls, mods: ModPlan, captures: Sequence[Tensor], use: ModUse, base: BaseKey | None) -> ModConfig:
        fast = use.precision == "fast"
        lowering = Lowering(use.extents, use.tile, use.backward, use.partial, fast, base is not None)
        graph = prepare(mods, captures, lowering)
        if not graph.roots:
            return cls(host=use.host)
        slots = sorted({int(n.attr) for n in topological(graph.roots) if n.op == "load"})  # type: ignore[call-overload]
        guards = sorted((canonical_hash([n]), gs) for n, gs in graph.guards.items())
        nonnegative = sorted(canonical_hash([n]) for n in graph.nonnegative if n.op in ("fdiv", "mod", "tdiv", "fmod"))
        present = [r is not None for r in (graph.score, graph.factor, graph.keep, graph.mask)]
        key = canonical_hash(graph.evaluated, extra=repr((guards, nonnegative, present, len(graph.sites))))
        keys = tuple(CaptureKey.of(s, captures[s]) for s in slots)
        j_class = mods.j_class if use.backward else JClass.ONE
        return cls(key, keys, base, use.precision, use.host, j_class, graph)

    @property
    def has_score(self) -> bool:
        return self.graph is not None and self.graph.score is not None

    @property
    def has_keep(self) -> bool:
        return self.graph is not None and self.graph.keep is not None

    @property
    def has_mask(self) -> bool:
        return self.graph is not None and self.graph.mask is not None

    def fake_arguments(self) -> tuple[Any, ...]:
        """The argument tuple for cute.compile."""
        from cutlass import Int32

        from flexbwd.jit.launch import fake_compact

        found: list[Any] = []
        if self.base is not None:
            found += [Int32(0), Int32(0)]
            found += [fake_compact(torch.int32, 1) for block in (self.base.q_block, self.base.kv_block) if block]
        found += [key.fake() for key in self.captures if not key.empty]
        return tuple(found) or (Int32(0),)

    def head(self, arguments: tuple[Any, ...], b: Any, h: Any, scale_log2: Any) -> Any:
        """The (b, h) tier; see the module's docstring."""
        from flexbwd.sm90.mod_tile import Head

        return Head.of(self, arguments, b, h, scale_log2)


NO_MODS = ModConfig()
_LONG = 1 << 20  # sequences up to it share a configuration whose code does not depend on their lengths
_MOST_KNOWN = 512  # configurations remembered per plan
_known: weakref.WeakKeyDictionary[ModPlan, dict[Any, ModConfig]] = weakref.WeakKeyDictionary()


def _base_key(base: IndexBase, tile: tuple[int, int]) -> BaseKey:
    for name, offsets, block, rows in zip(("q", "kv"), (base.q_base, base.kv_base), base.block_size, tile, strict=True):
        if offsets is not None and block % rows:
            raise UnsupportedError(
                f"index_base has {name}_base for blocks of {block}, but a kernel tile has {rows} rows; give it for "
                f"blocks that are a multiple of {rows}"
            )
    sizes = [0 if t is None else n for t, n in zip((base.q_base, base.kv_base), base.block_size, strict=True)]
    return BaseKey(*sizes)


def _base_arguments(base: IndexBase) -> tuple[Any, ...]:
    offsets = tuple(t.to(torch.int32).contiguous() for t in (base.q_base, base.kv_base) if t is not None)
    return (base.b_off, base.h_off, *offsets)
