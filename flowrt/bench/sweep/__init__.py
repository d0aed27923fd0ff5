"""Sweeps: variants of a graph that are run and compared, as a file says."""
