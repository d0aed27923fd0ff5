"""Checks or raises the limit of open files (RLIMIT_NOFILE) of a process, and writes the error for a limit that is too low."""

from __future__ import annotations

import errno
import resource

from flowrt.errors import UserError

NO_DESCRIPTOR = (errno.EMFILE, errno.ENFILE)
# Of the launcher: event loop, connection to the fork server, a file being read. Per process: control connection, output, pidfd, exit lock,
# links, memory file of weights.
_LAUNCHER, _PER_PROCESS = 16, 8
_FRONT_END = 64  # but for its connections


def check_descriptors(num_processes: int) -> None:
    """Raise UserError when the limit leaves too few descriptors to start `num_processes` OS processes."""
    needed = _LAUNCHER + _PER_PROCESS * num_processes
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < needed:
        raise UserError(too_few_descriptors(needed))


def allow_connections(most: int) -> int:
    """Raise the soft limit of this process for as many connections, within the hard limit. Returns how many fit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = most + _FRONT_END
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return most
    soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return max(soft - _FRONT_END, 1)


def too_few_descriptors(needed: int | None = None) -> str:
    """A one-line error text. `needed`: roughly the number of descriptors that suffices, where it is known."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    about = "more" if needed is None else f"about {needed}"
    return f"too few open files are allowed (RLIMIT_NOFILE is {soft}, {about} are needed); raise it: ulimit -n {max(1024, needed or 0)}"


def is_too_few(error: BaseException) -> bool:
    return isinstance(error, OSError) and error.errno in NO_DESCRIPTOR
