"""`flexbwd bench` on a CUDA machine: our kernels and the installed peers, side by side in one process.

workloads   what is computed: shapes, masks, score mods, and how many score elements are live
operands    seeded inputs and the torch form of each workload's mods
oracle      fp32 results of a few heads, so that no wrong kernel is timed
peers/      how each implementation is called
probe       first calls, in processes of their own: compile time, cold, and crashes that must not end the run
timing      implementations take turns; medians of CUDA events and of host time
run         the order of all that
report      rows, ratios, tables, files
"""
