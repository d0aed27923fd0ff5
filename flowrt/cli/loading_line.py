"""Shows how much of the weights is loaded: a line that changes in place on a terminal, else a new line now and then."""

from __future__ import annotations

from collections.abc import Callable

from flowrt.cli.text import OutputStream, moves_cursor
from flowrt.launcher.events import WeightsLoading
from flowrt.launcher.load_record import LINE_SECONDS, loading_text

_CLEAR = "\r\x1b[K"


class LoadingLine:
    """`print_line` prints a line. `terminal`: shows the line in place if it can."""

    def __init__(self, print_line: Callable[[str], None], terminal: OutputStream | None = None) -> None:
        self._print_line, self._terminal = print_line, terminal if terminal is not None and moves_cursor(terminal) else None
        self._is_shown, self._due = False, 0.0

    def show(self, loading: WeightsLoading) -> None:
        if self._terminal is not None:
            self._terminal.write_now(f"{_CLEAR}flowrt: {loading_text(loading)}")
            self._is_shown = True
        elif loading.seconds >= self._due and loading.num_bytes < loading.total_bytes:
            self._due = loading.seconds + LINE_SECONDS
            self._print_line(loading_text(loading))

    def clear(self) -> None:
        """Make room for another line."""
        if self._terminal is not None and self._is_shown:
            self._terminal.write_now(_CLEAR)
        self._is_shown = False
