"""Handles the signals that end a command, in its event loop."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def ending_signals(on_signal: Callable[[int], None]) -> Iterator[None]:
    """Calls `on_signal(number)` in the running loop for SIGINT and SIGTERM, and for SIGHUP unless the command runs under nohup."""
    loop = asyncio.get_running_loop()
    numbers = [signal.SIGINT, signal.SIGTERM, *([signal.SIGHUP] if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN else [])]
    for number in numbers:
        loop.add_signal_handler(number, on_signal, number)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)
