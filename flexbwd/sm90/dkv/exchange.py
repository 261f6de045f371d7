"""Exchange: P from the value warpgroup to the key warpgroup through shared memory.

Thread t of one hands its fragment to thread t of the other, which holds the same elements of dP: no transposition, 16
bytes a thread and access, no bank conflicts.

P travels as fp16(2^15·P) whatever the dtype: P lies in [0, 1], so this has 11 significant bits down to P = 2^-29,
three more than bf16; the key warpgroup's dS loses nothing against an fp32 P that its own rounding would not lose.
Where ∂s'/∂s depends on the score, it is multiplied in before, and bf16 has the range for any of them.
"""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float16, Int32

from flexbwd.modgraph.modplan import JClass
from flexbwd.sm90.dkv.pipes import Barrier
from flexbwd.sm90.mods import ModConfig
from flexbwd.sm90.tile import WG_THREADS

P_BITS = 15  # 2^15·P is what is exchanged, and multiplied into dV
_BOTH = 2 * WG_THREADS


def exchanged(mods: ModConfig) -> Any:
    """The type in which P travels."""
    return BFloat16 if mods.j_class is JClass.NONLINEAR else Float16


@dataclass(frozen=True)
class Exchange:
    """Buffers (8, thread, group, stage)."""

    buffers: cute.Tensor
    stages: cutlass.Constexpr[int]

    @cute.jit
    def open(self):
        """By the key warpgroup, before anything: every buffer is empty."""
        for s in cutlass.range_constexpr(self.stages):
            cute.arch.barrier_arrive(barrier_id=Barrier.P_EMPTY + s, number_of_threads=_BOTH)

    @cute.jit
    def put(self, rP: cute.Tensor, tick: Int32, thread: Int32):
        """By the value warpgroup: the fragment of step `tick`."""
        s = tick % self.stages
        cute.arch.barrier(barrier_id=Barrier.P_EMPTY + s, number_of_threads=_BOTH)
        cute.autovec_copy(self._flat(rP), self.buffers[None, thread, None, s])
        cute.arch.barrier_arrive(barrier_id=Barrier.P_FULL + s, number_of_threads=_BOTH)

    @cute.jit
    def get(self, rP: cute.Tensor, tick: Int32, thread: Int32):
        """By the key warpgroup."""
        s = tick % self.stages
        cute.arch.barrier(barrier_id=Barrier.P_FULL + s, number_of_threads=_BOTH)
        cute.autovec_copy(self.buffers[None, thread, None, s], self._flat(rP))
        cute.arch.barrier_arrive(barrier_id=Barrier.P_EMPTY + s, number_of_threads=_BOTH)

    def _flat(self, fragment: cute.Tensor) -> cute.Tensor:
        groups = cute.size(fragment) // 8
        return cute.make_tensor(fragment.iterator, cute.make_layout((8, groups), stride=(1, 8)))
