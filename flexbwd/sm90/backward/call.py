"""Backward on the GPU: delta, backward, convert; three launches on torch's current stream, no host synchronisation."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flexbwd.jit.compile import compiled, load_dsl
from flexbwd.jit.launch import tma_ready
from flexbwd.plan import Gradients, Needs
from flexbwd.problem import empty_like_order
from flexbwd.sm90.backward.config import BwdConfig
from flexbwd.sm90.backward.tile import WGS, BwdTile, backward_tile
from flexbwd.sm90.operands import Operands


def backward(
    op: Operands,
    out: Tensor,
    lse: Tensor,
    grad_out: Tensor,
    grad_lse: Tensor | None,
    needs: Needs,
    causal: bool = False,
    tile: BwdTile | None = None,
) -> Gradients:
    """Gradients of `forward` at `grad_out` and `grad_lse`.

        dS = P ∘ (dO·Vᵀ − delta)     dQ = scale · dS·K     dK = scale · dSᵀ·Q     dV = Pᵀ·dO

    Args:
        out [B, Hq, Sq, Dv], lse [B, Hq, Sq] natural log: what `forward` returned.
        grad_out [B, Hq, Sq, Dv]; grad_lse [B, Hq, Sq] fp32 or None.
        needs: gradients nobody asked for are not computed.
        tile: None takes the table's.
    Returns:
        Gradients in the dtype and stride order of their tensors; None where not needed.
    """
    if not (needs.query or needs.key or needs.value):
        return Gradients()
    tile = backward_tile(op.head_dim, op.value_dim, causal) if tile is None else tile
    config = BwdConfig(tile, op.query.dtype, causal, op.group > 1, needs.query, needs.key, needs.value)
    grads = [empty_like_order(t, t.shape) if n else None for t, n in _wanted(op, needs)]
    if not (op.batch and op.q_heads and op.q_len and op.kv_len):
        return Gradients(*[None if g is None else g.zero_() for g in grads])
    _Launches(op, config).run(out, lse, grad_out, grad_lse, *grads)
    return Gradients(*grads)


def _wanted(op: Operands, needs: Needs) -> list[tuple[Tensor, bool]]:
    return [(op.query, needs.query), (op.key, needs.key), (op.value, needs.value)]


class _Launches:
    """The three kernels of one call and the scratch between them."""

    def __init__(self, op: Operands, config: BwdConfig) -> None:
        self.op, self.config = op, config
        tile, device = config.tile, op.query.device
        m_blocks = -(-op.q_len // tile.tile_m)
        heads = op.batch * op.q_heads
        floats = tile.tile_m * tile.dim
        tiles = heads * m_blocks if config.want_dq else 1  # without dQ a placeholder that nobody touches
        self.lse_log2, self.delta = torch.empty(
            (2, heads, m_blocks * tile.tile_m), dtype=torch.float32, device=device
        ).unbind()
        self.dq_acc = torch.empty((tiles, floats), dtype=torch.float32, device=device)

    def section(self) -> int:
        """Key heads whose CTAs start together, the key tile with the longest walk first.

        Dense walks are equally long: one head at a time keeps its Q and dO in L2. Causal walks shrink from L to 0
        tiles: the last section must hold more work than its longest walk, section · n_blocks · L/2 >= SMs · L.
        Measured (H200, B2 S8192 D128 causal, one head at a time → this): H16/4 2.82 → 2.56 ms, H16 2.52 → 2.48 ms.
        """
        if not self.config.causal:
            return 1
        n_blocks = -(-self.op.kv_len // self.config.tile.tile_n)
        sms = torch.cuda.get_device_properties(self.op.query.device).multi_processor_count
        return min(-(-2 * sms // n_blocks), self.op.batch * self.op.kv_heads)

    def run(
        self,
        out: Tensor,
        lse: Tensor,
        grad_out: Tensor,
        grad_lse: Tensor | None,
        dq: Tensor | None,
        dk: Tensor | None,
        dv: Tensor | None,
    ) -> None:
        load_dsl()
        from flexbwd.sm90.convert import ConvertConfig, build_convert
        from flexbwd.sm90.delta import DeltaConfig, build_delta

        op, config, tile = self.op, self.config, self.config.tile
        grad_out = tma_ready(dense(grad_out))
        lse = lse.contiguous()
        floats = tile.tile_m * tile.dim if config.want_dq else 0
        delta_config = DeltaConfig(config.dtype, op.value_dim, tile.tile_m, floats, grad_lse is not None)
        delta = compiled(delta_config, lambda: build_delta(delta_config))
        row_grad = lse if grad_lse is None else grad_lse.to(torch.float32).contiguous()
        to_clear = self.dq_acc if config.want_dq else self.dq_acc.view(-1, 4)
        delta(tma_ready(out), grad_out, lse, row_grad, self.lse_log2, self.delta, to_clear)

        main = compiled(config, lambda: build_backward(config))
        by_wg = self.dq_acc.view(-1, WGS, tile.dq_wg_floats)
        targets = (op.key if dk is None else dk, op.value if dv is None else dv)
        main(op.query, op.key, op.value, grad_out, self.lse_log2, self.delta, by_wg, *targets, op.scale, self.section())
        if dq is not None:
            convert_config = ConvertConfig(config.dtype, tile.tile_m, tile.dim, tile.dq_wg_dim)
            compiled(convert_config, lambda: build_convert(convert_config))(self.dq_acc, dq, op.scale)


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
    from cutlass import Float32, Int32, cute
    from cutlass.cute.runtime import make_fake_tensor

    from flexbwd.jit.launch import fake_stream, fake_tensor
    from flexbwd.sm90.backward.kernel import BackwardKernel
    from flexbwd.sm90.delta import fake_rows

    share = config.tile.dq_wg_floats
    dq_acc = make_fake_tensor(
        Float32, (cute.sym_int32(), WGS, share), (cute.sym_int64(divisibility=WGS * share), share, 1), assumed_align=128
    )
    matrices = [fake_tensor(config.dtype, 4) for _ in range(6)]
    arguments = (*matrices[:4], fake_rows(), fake_rows(), dq_acc, *matrices[4:], Float32(1.0), Int32(1), fake_stream())
    return BackwardKernel(config), arguments
