"""Checks before a start whether the container allows as many processes and threads as a run needs."""

from __future__ import annotations

from flowrt.errors import UserError
from flowrt.system.machine_limits import available_tasks

_LAUNCHER, _PER_PROCESS = 4, 2  # fork server, the process that forks for it, threads of the launcher; a process and its compute thread


def check_tasks(num_processes: int) -> None:
    """Raises UserError when the limit leaves too few tasks to start `num_processes` OS processes. They may start more threads than that."""
    left, needed = available_tasks(), _LAUNCHER + _PER_PROCESS * num_processes
    if left is not None and left < needed:
        text = f"too few processes and threads are allowed (pids.max of the container leaves {left}, at least {needed} are needed)"
        raise UserError(f"{text}; raise it, for example with --pids-limit, or use fewer processes")
