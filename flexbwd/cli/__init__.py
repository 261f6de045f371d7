"""The `flexbwd` command: doctor, show, check, bench."""

from __future__ import annotations


def main() -> None:
    """Run the command line; a mistake of the user's ends in one line on stderr and exit code 2."""
    from flexbwd.cli.app import app
    from flexbwd.cli.console import fail
    from flexbwd.errors import FlexError

    try:
        app(prog_name="flexbwd")
    except FlexError as error:
        fail(error)
