"""Real input: the source files of Python's standard library, as bytes, packed as documents into sequences.

A document is a run of functions, methods or classes of one file, begun by the byte 0, which occurs in no source file.
Packing is greedy: documents follow each other in a random order and the stream is cut into equal sequences, so the
first and the last document of a sequence may be cut.
"""

from __future__ import annotations

import random
import re
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

START = b"\0"
SMALLEST, LARGEST = 256, 2048  # bytes: shorter runs of definitions are joined, longer ones cut at the end of a line
EXCLUDED = {"test", "tests", "idlelib", "lib2to3", "encodings", "site-packages", "dist-packages", "__pycache__"}
DEFINITION = re.compile(rb"(?:    )?(?:@|def |class |async def )")


@dataclass(frozen=True)
class Batch:
    """Packed sequences.

    Attributes:
        tokens, targets: int64 `[B, S]`; the target of a byte is the byte after it.
        documents: int32 `[B, S]`, which document of its sequence a byte belongs to.
    """

    tokens: Tensor
    targets: Tensor
    documents: Tensor

    @property
    def document_count(self) -> int:
        return sum(int(row.max()) - int(row.min()) + 1 for row in self.documents)


def source_files() -> list[Path]:
    """The standard library's own files, in a fixed order."""
    root = Path(sysconfig.get_paths()["stdlib"])
    return sorted(p for p in root.rglob("*.py") if not EXCLUDED & set(p.relative_to(root).parts))


def split(source: bytes) -> list[bytes]:
    """Cut a file before definitions, into documents of SMALLEST bytes or more (the last may be shorter)."""
    documents, current = [], b""
    for line in source.splitlines(keepends=True):
        if len(current) >= LARGEST or (len(current) >= SMALLEST and DEFINITION.match(line)):
            documents.append(current)
            current = b""
        current += line
    return [*documents, current] if current else documents


def load_documents(seed: int = 0) -> list[bytes]:
    """All documents of the standard library, shuffled."""
    documents = [part for path in source_files() for part in split(path.read_bytes()) if START not in part]
    random.Random(seed).shuffle(documents)
    return documents


def batches(documents: list[bytes], length: int, batch: int = 1) -> Iterator[Batch]:
    """Packed batches of `batch` sequences of `length` bytes, one pass over the documents after the other, for ever."""
    stream = torch.frombuffer(bytearray(b"".join(START + d for d in documents)), dtype=torch.uint8)
    size = batch * length + 1
    if stream.numel() < size:
        raise ValueError(f"{len(documents)} documents hold {stream.numel()} bytes, one batch needs {size}")
    while True:
        for begin in range(0, stream.numel() - size + 1, size - 1):
            window = stream[begin : begin + size].long()
            tokens, targets = window[:-1].view(batch, length), window[1:].view(batch, length)
            yield Batch(tokens, targets, (tokens == 0).cumsum(1).int())
