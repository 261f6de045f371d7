"""The Hopper kernels. Importing this package needs neither a GPU nor the CuTe DSL: kernels are built at their first
call."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flexbwd.problem import empty_like_order
from flexbwd.sm90.operands import Operands
from flexbwd.sm90.walks import Dense, Walk

__all__ = ["Operands", "backward", "forward"]


def forward(op: Operands, walk: Walk | None = None) -> tuple[Tensor, Tensor]:
    """out [B, Hq, Sq, Dv] in the stride order of the query, and natural-log lse [B, Hq, Sq] fp32; None visits all."""
    from flexbwd.sm90.forward.call import launch

    shape = (op.batch, op.q_heads, op.q_len)
    out = empty_like_order(op.query, (*shape, op.value_dim))
    lse = torch.empty(shape, dtype=torch.float32, device=op.query.device)
    launch(op, Dense() if walk is None else walk, out, lse)
    return out, lse


def backward(*args: Any, **kwargs: Any) -> Any:
    """Gradients of the call; see flexbwd.sm90.backward."""
    from flexbwd.sm90.backward.call import backward as call

    return call(*args, **kwargs)
