"""Children that are about to end are reaped, too."""

from __future__ import annotations

import os
import signal

import pytest

from flowrt.processes import adopted_processes
from flowrt.processes.adopted_processes import CAN_ADOPT, reap_group

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
