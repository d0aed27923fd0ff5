"""Makes untrusted text safe for a terminal (`visible`, `one_line`), and defines OutputStream, which never raises."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import re
from collections.abc import Callable
from typing import TextIO, cast

# C0 except tab and newline, DEL, C1, line and paragraph separators, changes of the writing direction, invisible marks, surrogates.
_UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069\ufeff\ud800-\udfff]")
TAB = "    "
NO_READER_ERRORS = (BrokenPipeError, ConnectionResetError)


def _escape(match: re.Match[str]) -> str:
    code = ord(match[0])
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"


def visible(text: str) -> str:
    """`text` with control characters escaped (\\x1b, \\u202e) and tabs as spaces. Newlines stay: the caller places them."""
    return _UNSAFE.sub(_escape, text).replace("\t", TAB)


def one_line(text: str) -> str:
    """Works as `visible`, on a single line: runs of white space become one space."""
    return visible(" ".join(text.split()))


def moves_cursor(stream: OutputStream) -> bool:
    """Whether the stream is a terminal that can rewrite what it shows."""
    return stream.isatty() and os.environ.get("TERM") not in ("dumb", "unknown")


class OutputStream(io.TextIOBase):
    """A text stream in front of stdout or stderr that never raises. When it cannot be written any more (`| head`, a full disk, closed
    from the start), it stores the error in `error`, discards further output, and calls `on_broken` once.

    Characters that the stream's encoding lacks are escaped.
    """

    def __init__(self, stream: TextIO | None, on_broken: Callable[[], object] | None = None) -> None:
        self.on_broken = on_broken
        self.error: Exception | None = None
        if stream is None:  # Python sets None when the descriptor was closed at its start
            self.error = OSError(errno.EBADF, os.strerror(errno.EBADF))
            stream = io.StringIO()
        self._stream = stream
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")

    def as_file(self) -> TextIO:
        """Itself, for functions that take a file."""
        return cast(TextIO, self)

    @property
    def is_broken(self) -> bool:
        return self.error is not None

    @property
    def has_lost_output(self) -> bool:
        """Whether output was lost for any reason other than a reader that closed the pipe."""
        return self.error is not None and not isinstance(self.error, NO_READER_ERRORS)

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._stream.encoding or "utf-8"

    def isatty(self) -> bool:
        return not self.is_broken and self._stream.isatty()

    def fileno(self) -> int:
        return self._stream.fileno()

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        self._call(lambda stream: stream.write(text))
        return len(text)

    def flush(self) -> None:
        self._call(lambda stream: stream.flush())

    def check(self) -> None:
        """Raises the error with which it broke, for a command whose output it is; `main` says what to do."""
        self.flush()
        if self.error is not None:
            raise self.error

    def write_now(self, text: str) -> None:
        self.write(text)
        self.flush()

    def _call(self, operation: Callable[[TextIO], object]) -> None:
        if not self.is_broken:
            try:
                operation(self._stream)
            except (OSError, ValueError) as error:  # ValueError: closed
                self._break(error)

    def _break(self, error: Exception) -> None:
        self.error = error
        with contextlib.suppress(OSError, ValueError):  # discards the buffer without a message at the interpreter's end
            number = self._stream.fileno()
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, number)
            os.close(null)
        if self.on_broken is not None:
            self.on_broken()
