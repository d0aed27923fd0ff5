"""Children that are about to end are reaped, too."""

from __future__ import annotations

import os
import signal

import pytest

from flowrt.processes import adopted_processes
from flowrt.processes.adopted_processes import CAN_ADOPT, reap_group, reap_orphans

pytestmark = pytest.mark.skipif(not CAN_ADOPT, reason="this system has no subreapers")


def test_a_child_that_is_ending_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one that was killed while it began to exit: it is not a zombie yet."""
    pid = os.fork()
    if pid == 0:
        signal.pause()
    os.setpgid(pid, pid)

    def end() -> None:
        os.kill(pid, signal.SIGKILL)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)

    monkeypatch.setattr(adopted_processes, "_pause", end)
    reap_group(pid)
    with pytest.raises(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)


def test_orphans_of_a_group_are_reaped_and_known_children_are_not() -> None:
    pids, group = [], 0
    for _ in range(3):
        if (pid := os.fork()) == 0:
            signal.pause()
        group = group or pid
        os.setpgid(pid, group)
        pids.append(pid)
    living, orphan, known = pids
    reap_orphans(group, {known})  # none has ended
    for pid in (orphan, known):
        os.kill(pid, signal.SIGKILL)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    for _ in range(2):
        reap_orphans(group, {living})  # both are unknown
    with pytest.raises(ChildProcessError):
        os.waitpid(orphan, os.WNOHANG)
    os.kill(living, signal.SIGKILL)
    os.waitid(os.P_PID, living, os.WEXITED | os.WNOWAIT)
    reap_orphans(group, {living})
    assert os.waitpid(living, os.WNOHANG)[0] == living
    reap_orphans(group, ())  # no child is left in it
