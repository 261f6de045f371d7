"""Compiling and launching CuTe kernels: once per configuration, kept in memory and on disk."""
