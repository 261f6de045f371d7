"""`python -m flexbwd.cli` is the `flexbwd` command."""

from flexbwd.cli import main

main()
