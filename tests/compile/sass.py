"""Machine instructions of a compiled kernel, counted in the cubin itself: SM90 instructions are 16 bytes each."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flexbwd.jit.compile import compile_now

_NOP, _BRA = 0x918, 0x947  # padding, and the endless loop behind every kernel


def instructions(build: Callable[[], tuple[Any, tuple[Any, ...]]], folder: Path) -> int:
    """How many instructions the kernel that `build` makes has."""
    compile_now(build, options=f"--enable-tvm-ffi --keep-cubin --dump-dir {folder}")
    (cubin,) = folder.glob("*.cubin")
    return sum(_count(text) for text in _texts(cubin.read_bytes()))


def _texts(elf: bytes) -> list[bytes]:
    """Contents of the sections whose name begins with ".text."."""
    table, entry_size, entries, names_at = (
        struct.unpack_from("<Q", elf, 0x28)[0], *struct.unpack_from("<HHH", elf, 0x3A)
    )  # fmt: skip
    headers = [struct.unpack_from("<IIQQQQ", elf, table + i * entry_size) for i in range(entries)]
    names = headers[names_at][4]
    found = []
    for name, _, _, _, offset, size in headers:
        end = elf.index(b"\0", names + name)
        if elf[names + name : end].startswith(b".text."):
            found.append(elf[offset : offset + size])
    return found


def _count(text: bytes) -> int:
    codes = (struct.unpack_from("<H", text, at)[0] & 0xFFF for at in range(0, len(text), 16))
    return sum(code not in (_NOP, _BRA) for code in codes)
