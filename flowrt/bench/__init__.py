"""Measuring flowrt: each benchmark is one module, and all of them share how a difference is claimed and how it is told.

Here: the room's front, which imports nothing. `pairs.py` is the statistics of alternating pairs, `report.py` the table, the JSON and
the machine's line, `peers.py` what flowrt is measured against; `hop.py` and `start.py` are benchmarks. Not here: the command line
(flowrt/cli/bench.py). No test asserts a time.
"""
