"""Writes the file of a --json option ("-" is standard output), and checks before a run that an output can be written after it."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from typing import Any, TextIO

import msgspec

from flowrt.errors import UserError, shortened

STDOUT = "-"


class LostOutputError(UserError):
    """Results were computed and cannot be written."""

    exit_code = 1


def check_writable(name: str, option: str = "--json") -> None:
    """Raises UserError now rather than after the run, when the file could not be written."""
    if name == STDOUT:
        return
    shown = shortened(name)
    try:
        path = Path(name)
        if path.is_dir():
            raise UserError(f"{option} {shown}: is a folder; give the path of a file")
        folder = path.resolve().parent
        if not folder.is_dir():
            raise UserError(f"{option} {shown}: there is no folder {shortened(str(folder))}; make it, or give another path")
        if not path.exists() or path.is_file():
            part = _part_of(path)
            part.touch()  # permissions alone do not tell: a name may be too long, a folder may take no files
            part.unlink()
        elif not os.access(path, os.W_OK):  # a pipe or a device, which opening might block
            raise UserError(f"{option} {shown}: may not be written to; give another path")
    except (OSError, ValueError, RuntimeError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise UserError(f"{option} {shown}: cannot be written ({reason}); give another path") from None


def write_file(name: str, text: str, stdout: TextIO | None = None) -> None:
    """Write `text` to the file, or to `stdout`. A reader sees the old file or the whole new one. Raises LostOutputError."""
    if name == STDOUT:
        stdout = stdout or sys.stdout
        stdout.write(text)
        stdout.flush()
    else:
        write_bytes(name, text.encode())


def write_bytes(name: str, content: bytes, option: str = "--json") -> None:
    """Works as `write_file` for the file of `option`."""
    try:
        path = Path(name).resolve()
        if path.exists() and not path.is_file():  # a pipe or a device: there is nothing to replace
            path.write_bytes(content)
            return
        part = _part_of(path)
        try:
            part.write_bytes(content)
            os.replace(part, path)
        finally:
            with contextlib.suppress(OSError):
                part.unlink()
    except OSError as error:
        raise LostOutputError(f"{option} {shortened(name)}: cannot be written ({error.strerror}); give another path") from None


def json_text(value: Any) -> str:
    """Indented JSON. Numbers that are not finite become null."""
    return msgspec.json.format(msgspec.json.encode(value)).decode() + "\n"


def _part_of(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}.part")
