"""What a mod is: a torch function of one score element; every argument but `score` is an int32 scalar tensor."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]  # (score, b, h, q_idx, kv_idx) -> score
MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # (b, h, q_idx, kv_idx) -> bool, True keeps
