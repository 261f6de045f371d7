"""Graphs as CuTe DSL code: prepared without the DSL (`prepare.py`), evaluated while a kernel is traced."""
