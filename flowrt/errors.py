"""Errors for the user: each has a text of one line, derives from FlowrtError, can be pickled, and is exported by `flowrt`.

Errors of transports are in transports/errors.py. This module imports nothing from flowrt; every package may import it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from enum import StrEnum
from types import TracebackType

# Exit codes of the commands that run a graph, besides those of the errors below.
SUCCESS, FAILURE, BAD_INPUT, INTERRUPTED, NO_READER = 0, 1, 2, 130, 141
TORCH_REMEDY = "reinstall it: pip install --force-reinstall torch"
_OWN_FOLDER = os.path.join(os.path.dirname(__file__), "")
_SHOWN_CHARACTERS, _SHOWN_PATH_CHARACTERS, _MESSAGE_CHARACTERS = 80, 160, 1000


def shortened(text: str, limit: int = _SHOWN_CHARACTERS) -> str:
    """`text` cut to `limit` characters for an error's line; a user's input may have any length."""
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


def shown(value: object) -> str:
    """The `repr` of a user's value, shortened for an error's line. Never raises."""
    try:
        return shortened(repr(value))
    except Exception:  # an integer of thousands of digits, or an object whose repr fails
        return f"a {type(value).__name__} that cannot be shown"


def as_line(text: str, limit: int = _MESSAGE_CHARACTERS) -> str:
    """`text` on one line of at most `limit` characters: white space becomes single spaces, unprintable characters are escaped."""
    words = " ".join(text[: 2 * limit].split())
    if not words.isprintable():
        words = "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in words)
    return shortened(words, limit)


def error_text(error: BaseException) -> str:
    """Type and text of an exception of foreign code, as a part of a line. Never raises, whatever its `__str__` does."""
    name = type(error).__name__
    try:
        text = str(error)
    except BaseException as second:
        text = f"its text cannot be shown, str() raises {type(second).__name__}"
    return as_line(f"{name}: {text}" if text else name)


def place_of(error: BaseException) -> str:
    """`file.py:12`, where foreign code raised: the last line in the file that flowrt called, behind decorators of installed packages.
    "" if flowrt itself raised."""
    frames = [(each.tb_frame.f_code.co_filename, each.tb_lineno) for each in _frames(error.__traceback__)]
    foreign = [frame for frame in frames if not frame[0].startswith(_OWN_FOLDER)]
    if not foreign:
        return ""
    called, _ = next((frame for frame in foreign if "-packages" not in frame[0]), foreign[0])
    return f"{os.path.basename(called)}:{[line for path, line in foreign if path == called][-1]}"


def _frames(traceback: TracebackType | None) -> Iterator[TracebackType]:
    while traceback is not None:
        yield traceback
        traceback = traceback.tb_next


def leaves(error: BaseException) -> Iterator[BaseException]:
    """The errors within nested exception groups, in order; `error` itself when it is not a group."""
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from leaves(inner)
    else:
        yield error


class FlowrtError(Exception):
    """The base class of all errors that flowrt raises for its users. Its text is one line."""


class UserError(FlowrtError):
    """Bad input: the text says what is wrong, where, and what to do. The command line prints it and exits with `exit_code`."""

    exit_code = 2


class ArgumentError(UserError, TypeError, ValueError):
    """An argument of a call is unknown, of a wrong type, out of bounds, or contradicts another one. Nothing was started or submitted."""


class TokenizerError(UserError, ValueError):
    """A model directory cannot tokenize or render text. The message names the file and what to do. `is_too_long`: the text has more tokens
    than the graph can hold. `is_unavailable`: no text can be tokenized now, whatever it is. `param`: the part of a chat, or the parameter,
    that is wrong; the message begins with it, and `text` is the rest."""

    def __init__(self, text: str, *, is_too_long: bool = False, is_unavailable: bool = False, param: str | None = None) -> None:
        super().__init__(text if param is None else f"{param} {text}")
        self.text, self.is_too_long, self.is_unavailable, self.param = text, is_too_long, is_unavailable, param


class GraphError(UserError):
    """A graph file (or a `--set`) is wrong: "FILE:LINE: path.to.key: what is wrong; what would be right".

    `where` is "FILE:LINE" or "--set path=value", `path` the dotted key, `text` the rest.
    """

    def __init__(self, where: str, path: str, text: str) -> None:
        self.where, self.path, self.text = where, path, text
        if where.startswith("--"):  # an option and its value; a file name is never shortened
            where = shortened(where, _SHOWN_PATH_CHARACTERS)
        message = ": ".join(part for part in (where, shortened(path, _SHOWN_PATH_CHARACTERS), text) if part)
        message = shortened(message, _MESSAGE_CHARACTERS)
        super().__init__("".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in message))  # one line, always

    def __reduce__(self) -> tuple[type[GraphError], tuple[str, str, str]]:
        return GraphError, (self.where, self.path, self.text)


class WorkerDiedError(FlowrtError):
    """A process of the graph died, or could not start. `process` is its name, `reason` continues the sentence, `output_tail` has the last
    lines that it wrote, oldest first."""

    exit_code = 3

    def __init__(self, process: str, reason: str, output_tail: tuple[str, ...] = ()) -> None:
        self.process, self.reason, self.output_tail = process, reason, output_tail
        super().__init__(f"{process} {reason}")

    def __reduce__(self) -> tuple[type[WorkerDiedError], tuple[str, str, tuple[str, ...]]]:
        return WorkerDiedError, (self.process, self.reason, self.output_tail)


class FailureCause(StrEnum):
    """Why a request has no result: an operator failed, or behind a trampoline a server crashed or hung, or none has a replica."""

    ERROR = ""
    CRASHED = "crashed"
    LOST = "lost"


class OperatorError(FlowrtError):
    """An operator raised an error, or returned outputs that its ports or edges do not take: it ends its call only.

    The text is one line: the node, the tag, the edges and the cause. `node` is "" where no single node is the cause.
    """

    exit_code = 1

    def __init__(self, text: str, node: str = "", cause: FailureCause = FailureCause.ERROR) -> None:
        super().__init__(text)
        self.node, self.cause = node, cause

    def __reduce__(self) -> tuple[type[OperatorError], tuple[str, str]]:
        return OperatorError, (str(self), self.node)


class RequestError(FlowrtError):
    """A request failed, or the graph cannot serve it. The text is the reason: that of the completion's `error`."""

    exit_code = 1


class NotRunningError(FlowrtError, RuntimeError):
    """The graph is not open: not yet, or no longer."""


def named_error(group: ExceptionGroup[Exception]) -> Exception:
    """The error to report of those that the tasks of a run raised: the first UserError or WorkerDiedError, else the first error."""
    error: Exception = group.subgroup((UserError, WorkerDiedError)) or group
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    return error


def nearest(word: str, known: Iterable[str]) -> str:
    """A hint for errors: "did you mean 'groups'?" when a known word is near, else "known: a, b, c"."""
    from difflib import get_close_matches  # only errors need it

    names = {name.lower(): name for name in sorted(known)}
    close = get_close_matches(word.lower(), names, n=1, cutoff=0.6)
    return f"did you mean {names[close[0]]!r}?" if close else f"known: {', '.join(names.values()) or 'none'}"


def install_command(extra: str) -> str:
    """How to install what one of flowrt's extras needs. flowrt is not on a package index yet, so the command runs in its clone."""
    return f'pip install -e ".[{extra}]" in the clone of flowrt'
