"""Traces of runs: records of work and messages, their summary, and the Perfetto file."""
