"""Work counters: what `schedule.Tickets` draws from, int32 [1], 0 between launches.

Launches of one stream follow each other and share a counter. A launch captured in a graph gets one of its own, for
good: graphs replay on any stream.
"""

from __future__ import annotations

import torch
from torch import Tensor

_POOL = 4096


class _Pool:
    """Counters of one device, zeroed once."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.unused: list[Tensor] = []
        self.by_stream: dict[int, Tensor] = {}

    def take(self) -> Tensor:
        if not self.unused:
            if torch.cuda.is_current_stream_capturing():
                return torch.zeros(1, dtype=torch.int32, device=self.device)  # zeroed at each replay
            self.unused = list(torch.zeros(_POOL, dtype=torch.int32, device=self.device).split(1))
            torch.cuda.current_stream(self.device).synchronize()  # other streams will use them
        return self.unused.pop()


_pools: dict[int, _Pool] = {}


def work_counter(device: torch.device) -> Tensor:
    """The counter for the next launch on the current stream of `device`."""
    index = device.index
    if index is None:
        index = torch.cuda.current_device()
    pool = _pools.get(index)
    if pool is None:
        pool = _pools[index] = _Pool(device)
    if torch.cuda.is_current_stream_capturing():
        return pool.take()
    stream = torch._C._cuda_getCurrentRawStream(index)
    found = pool.by_stream.get(stream)
    if found is None:
        found = pool.by_stream[stream] = pool.take()
    return found
