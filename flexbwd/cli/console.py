"""Where the commands print: rich on a terminal, plain text in a pipe or a file."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

PIPE_WIDTH = 140  # characters: a pipe has no width of its own, and rich would break lines at 80


def console(*, stderr: bool = False) -> Console:
    """A console on stdout (results) or stderr (progress, errors)."""
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    return Console(stderr=stderr, highlight=False, width=None if stream.isatty() else PIPE_WIDTH)


def table(title: str, columns: Sequence[str], *, numbers: Sequence[str] = ()) -> Table:
    """An empty table; the columns named in `numbers` are right-aligned."""
    from rich import box
    from rich.table import Table

    made = Table(title=title or None, title_justify="left", box=box.SIMPLE, pad_edge=False)
    for column in columns:
        made.add_column(column, justify="right" if column in numbers else "left", overflow="fold")
    return made


@contextmanager
def working(what: str) -> Iterator[None]:
    """Show that `what` is going on, on a terminal only."""
    err = console(stderr=True)
    if not err.is_terminal:
        yield
        return
    with err.status(what):
        yield


def fail(error: Exception, code: int = 2) -> NoReturn:
    """Print `error` as one line on stderr and exit."""
    print("error: " + " ".join(str(error).split()), file=sys.stderr)
    raise SystemExit(code)
