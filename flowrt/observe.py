"""Logging of workers to stderr, one line per event with the level first, and texts of sizes and durations.

The launcher prefixes each line with the worker's name and keeps the last ones. Counters are in flowrt/actors/control.py (Statistics).
"""

from __future__ import annotations

import logging
import sys
from contextlib import suppress

from flowrt.errors import UserError

FORMAT = "%(levelname)s %(message)s"
LEVELS = ("debug", "info", "warning", "error")
ROOT = "flowrt"


def print_line(text: str) -> None:
    """Write a line to stderr. Never raises: a full disk, or a reader that has left, must not end what only reports."""
    if sys.stderr is not None:
        with suppress(OSError, ValueError):
            print(text, file=sys.stderr, flush=True)


def set_log_level(level: str) -> None:
    """Send lines of at least `level` (one of LEVELS) to stderr as "LEVEL text". Calling it again only changes the level.

    Call it in processes that flowrt starts. It configures flowrt's loggers only, never those of a program that imports flowrt.
    """
    if level not in LEVELS:
        raise UserError(f"log level {level!r} is unknown; one of: {', '.join(LEVELS)}")
    logger = logging.getLogger(ROOT)
    logger.setLevel(level.upper())
    if not any(isinstance(handler, _Stderr) for handler in logger.handlers):
        handler = _Stderr()
        handler.setFormatter(logging.Formatter(FORMAT))
        logger.addHandler(handler)
        logger.propagate = False


class _Stderr(logging.StreamHandler):  # type: ignore[type-arg]
    """Writes to the current sys.stderr: a worker redirects it after the fork."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> object:
        return sys.stderr

    @stream.setter
    def stream(self, value: object) -> None:
        raise AttributeError("always sys.stderr")


def size_text(num_bytes: float) -> str:
    """A size in binary units with at most four digits, such as "1.5 MiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(num_bytes) < 1000:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} TiB"


def duration_text(seconds: float) -> str:
    """A duration for people: "250 us", "12.3 ms", "4.56 s" or "3 min 20 s"."""
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} us"
    if seconds < 1.0:
        return f"{seconds * 1e3:.1f} ms"
    if seconds < 60.0:
        return f"{seconds:.2f} s"
    return f"{int(seconds // 60)} min {int(seconds % 60)} s"
