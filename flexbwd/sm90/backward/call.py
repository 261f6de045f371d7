"""Backward on the GPU: delta, backward, convert; three launches on torch's current stream, no host synchronisation."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flexbwd.jit.compile import Kernel, kernel_of, load_dsl
from flexbwd.jit.launch import tma_ready
from flexbwd.jit.warm import Job
from flexbwd.modgraph.ir import topological
from flexbwd.modgraph.modplan import JClass, ModPlan
from flexbwd.plan import Gradients, Needs
from flexbwd.sm90.backward.config import BwdConfig, trained_slots
from flexbwd.sm90.backward.tile import BwdTile, backward_tile
from flexbwd.sm90.mods import NO_MODS, ModConfig
from flexbwd.sm90.operands import Operands
from flexbwd.sm90.row_configs import ConvertConfig, DeltaConfig
from flexbwd.sm90.walks import Band, Dense, Lists, Walk, WalkKind, kind_of

Mods = tuple[ModConfig, tuple[Any, ...]]


def backward(
    op: Operands,
    out: Tensor,
    lse: Tensor,
    grad_out: Tensor,
    grad_lse: Tensor | None,
    needs: Needs,
    walk: Walk,
    mods: Mods = (NO_MODS, (0,)),
    tile: BwdTile | None = None,
    captures: Sequence[Tensor] = (),
) -> Gradients:
    """Gradients of `forward` at `grad_out` and `grad_lse`.

        dS = P ∘ (dO·Vᵀ − delta)     dQ = scale · dS·K     dK = scale · dSᵀ·Q     dV = Pᵀ·dO

    Args:
        out [B, Hq, Sq, Dv], lse [B, Hq, Sq] natural log: what `forward` returned.
        grad_out [B, Hq, Sq, Dv]; grad_lse [B, Hq, Sq] fp32 or None.
        needs: gradients nobody asked for are not computed.
        walk: which scores are kept; lists are by key tiles of `backward_tile(...)`, per query head.
        mods: what `ModConfig.of` made for the kernel's tile.
        tile: None takes the table's.
        captures: tensors that the mods read, by load slot; read for their shapes, where gradients of them are needed.
    Returns:
        Gradients in the dtype and stride order of their tensors; None where not needed.
    Raises:
        UnsupportedError: a captured tensor needs a gradient that this kernel does not give; see `captures_refusal`.
    """
    wanted = (needs.query, needs.key, needs.value)
    learned = _Learned.of(mods[0], needs.captures, captures)
    if not (any(wanted) or learned.slots):
        return Gradients(captures=learned.results())
    grads = [torch.empty_like(t) if n else None for t, n in zip((op.query, op.key, op.value), wanted, strict=True)]
    if not (op.batch and op.q_heads and op.q_len and op.kv_len):
        return Gradients(*[None if g is None else g.zero_() for g in grads], learned.results())
    static = (kind_of(walk), op.group > 1, *wanted, bool(learned.slots), grad_lse is not None, mods[0])
    kernels = _kernels(_Static(op.head_dim, op.value_dim, op.query.dtype, *static), tile)
    rows = (out, lse, tma_ready(dense(grad_out)), grad_lse)
    _launch(kernels, op, rows, walk, (*mods[1], *learned.sums), grads)
    return Gradients(*grads, learned.results())


def captures_refusal(mods: ModPlan) -> str | None:
    """Why the kernel cannot give the gradients of captured tensors, or None where it can."""
    for site in mods.loads:
        if site.jacobian is None:
            continue
        name = mods.captures[site.slot].name
        if mods.j_class is JClass.NONLINEAR:
            return f"{name} requires grad inside a score_mod whose derivative depends on the score"
        if any(n.op == "in" and n.attr == "score" for n in topological([site.jacobian])):
            return f"{name} requires grad, and its derivative depends on the score"
    return None


class _Learned(NamedTuple):
    """Captured tensors that get a gradient: fp32 sums by `trained_slots`."""

    slots: list[int]
    sums: list[Tensor]
    captures: Sequence[Tensor]
    needed: tuple[bool, ...]

    @classmethod
    def of(cls, mods: ModConfig, needed: tuple[bool, ...], captures: Sequence[Tensor]) -> _Learned:
        slots = trained_slots(mods) if any(needed) else []
        sums = [torch.zeros(captures[s].shape or (1,), dtype=torch.float32, device=captures[s].device) for s in slots]
        return cls(slots, sums, captures, needed)

    def results(self) -> list[Tensor | None]:
        """By load slot, in the captured tensors' shapes and dtypes."""
        found: list[Tensor | None] = [None] * len(self.captures)
        for slot, total in zip(self.slots, self.sums, strict=True):
            if self.needed[slot]:
                found[slot] = total.view(self.captures[slot].shape).to(self.captures[slot].dtype)
        return found


def jobs(op: Operands, needs: Needs, walk: Walk, mods: ModConfig = NO_MODS) -> list[Job]:
    """(configuration, build) of every kernel that `backward` may launch (with or without grad_lse), costly first."""
    wanted = (needs.query, needs.key, needs.value)
    if not any(wanted):
        return []
    facts = (op.head_dim, op.value_dim, op.query.dtype, kind_of(walk), op.group > 1, *wanted, False)
    plain, with_lse = (_kernels(_Static(*facts, has_grad_lse, mods), None) for has_grad_lse in (False, True))
    found = [plain.main, plain.delta, with_lse.delta, plain.convert]
    return [(k.config, k.build) for k in found if k is not None]


class _Static(NamedTuple):
    """What the kernels of a call depend on; cheap to build and to hash."""

    head_dim: int
    value_dim: int
    dtype: torch.dtype
    walk: WalkKind
    grouped: bool
    want_dq: bool
    want_dk: bool
    want_dv: bool
    want_captures: bool
    has_grad_lse: bool
    mods: ModConfig


class _Kernels(NamedTuple):
    """Kernels of a call, and what its scratch is made of."""

    tile: BwdTile
    want_dq: bool
    delta: Kernel
    main: Kernel
    convert: Kernel | None  # None without dQ


@functools.lru_cache(maxsize=1024)
def _kernels(key: _Static, tile: BwdTile | None) -> _Kernels:
    if tile is None:
        roomy = key.mods.j_class is JClass.NONLINEAR or key.want_captures
        tile = backward_tile(key.head_dim, key.value_dim, roomy)
    wanted = (key.want_dq, key.want_dk, key.want_dv, key.mods, key.want_captures)
    config = BwdConfig(tile, key.dtype, key.walk, key.grouped, *wanted)
    floats = tile.tile_m * tile.dim if key.want_dq else 0
    delta = DeltaConfig(key.dtype, key.value_dim, tile.tile_m, floats, key.has_grad_lse)
    convert = ConvertConfig(key.dtype, tile.tile_m, tile.dim, tile.dq_wg_dim)
    return _Kernels(
        tile,
        key.want_dq,
        kernel_of(delta, "flexbwd.sm90.delta:build_delta"),
        kernel_of(config, "flexbwd.sm90.backward.call:build_backward"),
        kernel_of(convert, "flexbwd.sm90.convert:build_convert") if key.want_dq else None,
    )


def _launch(
    kernels: _Kernels,
    op: Operands,
    rows: tuple[Tensor, Tensor, Tensor, Tensor | None],
    walk: Walk,
    mods: tuple[Any, ...],
    grads: list[Tensor | None],
) -> None:
    """The three kernels.

    Args:
        rows: (out, lse, grad_out, grad_lse).
        mods: the arguments of mods, then the sums of captured tensors.
    """
    out, lse, grad_out, grad_lse = rows
    dq, dk, dv = grads
    tile = kernels.tile
    lse_log2, delta, dq_acc = _scratch(op, tile, kernels.want_dq)
    lse = lse.contiguous()
    row_grad = lse if grad_lse is None else grad_lse.to(torch.float32).contiguous()
    kernels.delta.run(tma_ready(out), grad_out, lse, row_grad, lse_log2, delta, dq_acc)
    targets = (op.key if dk is None else dk, op.value if dv is None else dv)
    arguments = walk_arguments(op, tile, walk)
    inputs = (op.query, op.key, op.value, grad_out, lse_log2, delta, dq_acc)
    kernels.main.run(*inputs, *targets, op.scale, arguments, mods)
    if kernels.convert is not None:
        kernels.convert.run(dq_acc, dq, op.scale)


def _scratch(op: Operands, tile: BwdTile, want_dq: bool) -> tuple[Tensor, Tensor, Tensor]:
    """(lse_log2, delta [B*Hq, padded Sq], dq_acc [tiles, floats]) in one allocation; without dQ a placeholder."""
    heads = op.batch * op.q_heads
    m_blocks = -(-op.q_len // tile.tile_m)
    rows = m_blocks * tile.tile_m
    floats = tile.tile_m * tile.dim
    tiles = heads * m_blocks if want_dq else 0
    held = torch.empty(2 * heads * rows + max(tiles * floats, 4), dtype=torch.float32, device=op.query.device)
    shape, stride = (heads, rows), (rows, 1)
    return (
        held.as_strided(shape, stride, 0),
        held.as_strided(shape, stride, heads * rows),
        held.as_strided((tiles, floats) if tiles else (1, 4), (floats if tiles else 4, 1), 2 * heads * rows),
    )


def walk_arguments(op: Operands, tile: BwdTile, walk: Walk) -> tuple[Any, ...]:
    """The kernel's `walk`: (section,), (section, lo, hi) or (order, counts, tiles)."""
    if isinstance(walk, Lists):
        return walk.lists.order, walk.lists.counts, walk.lists.tiles
    if isinstance(walk, Dense):
        return (1,)
    return (_section(op, tile, walk), *walk.limits)


def _section(op: Operands, tile: BwdTile, walk: Band) -> int:
    """Key heads whose CTAs start together, the key tile with the longest walk first.

    Equally long walks (dense, windows): one head at a time keeps its Q and dO in L2. Causal walks shrink from L to 0
    tiles: the last section must hold more work than its longest walk, section · n_blocks · L/2 >= SMs · L.
    Measured (H200, B2 S8192 D128 causal, one head at a time → this): H16/4 2.82 → 2.56 ms, H16 2.52 → 2.48 ms.
    """
    if walk.lo is not None and walk.hi is not None:
        return 1
    n_blocks = -(-op.kv_len // tile.tile_n)
    return min(-(-2 * _sms(op.query.device) // n_blocks), op.batch * op.kv_heads)


@functools.cache
def _sms(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def dense(tensor: Tensor) -> Tensor:
    """`tensor`, copied if an expanded dimension makes elements share memory: the copy engine wants strides."""
    return (
        tensor.contiguous()
        if any(s == 0 and n > 1 for s, n in zip(tensor.stride(), tensor.shape, strict=True))
        else tensor
    )


def build_backward(config: BwdConfig) -> tuple[Any, tuple[Any, ...]]:
    """The jit function of `config` and its fake arguments."""
    load_dsl()
    from cutlass import Float32

    from flexbwd.jit.launch import fake_stream, fake_tensor
    from flexbwd.sm90.backward.kernel import BackwardKernel
    from flexbwd.sm90.delta import fake_accumulator, fake_rows

    matrices = [fake_tensor(config.dtype, 4) for _ in range(6)]
    dq_acc = fake_accumulator(config.tile.tile_m * config.tile.dim if config.want_dq else 0)
    inputs = (*matrices[:4], fake_rows(), fake_rows(), dq_acc)
    numbers = (Float32(1.0), fake_walk(config.walk), (*config.mods.fake_arguments(), *fake_captures(config)))
    return BackwardKernel(config), (*inputs, *matrices[4:], *numbers, fake_stream())


def fake_captures(config: BwdConfig) -> tuple[Any, ...]:
    """What `_Learned.sums` will be."""
    from flexbwd.jit.launch import fake_compact

    ranks = {key.slot: key.rank for key in config.mods.captures}
    slots = trained_slots(config.mods) if config.want_captures else []
    return tuple(fake_compact(torch.float32, ranks[s]) for s in slots)


def fake_walk(kind: WalkKind) -> tuple[Any, ...]:
    """What `walk_arguments` will hand over."""
    from cutlass import Int32

    from flexbwd.jit.launch import fake_tensor

    if kind.lists:
        lists = [fake_tensor(torch.int32, rank, align) for rank, align in ((1, 4), (4, 16), (4, 4))]
        return tuple(lists)
    return tuple(Int32(1) for _ in range(3 if kind.band else 1))
