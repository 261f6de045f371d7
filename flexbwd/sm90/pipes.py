"""Ring: a circle of shared-memory buffers between the copy engine and its readers.

    full[s]    completed by TMA when the bytes of buffer s have landed: orders the copy before the readers' wgmma
    empty[s]   one arrival per reading warp, after its wgmma on buffer s have retired: orders them before the next
    copy into s

Moving state is a plain tick, the number of fills so far, counted by each role in a local: buffer = tick % stages,
phase = tick // stages.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32


@dataclass(frozen=True)
class Ring:
    """Barriers full = bars[0:stages], empty = bars[stages:2*stages]."""

    bars: cute.Pointer
    stages: cutlass.Constexpr[int]

    def init(self, readers: int) -> None:
        """By one thread; `readers` arrivals empty a buffer."""
        for s in range(self.stages):
            cute.arch.mbarrier_init(self.bars + s, 1)
            cute.arch.mbarrier_init(self.bars + self.stages + s, readers)

    def buffer(self, tick: Int32) -> Int32:
        if self.stages & (self.stages - 1) == 0:
            return tick & (self.stages - 1)
        return tick % self.stages

    def phase(self, tick: Int32) -> Int32:
        return (tick // self.stages) & 1

    def full(self, tick: Int32) -> cute.Pointer:
        return self.bars + self.buffer(tick)

    def empty(self, tick: Int32) -> cute.Pointer:
        return self.bars + self.stages + self.buffer(tick)

    def wait_full(self, tick: Int32) -> None:
        """Reader: the tick-th fill has landed."""
        cute.arch.mbarrier_wait(self.full(tick), self.phase(tick))

    def acquire(self, tick: Int32, tx_bytes: int) -> None:
        """Writer, one warp: the buffer's readers are done with the fill before; announce `tx_bytes`."""
        cute.arch.mbarrier_wait(self.bars + self.stages + self.buffer(tick), self.phase(tick) ^ 1)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(self.full(tick), tx_bytes)

    def acquire_with(self, tick: Int32, tx_bytes: int, notes: cute.Tensor, note: Int32) -> None:
        """`acquire`, and tell the readers `note` beside the bytes: it is written before the arrival that they wait for,
        in place buffer(tick) of `notes`, and read between `wait_full` and `release`."""
        cute.arch.mbarrier_wait(self.bars + self.stages + self.buffer(tick), self.phase(tick) ^ 1)
        with cute.arch.elect_one():
            notes[self.buffer(tick)] = note
            cute.arch.mbarrier_arrive_and_expect_tx(self.full(tick), tx_bytes)

    def release(self, tick: Int32) -> None:
        """Reader, each warp: the tick-th fill is no longer needed."""
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(self.bars + self.stages + self.buffer(tick))
