"""Finds and ends the processes of a run by a marker: those that flowrt starts, and their children, have the run's id in their environment.

Linux only: elsewhere no process is found.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
from dataclasses import dataclass

MARKER = "FLOWRT_RUN"  # the run's id
PARENT_MARKER = "FLOWRT_LAUNCHER"  # the pid of the process that launched it
LEFT_SECONDS, KILL_SECONDS = 2.0, 5.0  # for the last events of a front end, whose launcher has died; until the kernel has ended it


@dataclass(frozen=True)
class Marked:
    """A living process of some run. `launcher_pid` is 0 when its environment does not contain it."""

    pid: int
    run_id: str
    launcher_pid: int
    name: str


def marked_processes() -> list[Marked]:
    """Every living process of any run whose environment this user may read. Zombies are left out."""
    found: list[Marked] = []
    if not os.path.isdir("/proc/self"):
        return found
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError):  # it has ended meanwhile, or is another user's
                if (marked := _read_marked(int(entry))) is not None:
                    found.append(marked)
    return found


def processes_marked(run_id: str) -> list[int]:
    """The pids of the living processes of one run, without the calling process."""
    return [marked.pid for marked in marked_processes() if marked.run_id == run_id and marked.pid != os.getpid()]


def end_left(run_id: str) -> None:
    """Wait until the processes of a run have ended whose launcher has died, also those of hosts on this machine, whose run ids begin with
    this one. Kill those that do not end, as one that is stopped."""
    seconds = LEFT_SECONDS
    for marked in marked_processes():
        if not run_id or not f"{marked.run_id}.".startswith(f"{run_id}."):
            continue
        with contextlib.suppress(ProcessLookupError, PermissionError):
            process = os.pidfd_open(marked.pid)
            try:
                if not select.select([process], [], [], seconds)[0]:
                    seconds = 0.0  # of all together
                    signal.pidfd_send_signal(process, signal.SIGKILL)
                    select.select([process], [], [], KILL_SECONDS)
            finally:
                os.close(process)


def _read_marked(pid: int) -> Marked | None:
    with open(f"/proc/{pid}/environ", "rb") as file:
        data = file.read()
    if MARKER.encode() not in data:
        return None
    variables = dict(item.split(b"=", 1) for item in data.split(b"\0") if b"=" in item)
    run_id = variables.get(MARKER.encode())
    with open(f"/proc/{pid}/comm", "rb") as file:
        name = file.read().decode(errors="replace").strip()
    if run_id is None:
        return None
    launcher = variables.get(PARENT_MARKER.encode(), b"0")
    return Marked(pid, run_id.decode(errors="replace"), int(launcher) if launcher.isdigit() else 0, name)
