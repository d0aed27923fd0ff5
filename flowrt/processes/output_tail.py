"""Reads the output of OS processes, keeps their last lines, and describes exit statuses in words."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections import deque
from collections.abc import Callable

from flowrt.observe import print_line

OUTPUT_TAIL_LINES = 50
PIPE_BYTES, _READ_BYTES = 1 << 16, 1 << 16  # that a pipe holds, by default; of one read
_MAX_LINE_CHARACTERS = 4096


def exit_text(status: int | None) -> str:
    """The exit status in words: "was killed by SIGKILL" or "exited with status 3". None: it is unknown."""
    if status is None:
        return "has ended with an unknown exit status"
    if status >= 0:
        return f"exited with status {status}"
    try:
        return f"was killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"was killed by signal {-status}"


def write_line(name: str, line: str) -> None:
    """Write a line of a process to stderr as "[name] line": the default output handler."""
    print_line(f"[{name}] {line}")


class OutputTail:
    """Passes the lines that an OS process writes to stderr or stdout to `on_line`, and keeps the last OUTPUT_TAIL_LINES."""

    def __init__(self, name: str, on_line: Callable[[str, str], None]) -> None:
        self.name, self._on_line = name, on_line
        self._loop = asyncio.get_running_loop()
        self._last: deque[str] = deque(maxlen=OUTPUT_TAIL_LINES)
        self._rest = b""
        self._fd, self.write_end = os.pipe()
        os.set_blocking(self._fd, False)
        self._loop.add_reader(self._fd, self._read)

    @property
    def last(self) -> tuple[str, ...]:
        """The last lines, oldest first, including all output written so far."""
        self._read_written()
        return (*self._last, self._rest.decode(errors="replace")) if self._rest else tuple(self._last)

    def given_away(self) -> None:
        """Close the write end: another process has it now."""
        os.close(self.write_end)
        self.write_end = -1

    def close(self) -> None:
        """Read the rest of the output, pass on an unfinished line, and close the pipe. Idempotent."""
        if self._fd < 0:
            return
        self._read_written()
        if self._rest:
            self._take(self._rest)
            self._rest = b""
        self._close_read_end()
        if self.write_end >= 0:
            self.given_away()

    def _read_written(self) -> None:
        """Read what was written so far, which the pipe holds: a process that writes faster than it is read would never let this end."""
        for _ in range(PIPE_BYTES // _READ_BYTES + 1):
            if self._fd < 0 or not self._read():
                return

    def _read(self) -> bool:
        """Read once. Returns False when there is no output, or every write end is closed."""
        try:
            data = os.read(self._fd, _READ_BYTES)
        except BlockingIOError:
            return False
        if not data:
            self._loop.remove_reader(self._fd)  # a pipe at end-of-file stays readable: the loop would spin
            return False
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._take(line)
        if len(self._rest) > _MAX_LINE_CHARACTERS:
            self._take(self._rest)
            self._rest = b""
        return True

    def _take(self, line: bytes) -> None:
        text = line.decode(errors="replace").rstrip("\r")[:_MAX_LINE_CHARACTERS]
        self._last.append(text)
        self._on_line(self.name, text)

    def _close_read_end(self) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed already
            self._loop.remove_reader(self._fd)
        os.close(self._fd)
        self._fd = -1
