"""The Hopper kernels. Importing this package needs neither a GPU nor the CuTe DSL: kernels are built at their first
call."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from flexbwd.sm90.operands import Operands

__all__ = ["Operands", "backward", "forward"]


def forward(op: Operands, causal: bool = False) -> tuple[Tensor, Tensor]:
    """out [B, Hq, Sq, Dv] and natural-log lse [B, Hq, Sq] fp32; `causal` keeps i >= j."""
    from flexbwd.sm90.forward.call import forward as call

    return call(op, causal)


def backward(*args: Any, **kwargs: Any) -> Any:
    """Gradients of the call; see flexbwd.sm90.backward."""
    from flexbwd.sm90.backward.call import backward as call

    return call(*args, **kwargs)
