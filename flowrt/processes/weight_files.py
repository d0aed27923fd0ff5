"""Owns the memory files (memfd) in which worker processes keep their weights, so that these outlive a process that dies.

A file is made empty. The first process that gets it fills and seals it (operators/weight_memory.py), later ones map it. It has no name: its
memory is free once this process has closed it and no process maps it.
"""

from __future__ import annotations

import os
from collections.abc import Collection

from flowrt.processes.descriptors import is_too_few


class WeightFiles:
    """The files of one run, by weight set (graph/placement.py)."""

    def __init__(self) -> None:
        self._fds: dict[str, int] = {}

    def of(self, weights: str) -> int:
        """The descriptor of the set's file; -1 without a set, and where the system has no such files. Raises OSError when descriptors run
        out."""
        if weights and weights not in self._fds and hasattr(os, "memfd_create"):
            try:
                self._fds[weights] = os.memfd_create("flowrt-weights", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            except OSError as error:
                if is_too_few(error):
                    raise
        return self._fds.get(weights, -1)

    def keep(self, weights: Collection[str]) -> None:
        """Close the files of all other sets."""
        for each in [each for each in self._fds if each not in weights]:
            os.close(self._fds.pop(each))

    def close(self) -> None:
        """Idempotent."""
        while self._fds:
            os.close(self._fds.popitem()[1])
