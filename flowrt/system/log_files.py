"""The files of a request log: numbered segments in a folder that one process holds at a time.

The seams give the folder, so that the simulation replaces it. `flowrt/gateway/log_records.py` says what is in a segment.
"""

from __future__ import annotations

import fcntl
import os
import re
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from flowrt.errors import UserError

_LOCK, _SEGMENT = "lock", re.compile(r"\d{20}\.log")
MAX_SEGMENT_FILE = 1 << 30  # bytes; no segment that flowrt writes is near it


class LogSegment(Protocol):
    """One file, to which data is added at its end."""

    def append(self, data: bytes) -> None:
        """Add all of `data`, which survives this process from now on. Raises OSError, and then nothing of `data` is added."""
        ...

    def sync(self) -> None:
        """Wait until what was added survives a power loss of the host. Raises OSError."""
        ...

    def close(self) -> None: ...


class LogFolder(Protocol):
    """The segments of one request log. All methods but `close` raise OSError. `path`: for errors."""

    path: str

    def names(self) -> list[str]:
        """The names of the segments, in order."""
        ...

    def read(self, name: str) -> bytes: ...

    def create(self, name: str) -> LogSegment:
        """A new, empty segment."""
        ...

    def truncate(self, name: str, num_bytes: int) -> None: ...

    def remove(self, name: str) -> None: ...

    def close(self) -> None:
        """Let other processes have the folder."""
        ...


def open_log_folder(path: Path) -> LogFolder:
    """The folder, which is made if need be. Raises UserError when another process has it, or it cannot be used."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = path.stat()
        if status.st_mode & 0o022 or status.st_uid not in (0, os.getuid()):
            raise UserError(f"the request log {path} cannot be trusted: other users may write to it; give a folder of your own (chmod 700)")
        lock = os.open(path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise UserError(f"the request log {path} cannot be opened ({error.strerror}); give a folder that this user may write to") from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        raise UserError(f"the request log {path} is in use by another launcher; stop that one, or give each a folder of its own") from None
    except OSError as error:
        os.close(lock)
        raise UserError(f"the request log {path} cannot be locked ({error.strerror}); use a file system with locks") from None
    return _RealFolder(path, lock)


class _RealFolder:
    def __init__(self, path: Path, lock: int) -> None:
        self.path, self._folder, self._lock = str(path), path, lock

    def names(self) -> list[str]:
        with os.scandir(self._folder) as entries:
            return sorted(entry.name for entry in entries if _SEGMENT.fullmatch(entry.name))

    def read(self, name: str) -> bytes:
        path = self._folder / name
        if path.stat().st_size > MAX_SEGMENT_FILE:
            raise OSError(0, f"{name} is larger than {MAX_SEGMENT_FILE >> 20} MiB")
        return path.read_bytes()

    def create(self, name: str) -> LogSegment:
        file = os.open(self._folder / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._sync_names()
        return _RealSegment(file)

    def truncate(self, name: str, num_bytes: int) -> None:
        file = os.open(self._folder / name, os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.ftruncate(file, num_bytes)
            os.fsync(file)  # else a power loss could bring the torn frame back, in the middle of the log
        finally:
            os.close(file)

    def remove(self, name: str) -> None:
        os.unlink(self._folder / name)
        self._sync_names()

    def close(self) -> None:
        os.close(self._lock)

    def _sync_names(self) -> None:
        folder = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


class _RealSegment:
    def __init__(self, file: int) -> None:
        self._file = file
        self._num_bytes = 0

    def append(self, data: bytes) -> None:
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[os.write(self._file, rest) :]
        except OSError:
            with suppress(OSError):  # a reader drops what is not whole
                os.ftruncate(self._file, self._num_bytes)
            raise
        self._num_bytes += len(data)

    def sync(self) -> None:
        os.fdatasync(self._file)

    def close(self) -> None:
        os.close(self._file)
