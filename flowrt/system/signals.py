"""Handles the signals that end a process: those of a command, in its event loop, and that of the death of its parent."""

from __future__ import annotations

import asyncio
import ctypes
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_PR_SET_PDEATHSIG = 1


@contextmanager
def ending_signals(on_signal: Callable[[int], None]) -> Iterator[None]:
    """Calls `on_signal(number)` in the running loop for SIGINT and SIGTERM, and for SIGHUP unless the command runs under nohup."""
    loop = asyncio.get_running_loop()
    numbers = [signal.SIGINT, signal.SIGTERM, *([signal.SIGHUP] if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN else [])]
    before = {number: signal.getsignal(number) for number in numbers}
    for number in numbers:
        loop.add_signal_handler(number, on_signal, number)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)
            if (former := before[number]) is not None:  # None: not a handler of Python
                signal.signal(number, former)


def end_with_parent(number: int) -> None:
    """Get this signal when the parent process ends (Linux; elsewhere never). The caller checks whether it has ended already."""
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
