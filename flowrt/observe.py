"""What a worker says for people: log lines to stderr, one per event, level first.

Here: `get_logger`, `set_log_level`, and texts of sizes and durations. Not here: who reads the lines (the launcher prefixes them with the
worker's name and keeps the last ones), counters (flowrt/actors/control.py Statistics), traces. A leaf: every room may import it.
"""

from __future__ import annotations

import logging
import sys

from flowrt.errors import UserError

FORMAT = "%(levelname)s %(message)s"
LEVELS = ("debug", "info", "warning", "error")
ROOT = "flowrt"


def get_logger(name: str) -> logging.Logger:
    """The logger of one worker or room, below "flowrt". It is silent under its level until `set_log_level` is called."""
    return logging.getLogger(name if name == ROOT or name.startswith(f"{ROOT}.") else f"{ROOT}.{name}")


def set_log_level(level: str) -> None:
    """Send lines of at least `level` (one of LEVELS) to stderr as "LEVEL text". Calling it again only changes the level.

    For processes of flowrt's own: it configures flowrt's loggers only, never those of a program that imports flowrt.
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
    """Writes to what sys.stderr is at the moment of writing: a worker's is redirected after the fork."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> object:
        return sys.stderr

    @stream.setter
    def stream(self, value: object) -> None:
        raise AttributeError("always sys.stderr")


def size_text(num_bytes: float) -> str:
    """ "1.5 MiB": at most four digits, a binary unit."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(num_bytes) < 1000:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} TiB"


def duration_text(seconds: float) -> str:
    """ "250 us", "12.3 ms", "4.56 s", "3 min 20 s"."""
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} us"
    if seconds < 1.0:
        return f"{seconds * 1e3:.1f} ms"
    if seconds < 60.0:
        return f"{seconds:.2f} s"
    return f"{int(seconds // 60)} min {int(seconds % 60)} s"
