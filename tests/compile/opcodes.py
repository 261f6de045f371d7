"""What the compiler made of a kernel, read from the cubin without a disassembler."""

from __future__ import annotations

import re
import struct
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.compile.resources import compile_with_artifacts, sections

# low 12 bits of an sm_90 instruction; HGMMA with A in shared memory and in registers
HGMMA_S, HGMMA_R, WARPGROUP, USETMAXREG, LDL, STL = 0x9F0, 0xDF0, 0x9C5, 0x9C8, 0x983, 0x387


@dataclass(frozen=True)
class Built:
    ptx: str
    counts: Counter[int]  # instructions by opcode

    @property
    def wgmmas(self) -> int:
        return self.counts[HGMMA_S] + self.counts[HGMMA_R]

    @property
    def spills(self) -> int:
        """Instructions that touch local memory."""
        return self.counts[LDL] + self.counts[STL]

    @property
    def serialised(self) -> bool:
        """Does each wgmma wait for the one before? ptxas makes it so, silently, where it cannot follow registers."""
        return self.counts[WARPGROUP] >= self.wgmmas


def built(build: Callable[[], tuple[Any, tuple[Any, ...]]]) -> Built:
    """Compile `build()`, whatever the caches hold."""
    with tempfile.TemporaryDirectory() as folder:  # the compiler leaves a copy there
        artifacts = compile_with_artifacts(build, folder).artifacts
    return Built(artifacts.PTX, opcodes(artifacts.CUBIN))


def opcodes(cubin: bytes) -> Counter[int]:
    """Of every instruction of every .text section."""
    found: Counter[int] = Counter()
    for name, content in sections(cubin):
        if name.startswith(".text"):
            found.update(word & 0xFFF for (word,) in struct.iter_unpack("<Q8x", content))
    return found


def adds_across_ctas(ptx: str) -> bool:
    """Sums whose order is not fixed."""
    return re.search(r"\b(red|atom)\.\w+|cp\.reduce", ptx) is not None
