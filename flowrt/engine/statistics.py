"""Holds what the engine of one group counts, for the statistics of its worker."""

from __future__ import annotations

from dataclasses import dataclass

from flowrt.histogram import Histogram


@dataclass(frozen=True, slots=True)
class EngineStatistics:
    """Counts since the start, and current numbers (waiting, running, free pages)."""

    num_waiting: int
    num_running: int
    num_free_pages: int
    num_pages: int
    step_rows: Histogram  # rows of each committed step
    num_preemptions: int
    num_prefix_queries: int  # tokens looked up in the prefix cache
    num_prefix_hits: int  # those found
    num_micro_batches: int  # in use
