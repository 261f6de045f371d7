"""`python -m flexbwd` is the `flexbwd` command."""

from flexbwd.cli import main

main()
