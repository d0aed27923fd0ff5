"""Handles the signals that end a process: those of a command, in its event loop, and that of the death of its parent."""

from __future__ import annotations

import asyncio
import ctypes
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

ENDING = signal.SIGINT, signal.SIGTERM, signal.SIGHUP  # the signals that end a command
_PR_SET_PDEATHSIG = 1
_kept: list[int] = []  # signals that came within `kept_signals`
_former: dict[signal.Signals, Any] = {}  # the handlers of before it


@contextmanager
def kept_signals() -> Iterator[list[int]]:
    """Keeps the signals that end a command until `ending_signals` takes them, for code between two owners of such signals: an import may
    swallow a KeyboardInterrupt, and what a fork has begun is left behind. The caller may take them out of the list; those that are left at
    the end of the block raise KeyboardInterrupt, unless another error ends it. Ignored ones stay ignored. May be nested."""
    handlers = {number: signal.getsignal(number) for number in ENDING}
    own = {number: handler for number, handler in handlers.items() if handler not in (_keep, signal.SIG_IGN, None)}
    _former.update(own)
    for number in own:
        signal.signal(number, _keep)
    try:
        yield _kept
    finally:
        for number, handler in own.items():
            if signal.getsignal(number) is _keep:
                signal.signal(number, handler)
            del _former[number]
        is_left = bool(own and _kept)
        if own:
            _kept.clear()
    if is_left:
        raise KeyboardInterrupt


@contextmanager
def ending_signals(on_signal: Callable[[int], None]) -> Iterator[None]:
    """Calls `on_signal(number)` in the running loop for SIGINT and SIGTERM, and for SIGHUP unless the command runs under nohup. First for
    those that were kept."""
    loop = asyncio.get_running_loop()
    numbers = [number for number in ENDING if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: _former.get(number, signal.getsignal(number)) for number in numbers}
    for number in numbers:
        loop.add_signal_handler(number, on_signal, number)
    for kept in _kept:
        loop.call_soon(on_signal, kept)
    _kept.clear()
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)
            if (former := before[number]) is not None:  # None: not a handler of Python
                signal.signal(number, former)


def _keep(number: int, frame: FrameType | None) -> None:
    _kept.append(number)


def end_with_parent(number: int) -> None:
    """Get this signal when the parent process ends (Linux; elsewhere never). The caller checks whether it has ended already."""
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
