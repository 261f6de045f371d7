"""A process that compiles kernels into the disk cache: one JSON line in, one out.

    python -m flexbwd.jit.worker
    > {"build": "flexbwd.sm90.delta:build_delta", "config": {...}}          config: codec.to_wire
    < {"ok": true, "how": "compiled", "seconds": 1.2}                       or {"ok": false, "error": "..."}

It is started with a command line, not forked or spawned by multiprocessing: a fork would take along a CUDA context and
locks held by other threads, and multiprocessing would run the user's main module again. It ends when its input does.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any


def main() -> None:
    """Serve until end of input. Whatever else is printed here goes to stderr: stdout carries the answers."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    for line in sys.stdin:
        answers.write(json.dumps(_answer(json.loads(line))) + "\n")


def _answer(request: dict[str, Any]) -> dict[str, Any]:
    from flexbwd.jit import codec
    from flexbwd.jit.compile import events, kernel_of

    try:
        kernel_of(codec.from_wire(request["config"]), request["build"]).ready()
    except Exception as error:
        return {"ok": False, "error": f"{type(error).__name__}: {error}"}
    done = events[-1]
    return {"ok": True, "how": done.how, "seconds": done.seconds}


if __name__ == "__main__":
    main()
