"""What a compiled kernel needs of the machine, read from its cubin (an ELF file) without CUDA tools."""

from __future__ import annotations

import re
import struct
from typing import Any, NamedTuple

_FRAME_SIZE, _REGISTERS = 0x11, 0x2F  # attributes of .nv.info


class Resources(NamedTuple):
    registers: int  # per thread at entry
    stack_bytes: int  # local memory: spilled registers, or arrays with run-time indices


def compile_with_artifacts(build: Any, folder: Any) -> Any:
    """The compiled kernel with its PTX and CUBIN kept in `artifacts`."""
    from flexbwd.jit.compile import compile_now

    return compile_now(build, options=f"--enable-tvm-ffi --keep-ptx --keep-cubin --dump-dir {folder}")


def resources(cubin: bytes) -> Resources:
    """Of the only kernel in `cubin`."""
    found = {_FRAME_SIZE: 0, _REGISTERS: 0}
    for name, content in sections(cubin):
        if name.startswith(".nv.info"):
            for attribute, value in _attributes(content):
                if attribute in found:
                    found[attribute] = max(found[attribute], value)
    return Resources(found[_REGISTERS], found[_FRAME_SIZE])


def sections(elf: bytes) -> list[tuple[str, bytes]]:
    """(name, content) of every section."""
    offset, size, count, names = *struct.unpack_from("<Q", elf, 40), *struct.unpack_from("<HHH", elf, 58)
    headers = [struct.unpack_from("<IIQQQQ", elf, offset + i * size) for i in range(count)]
    table = headers[names][4]
    return [(elf[table + h[0] : elf.index(b"\0", table + h[0])].decode(), elf[h[4] : h[4] + h[5]]) for h in headers]


def _attributes(content: bytes) -> list[tuple[int, int]]:
    """(attribute, last 32-bit word of its value) of all entries with a sized value."""
    found, at = [], 0
    while at + 4 <= len(content):
        kind, attribute, size = struct.unpack_from("<BBH", content, at)
        at += 4
        if kind == 4:
            if size >= 8:
                found.append((attribute, struct.unpack_from("<I", content, at + 4)[0]))
            at += size
    return found


def blocks_with(ptx: str, instruction: str, least: int) -> list[str]:
    """The basic blocks of a kernel's PTX that hold `instruction` at least `least` times."""
    return [block for block in re.split(r"\n\$L__BB\d+_\d+:", ptx) if block.count(instruction) >= least]
