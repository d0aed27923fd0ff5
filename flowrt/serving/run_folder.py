"""The folders of graphs that are up: each has a graph's socket, its log and its description, and only this user may read it.

The process that serves a graph holds a lock on its folder (flock) for as long as it runs. So a folder without a lock is what a killed
process left behind, and no process id has to be trusted. The lock of the folder above is held for moments only: while one of its folders
is looked at, claimed or removed.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from flowrt.errors import UserError, shown
from flowrt.processes.leftover import end_left
from flowrt.serving.listener import remove_stale

VARIABLE = "FLOWRT_RUNTIME_DIR"
MAX_LOG_BYTES = 16 << 20  # then a new file is begun, and the one before it is kept
MAX_SOCKET_PATH = 107  # of a unix socket, on Linux
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,31}")
_SOCKET, _LOG, _OLD_LOG, _DESCRIPTION, _STOPPING = "socket", "log", "log.1", "graph.json", "stopping"


class Description(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a graph without asking it. `started`: Unix time. `url`: where it serves HTTP. `is_ready`: it serves, or has done
    so. `has_log`: it writes its log to the folder. `options`: those of the command, without the API key, for `flowrt up --resume`;
    `has_api_key`: there was one. `run_id`: marks its processes. `sampling_defaults`: of requests that give no value of their own."""

    name: str
    pid: int
    graph: str
    model: str
    url: str
    started: float
    drain_seconds: float
    max_requests: int
    is_ready: bool = False
    has_log: bool = False
    options: dict[str, Any] = {}
    has_api_key: bool = False
    run_id: str = ""
    sampling_defaults: dict[str, Any] = {}


@dataclass(frozen=True)
class FoundGraph:
    """A folder. `description` None: its process is about to write one, or died before. `is_alive`: its process holds the lock."""

    name: str
    folder: Path
    description: Description | None
    is_alive: bool

    @property
    def socket(self) -> Path:
        return self.folder / _SOCKET

    @property
    def log(self) -> Path:
        return self.folder / _LOG

    @property
    def old_log(self) -> Path:
        return self.folder / _OLD_LOG


class RunFolder:
    """The folder of this process's graph, claimed by `claim`. `remove` gives it up. `is_kept`: what is in it stays then, so that the graph
    can be resumed."""

    def __init__(self, name: str, path: Path, lock: int, is_kept: bool) -> None:
        self.name, self.path, self._lock, self.is_kept = name, path, lock, is_kept

    @property
    def socket(self) -> Path:
        return self.path / _SOCKET

    def describe(self, description: Description) -> None:
        temporary = self.path / f"{_DESCRIPTION}.new"
        temporary.write_bytes(msgspec.json.encode(description))
        temporary.replace(self.path / _DESCRIPTION)

    def open_log(self) -> int:
        """A descriptor that appends to the log, and reads it."""
        return os.open(self.path / _LOG, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)

    def begin_log(self, *descriptors: int) -> None:
        """Make these descriptors append to a new log. The one before it is kept, and none before that."""
        with suppress(OSError):  # a full disk: the log goes on as it is
            (self.path / _LOG).replace(self.path / _OLD_LOG)
            new = self.open_log()
            for descriptor in descriptors:
                os.dup2(new, descriptor)
            os.close(new)

    def mark_stopping(self) -> None:
        """`flowrt down` sends no second signal, which would end the requests in progress."""
        with suppress(OSError):
            (self.path / _STOPPING).touch()

    def leave(self) -> None:
        """Give the lock up here: another process has it. No-op after `remove`."""
        lock, self._lock = self._lock, -1
        if lock >= 0:
            os.close(lock)

    def remove(self) -> None:
        with _locked(self.path.parent):
            if (
                not self.is_kept and self.path.exists() and self.path.stat().st_ino == os.fstat(self._lock).st_ino
            ):  # else it is another process's by now
                shutil.rmtree(self.path, ignore_errors=True)
            self.leave()


def claim(name: str, resumes: bool = False) -> RunFolder:
    """Claim the folder of a name for this process, and empty it; with `resumes`, but for the description. Raises UserError when a living
    process has it."""
    if not _NAME.fullmatch(name):
        raise UserError(f"{shown(name)} cannot name a graph; give --name with 1 to 32 of A-Z a-z 0-9 _ . -, first a letter or digit")
    above = runtime_directory()
    path = above / name
    if len(os.fsencode(path / _SOCKET)) > MAX_SOCKET_PATH:
        raise UserError(f"{path} is too long for the path of a socket; set {VARIABLE} to a shorter one")
    _make_private(above)
    with _locked(above):
        _make_private(path)
        lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            described = _described(path)
            pid = f" (pid {described.pid})" if described is not None else ""
            raise UserError(f"{name} is up already{pid}; flowrt down {name} stops it, and --name gives this one another name") from None
        if (former := _described(path)) is not None:
            end_left(former.run_id)  # a front end has the port until it ends
        for left in path.iterdir():
            if not resumes or left.name != _DESCRIPTION:
                left.unlink()
    return RunFolder(name, path, lock, is_kept=(path / _DESCRIPTION).exists())


def found_graphs() -> list[FoundGraph]:
    """The graphs of this user, by name. Raises UserError for a directory that is not this user's own."""
    above = runtime_directory()
    if not above.exists():
        return []
    _check_private(above)
    with _locked(above):
        return [_found(path) for path in sorted(above.iterdir()) if path.is_dir() and not path.is_symlink()]


def find_graph(name: str | None) -> FoundGraph:
    """The graph of this name; without one, the only graph that runs, or the only one. Raises UserError."""
    found = found_graphs()
    if name is None:
        found = [each for each in found if each.is_alive] or found
    names = ", ".join(each.name for each in found)
    if name is None and len(found) > 1:
        raise UserError(f"several graphs are up: {names}; name one of them")
    for each in found:
        if name in (None, each.name):
            return each
    known = f"; there is {names}" if found else "; flowrt up GRAPH starts one"
    raise UserError(f"there is no graph {name}{known}" if name is not None else "no graph is up; flowrt up GRAPH starts one")


def begin_stop(found: FoundGraph) -> bool:
    """True for the first caller while the graph is alive: only that one may signal it, since a second signal ends the requests in
    progress."""
    marker = found.folder / _STOPPING
    with _locked(found.folder.parent):
        if not found.folder.exists() or not _found(found.folder).is_alive or marker.exists():
            return False
        with suppress(OSError):  # a full disk
            marker.touch()
        return True


def remove_dead(found: FoundGraph) -> bool:
    """Remove what a dead process left. False when a living one has the folder now."""
    if (described := found.description) is not None:
        end_left(described.run_id)
        if path := described.options.get("uds"):
            with suppress(OSError):
                remove_stale(Path(path))
    with _locked(found.folder.parent):
        if not found.folder.exists():
            return True
        if _found(found.folder).is_alive:
            return False
        shutil.rmtree(found.folder, ignore_errors=True)
        return True


def runtime_directory() -> Path:
    """Not below XDG_RUNTIME_DIR, which is removed when the user logs out, while a graph stays up."""
    given = os.environ.get(VARIABLE)
    return Path(given).absolute() if given else Path(f"/tmp/flowrt-{os.getuid()}")


def _make_private(path: Path) -> None:
    try:
        path.mkdir(mode=0o700, parents=False)
    except FileExistsError:
        _check_private(path)
    except OSError as error:
        raise UserError(f"{path} cannot be made ({error.strerror}); set {VARIABLE} to a folder that can be written") from None


def _check_private(path: Path) -> None:
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise UserError(f"{path} must be a folder that only this user may use (mode 700); set {VARIABLE} to a folder of your own")


@contextmanager
def _locked(above: Path) -> Iterator[None]:
    descriptor = os.open(above, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _found(path: Path) -> FoundGraph:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        is_alive = False
    except BlockingIOError:
        is_alive = True
    finally:
        os.close(descriptor)
    return FoundGraph(path.name, path, _described(path), is_alive)


def _described(path: Path) -> Description | None:
    try:
        return msgspec.json.decode((path / _DESCRIPTION).read_bytes(), type=Description)
    except (OSError, msgspec.DecodeError):
        return None
