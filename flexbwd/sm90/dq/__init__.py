"""dQ of a two-pass backward: kernel.py is the table of contents, call.py the host side."""
