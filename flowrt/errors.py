"""What a user gets to read when something is wrong: one line, and the exit code that goes with it.

Here: UserError and its kinds. Not here: what a transport may raise (transports/errors.py). A leaf: every room may import it.
"""

from __future__ import annotations

_SHOWN_CHARACTERS, _SHOWN_PATH_CHARACTERS, _MESSAGE_CHARACTERS = 80, 160, 1000


def shortened(text: str, limit: int = _SHOWN_CHARACTERS) -> str:
    """`text` for an error's line: what a user wrote may have any length."""
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


def shown(value: object) -> str:
    """A user's value for an error's line: as Python writes it, on one line and never long."""
    try:
        return shortened(repr(value))
    except Exception:  # an integer of thousands of digits, or an object of the user's own
        return f"a {type(value).__name__} that cannot be shown"


class UserError(Exception):
    """Bad input. The text is one line: what, where, what would be right. Command lines print it and end with `exit_code`."""

    exit_code = 2


class GraphError(UserError):
    """A graph file (or a `--set`) is wrong: "FILE:LINE: path.to.key: what is wrong; what would be right".

    `where` is "FILE:LINE" or "--set path=value", `path` the dotted key, `text` the rest.
    """

    def __init__(self, where: str, path: str, text: str) -> None:
        self.where, self.path, self.text = where, path, text
        if where.startswith("--"):  # an option and its value; a file's name is shown whole
            where = shortened(where, _SHOWN_PATH_CHARACTERS)
        message = ": ".join(part for part in (where, shortened(path, _SHOWN_PATH_CHARACTERS), text) if part)
        message = shortened(message, _MESSAGE_CHARACTERS)
        super().__init__("".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in message))  # one line, always

    def __reduce__(self) -> tuple[type[GraphError], tuple[str, str, str]]:
        return GraphError, (self.where, self.path, self.text)


class WorkerDiedError(Exception):
    """A process of the graph ended by itself. `process` is its name, `output_tail` the last lines it wrote, oldest first."""

    exit_code = 3

    def __init__(self, process: str, reason: str, output_tail: tuple[str, ...] = ()) -> None:
        self.process, self.reason, self.output_tail = process, reason, output_tail
        super().__init__(f"{process} {reason}")
