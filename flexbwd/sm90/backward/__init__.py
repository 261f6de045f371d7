"""Backward attention: kernel.py is the table of contents, call.py the host side."""
