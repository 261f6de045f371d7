"""dK and dV at wide head dims, for a two-pass backward: kernel.py is the table of contents."""
