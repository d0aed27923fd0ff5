"""Reads text files that users name: each is regular, of bounded size and UTF-8, or the error says which of these it is not."""

from __future__ import annotations

import stat
from pathlib import Path

# Room for what each of 1,024 servers holds in each layer, and for the explicit form of 480 groups and 288 servers.
MAX_FILE_BYTES = 64 << 20


class TextFileError(Exception):
    """The text continues "PATH ". `line`: where it is wrong, 0 for the whole file. `hint`: what to give instead."""

    def __init__(self, text: str, hint: str, line: int = 0) -> None:
        super().__init__(text)
        self.text, self.hint, self.line = text, hint, line

    def __str__(self) -> str:
        return f"{self.text}; {self.hint}"


def read_text_file(path: Path, max_bytes: int = MAX_FILE_BYTES) -> str:
    """The text of the file at `path`, without a byte order mark. Raises TextFileError."""
    too_large = f"is larger than {max_bytes >> 20} MiB"
    try:
        status = path.stat()
        if stat.S_ISDIR(status.st_mode):
            raise TextFileError("is a folder", "give the path of a file in it")
        if not stat.S_ISREG(status.st_mode):  # opening a pipe waits for a writer, a device may never end
            raise TextFileError("is a pipe, socket or device", "save its content in a file and give its path")
        if status.st_size > max_bytes:
            raise TextFileError(too_large, "give a smaller file")
        with path.open("rb") as file:
            content = file.read(max_bytes + 1)
    except FileNotFoundError:
        raise TextFileError("does not exist", "give the path of a file") from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise TextFileError(f"cannot be read ({reason})", "give a file that you may read") from None
    if len(content) > max_bytes:  # files of /proc have no size
        raise TextFileError(too_large, "give a smaller file")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise TextFileError("is not UTF-8 text", "save the file as UTF-8", content[: error.start].count(b"\n") + 1) from None
