"""Waits for processes to end. Not a test itself."""

from __future__ import annotations

import time
from collections.abc import Iterable

import psutil

SECONDS = 20.0  # a killed process needs a processor to end


def left_processes(pids: Iterable[int]) -> list[int]:
    """Those of the processes that do not end. One that has ended and that its parent has not read yet is none."""
    deadline = time.monotonic() + SECONDS
    left = list(pids)
    while (left := [pid for pid in left if _is_running(pid)]) and time.monotonic() < deadline:
        time.sleep(0.01)
    return left


def _is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
