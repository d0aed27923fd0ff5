"""Checks or raises the limit of open files (RLIMIT_NOFILE) of a process, and writes the error for a limit that is too low."""

from __future__ import annotations

import errno
import os
import resource

from flowrt.errors import UserError

NO_DESCRIPTOR = (errno.EMFILE, errno.ENFILE)
# Of the launcher: event loop, connection to the fork server, a file being read. Per process: control connection, output, pidfd, exit lock,
# links, memory file of weights.
_LAUNCHER, _PER_PROCESS = 16, 8
_FRONT_END, _SPARE = 24, 16  # what a front end opens before it serves; what it may open later, such as another tokenizer process
_MIN_CONNECTIONS, MAX_LEAVING = 8, 256
MIN_DESCRIPTORS = 32  # to load the libraries and run in one process


def check_descriptors(num_processes: int) -> None:
    """Raise the soft limit so far that `num_processes` OS processes can be started. Raises UserError when the hard limit is too low."""
    needed = _LAUNCHER + _PER_PROCESS * num_processes
    if raise_limit(needed) < needed:
        raise UserError(too_few_descriptors(needed))


def check_front_end() -> None:
    """Raises UserError when this process and its children may not open the files that a front end with a few connections needs."""
    needed = _FRONT_END + _SPARE + 2 * _MIN_CONNECTIONS
    if raise_limit(needed) < needed:
        raise UserError(too_few_descriptors(needed))


def allow_connections(most: int) -> tuple[int, int]:
    """Raise the soft limit of this process for as many connections, within the hard limit. Returns how many fit, at most `most`, and how
    many refused ones fit beside them, at most MAX_LEAVING."""
    others = _num_open() + _SPARE
    free = raise_limit(others + most + MAX_LEAVING) - others
    leaving = max(1, min(MAX_LEAVING, free // 2, max(_MIN_CONNECTIONS, free // 8)))
    return max(1, min(most, free - leaving)), leaving


def raise_limit(needed: int) -> int:
    """Raise the soft limit to `needed` descriptors, or as far as the hard limit allows. Returns how many may be open, at most `needed`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return needed
    soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return soft


def _num_open() -> int:
    """Open descriptors of this process, or what a front end usually has where the system does not show them."""
    for folder in ("/proc/self/fd", "/dev/fd"):
        try:
            return len(os.listdir(folder))
        except OSError:
            continue
    return _FRONT_END


def too_few_descriptors(needed: int | None = None) -> str:
    """A one-line error text. `needed`: roughly the number of descriptors that suffices, where it is known."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    about = "more" if needed is None else f"about {needed}"
    return f"too few open files are allowed (RLIMIT_NOFILE is {soft}, {about} are needed); raise it: ulimit -n {max(1024, needed or 0)}"


def is_too_few(error: BaseException) -> bool:
    return isinstance(error, OSError) and error.errno in NO_DESCRIPTOR
