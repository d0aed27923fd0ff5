"""A process that the fork server forked, and the resources of its start: sockets, exit lock, output pipe."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import signal
import socket
from collections.abc import Callable

from flowrt.process_backend import ProcessSpec
from flowrt.processes.exit_lock import ExitLock
from flowrt.processes.output_tail import OutputTail
from flowrt.transports.contract import Channel

GRACE_SECONDS = 3.0  # time limit for the fork server to end all processes it forked, and itself


class LocalProcess:
    """One forked process; see flowrt.process_backend.WorkerProcess. `pidfd` is -1 where the system has none. A process whose `start` was
    cancelled has no controls and is not reported."""

    def __init__(
        self,
        spec: ProcessSpec,
        pid: int,
        pidfd: int,
        controls: tuple[Channel, ...],
        output: OutputTail,
        exit_lock: ExitLock,
    ) -> None:
        self.spec, self.pid, self.controls = spec, pid, controls
        self.is_reported = bool(controls)
        self._pidfd, self._output, self._exit_lock = pidfd, output, exit_lock
        self._has_exited = False

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    async def terminate(self) -> None:
        self._signal(signal.SIGTERM)

    def output_tail(self) -> tuple[str, ...]:
        return self._output.last

    async def abandon(self) -> None:
        """End the process and report nothing about it: `start` was cancelled after the fork."""
        self.is_reported = False
        self.kill()
        for control in self.controls:
            await control.aclose()

    # Called by the backend.

    def watch(self, on_end: Callable[[LocalProcess], None]) -> None:
        """Call `on_end` once, when the kernel reports the end of the process. No-op without a pidfd."""
        if self._pidfd >= 0:
            asyncio.get_running_loop().add_reader(self._pidfd, self._on_end, on_end)

    def note_exit(self, loop: asyncio.AbstractEventLoop) -> None:
        """Release the pidfd and the exit lock of the reaped process. Its output stays readable until `forget`."""
        self._has_exited = True
        if self._pidfd >= 0:
            self._stop_watching(loop)
            os.close(self._pidfd)
            self._pidfd = -1
        self._exit_lock.close()
        if not self.is_reported:
            self.forget()

    def forget(self) -> None:
        self._output.close()

    def kill_and_wait(self, loop: asyncio.AbstractEventLoop) -> None:
        """Kill the process when the fork server could not. Blocks while the process dies, and reaps it if it is a child of this process."""
        if not self._has_exited:
            self.kill()
            if self._pidfd >= 0:
                gone = select.poll()
                gone.register(self._pidfd, select.POLLIN)
                gone.poll(GRACE_SECONDS * 1000)
            reap_adopted(self.pid)
            self.note_exit(loop)
        self.forget()

    def _signal(self, number: int) -> None:
        """Signal the process directly: the fork server may be busy."""
        if not self._has_exited:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                if self._pidfd >= 0:
                    signal.pidfd_send_signal(self._pidfd, number)
                else:
                    os.kill(self.pid, number)

    def _on_end(self, on_end: Callable[[LocalProcess], None]) -> None:
        self._stop_watching(asyncio.get_running_loop())  # the descriptor stays readable
        on_end(self)

    def _stop_watching(self, loop: asyncio.AbstractEventLoop) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed already
            loop.remove_reader(self._pidfd)


class LocalStart:
    """A start under way, with the resources of its process. Raises OSError, and leaves nothing open, when the system refuses them."""

    def __init__(self, spec: ProcessSpec, on_output: Callable[[str, str], None], on_dying: Callable[[], None]) -> None:
        self.spec = spec
        self.answer: asyncio.Future[LocalProcess] = asyncio.get_running_loop().create_future()
        self.has_left = False  # the caller of `start` was cancelled
        self.ours: list[socket.socket] = []
        self.theirs: list[socket.socket] = []
        self.output = OutputTail(spec.name, on_output)
        self.exit_lock = ExitLock(spec.name, on_dying)
        try:
            for _ in spec.workers:
                mine, other = socket.socketpair()
                mine.setblocking(False)
                self.ours.append(mine)
                self.theirs.append(other)
        except OSError:
            self.close()
            raise

    @property
    def fds(self) -> list[int]:
        """Descriptors for the process: the write end of its output, its ends of the control connections, the memory of its exit lock."""
        return [self.output.write_end, *(sock.fileno() for sock in self.theirs), *([self.exit_lock.fd] if self.exit_lock.fd >= 0 else [])]

    def close_theirs(self) -> None:
        for sock in self.theirs:
            sock.close()
        self.theirs.clear()
        if self.output.write_end >= 0:
            self.output.given_away()

    def close_ours(self) -> None:
        for sock in self.ours:
            sock.close()
        self.ours.clear()

    def close(self) -> None:
        self.close_theirs()
        self.close_ours()
        self.exit_lock.close()
        self.output.close()


def reap_adopted(pid: int) -> None:
    """Reap a dying orphan if it is a child of this process: process 1 of a container, or a subreaper, inherits orphans. Blocks until the
    orphan has ended."""
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, 0)
