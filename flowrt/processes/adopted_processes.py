"""Makes this process adopt orphans of its descendants, and reaps the workers that it adopts.

The launcher is the parent of every worker, although the fork server forks them. So the kernel ties them to the launcher, and their exits
are known whatever becomes of the fork server.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import sys
from collections.abc import Container

CAN_ADOPT = sys.platform == "linux"  # PR_SET_CHILD_SUBREAPER
_PR_SET_CHILD_SUBREAPER, _PR_GET_CHILD_SUBREAPER = 36, 37
_MAX_POLLS, _POLL_MILLISECONDS = 300, 10

_num_adopting = 0
_adopted_before = False


def begin_adopting() -> None:
    """Adopt the orphans of all descendants until the matching `end_adopting`. An orphan of the user's own children is adopted too."""
    global _num_adopting, _adopted_before
    _num_adopting += 1
    if CAN_ADOPT and _num_adopting == 1:
        before = ctypes.c_int(0)
        ctypes.CDLL(None).prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(before), 0, 0, 0)
        _adopted_before = bool(before.value)
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def end_adopting() -> None:
    global _num_adopting
    _num_adopting -= 1
    if CAN_ADOPT and not _num_adopting and not _adopted_before:
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def reap(pid: int) -> int | None:
    """The exit status of a child that has ended, as in subprocess; None while it runs. Raises ChildProcessError when it is not, or not
    yet, a child of this process."""
    found, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if found else None


def wait_reaped(pid: int) -> None:
    """Reap a dying process if it is a child of this process. Blocks until it has ended."""
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, 0)


def reap_orphans(group: int, known: Container[int]) -> None:
    """Reap the children of the process group that have ended and are not `known`: what descendants left behind. Does not wait. An unknown
    one behind a known one is left for the next call."""
    with contextlib.suppress(ChildProcessError):  # none is left
        while (found := os.waitid(os.P_PGID, group, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None and found.si_pid not in known:
            os.waitpid(found.si_pid, os.WNOHANG)


def reap_group(group: int) -> None:
    """Reap the children of the process group, which have ended or are ending. Blocks until then, for a limited time."""
    with contextlib.suppress(ChildProcessError):  # none is left
        for _ in range(_MAX_POLLS):
            while os.waitpid(-group, os.WNOHANG)[0]:
                pass
            _pause()


def _pause() -> None:
    select.poll().poll(_POLL_MILLISECONDS)
