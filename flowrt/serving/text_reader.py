"""Reads a text that comes in pieces: up to markers, by brackets, and what comes next, without a decision that a later piece could change.

Pure. The methods are generators that yield where they need more text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator

MAX_HELD_CHARACTERS = 1 << 20  # behind the mark
_JSON_STRUCTURE, _PYTHON_STRUCTURE = re.compile(r'["{}\[\]]'), re.compile(r"""["'()\[\]{}]""")
_QUOTED = {quote: re.compile(rf"[{quote}\\]") for quote in ('"', "'")}  # by the quote that text is in

Steps = Generator[None, None, None]
Reads = Generator[None, None, str]
Finds = Generator[None, None, str | None]


class NotReadError(Exception):
    """The text is not as expected."""


class CutTextError(NotReadError):
    """The text is as expected, and has ended before all of it was there."""


class TextReader:
    """`at`: where it reads; what comes before is read. `mark`: to where the caller may go back. `has_ended`: no more text will come."""

    def __init__(self) -> None:
        self._buffer = ""
        self.at, self.has_ended = 0, False
        self.mark: int | None = None

    def push(self, text: str) -> None:
        kept_from = self.at if self.mark is None else self.mark
        self._buffer = self._buffer[kept_from:] + text
        self.at -= kept_from
        self.mark = None if self.mark is None else 0

    def take(self, position: int) -> str:
        """The text from `at` to `position`, which then is read."""
        text, self.at = self._buffer[self.at : position], position
        return text

    def begins_with(self, texts: tuple[str, ...]) -> str:
        """The one that comes next; ""; none, or not all of it is there."""
        return next((each for each in texts if self._buffer.startswith(each, self.at)), "")

    # Values.

    def field(self, ends: tuple[str, ...], allowed: re.Pattern[str]) -> Reads:
        """The text up to one of the ends. `allowed`: what it may be, and all of its beginnings."""
        text = ""

        def take(piece: str) -> None:
            nonlocal text
            text += piece
            if allowed.fullmatch(text) is None:
                raise NotReadError

        if (yield from self.scan(ends, take, takes_cut_end=False)) is None:
            raise CutTextError
        return text

    def json_value(self) -> Reads:
        """The text of a JSON value; brackets and quotes alone are looked at."""
        held: list[str] = []
        if (yield from self.peek(("{", "[", '"'))) is not None:
            yield from self.copy_json(held.append)
        elif (yield from self.scan((",", "}", "]"), held.append)) is None:
            raise CutTextError
        return "".join(held)

    def python_value(self) -> Reads:
        """The text in brackets that comes next, in Python's notation."""
        held: list[str] = []
        yield from self._copy_balanced(held.append, _PYTHON_STRUCTURE, "([{")
        return "".join(held)

    def copy_json(self, take: Callable[[str], None]) -> Steps:
        """Takes an object, a list or a string as it comes."""
        yield from self._copy_balanced(take, _JSON_STRUCTURE, "[{")

    def _copy_balanced(self, take: Callable[[str], None], structure: re.Pattern[str], brackets: str) -> Steps:
        depth, quote = 0, ""
        while True:
            position, is_whole = self.at, False
            while not is_whole and position < len(self._buffer):
                found = (_QUOTED[quote] if quote else structure).search(self._buffer, position)
                if found is None:
                    position = len(self._buffer)
                    break
                mark = found[0]
                if mark == "\\":
                    if found.end() == len(self._buffer) and not self.has_ended:  # what it escapes has yet to come
                        position = found.start()
                        break
                    position = found.end() + 1
                    continue
                position = found.end()
                if mark in "\"'":
                    quote = "" if quote else mark
                else:
                    depth += 1 if mark in brackets else -1
                is_whole = depth <= 0 and not quote
            take(self.take(position))
            if is_whole:
                return
            if self.has_ended:
                raise CutTextError
            if self.mark is not None and self.at - self.mark > MAX_HELD_CHARACTERS:
                raise NotReadError
            yield

    # Texts.

    def scan(self, ends: tuple[str, ...], take: Callable[[str], None], *, takes_cut_end: bool = True) -> Finds:
        """Takes the text up to one of the ends, which is left to be read; None: there is no more. takes_cut_end: also the part of an end
        that the text ends with."""
        while True:
            found = min(((at, -len(end), end) for end in ends if (at := self._buffer.find(end, self.at)) >= 0), default=None)
            tail = self._buffer[self.at :]
            num_open = 0 if self.has_ended and takes_cut_end else max((_overlap(tail, end) for end in ends), default=0)
            limit = len(self._buffer) - num_open
            is_found = found is not None and found[0] < limit
            position = found[0] if found is not None and is_found else limit
            if text := self.take(position):
                take(text)
            if found is not None and is_found:
                return found[2]
            if self.has_ended:
                self.at = len(self._buffer)
                return None
            yield

    def peek(self, texts: tuple[str, ...]) -> Finds:
        """The one that comes next."""
        while True:
            rest = self._buffer[self.at :]
            if (found := next((each for each in texts if rest.startswith(each)), None)) is not None:
                return found
            if self.has_ended or not any(each.startswith(rest) for each in texts):
                return None
            yield

    def expect(self, text: str) -> Steps:
        """Reads this text."""
        yield from self.skip_space()
        if (yield from self.peek((text,))) is None:
            raise self.fault((text,))
        self.at += len(text)

    def fault(self, expected: tuple[str, ...]) -> NotReadError:
        """Why none of these texts comes next."""
        rest = self._buffer[self.at :]
        return CutTextError() if self.has_ended and any(each.startswith(rest) for each in expected) else NotReadError()

    def is_cut_in(self, texts: tuple[str, ...]) -> bool:
        """Whether the text has ended in the middle of one of them."""
        return self.at < len(self._buffer) and isinstance(self.fault(texts), CutTextError)

    def drop_rest(self) -> None:
        """What has come is read."""
        self.at, self.mark = len(self._buffer), None

    def find_text(self) -> Generator[None, None, int]:
        """Where the first text that is not white space begins."""
        while True:
            position = len(self._buffer) - len(self._buffer[self.at :].lstrip())
            if position < len(self._buffer) or self.has_ended:
                return position
            yield

    def skip_space(self) -> Steps:
        self.at = yield from self.find_text()


def _overlap(text: str, stop: str) -> int:
    """Length of the longest suffix of `text` that is a proper prefix of `stop`."""
    for length in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
