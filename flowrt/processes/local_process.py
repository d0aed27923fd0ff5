"""A process that the fork server forks, and its resources: sockets, exit lock, output pipe, pidfd."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import signal
import socket
from collections.abc import Callable, Sequence
from dataclasses import replace

from flowrt.processes.adopted_processes import CAN_ADOPT, reap, wait_reaped
from flowrt.processes.exit_lock import ExitLock
from flowrt.processes.output_tail import OutputTail
from flowrt.system.clock_offset import SAME_CLOCK
from flowrt.system.process_backend import CONTROL_LIMITS, ProcessSpec
from flowrt.transports.contract import Identity
from flowrt.transports.stream import StreamChannel

GRACE_SECONDS = 3.0  # time limit for killed processes to end
_REAP_POLL_SECONDS = 0.05  # poll interval where there is no pidfd, and for a process that was not adopted yet
_ADOPTION_SECONDS = 1.0  # after this time, a process that is no child of this one was reaped by other code of the program


class LocalProcess:
    """One process, from the request to fork it on; see system/process_backend.py. `started` is done once it is forked. `pidfd` is -1
    where the system has none. A process whose `start` was cancelled is not reported. `on_exited` is called with its exit status, None where
    it is unknown, once it was reaped here.

    Raises OSError, and leaves nothing open, when the system refuses a resource.
    """

    clock_offset, model_path = SAME_CLOCK, ""

    def __init__(
        self,
        spec: ProcessSpec,
        on_output: Callable[[str, str], None],
        on_dying: Callable[[], None],
        on_exited: Callable[[int | None], None],
        descriptors: Sequence[int] = (),
    ) -> None:
        self.spec, self.pid, self._descriptors = spec, 0, list(descriptors)
        self.started: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.controls: tuple[StreamChannel, ...] = ()
        self.is_reported = True
        self._pidfd, self._has_exited = -1, False
        self._ours: list[socket.socket] = []
        self._theirs: list[socket.socket] = []
        self._on_exited, self._missing_since = on_exited, 0.0
        self._output = OutputTail(spec.name, on_output)
        self._exit_lock = ExitLock(spec.name, on_dying)
        try:
            for _ in spec.workers:
                mine, other = socket.socketpair()
                mine.setblocking(False)
                self._ours.append(mine)
                self._theirs.append(other)
        except OSError:
            self.close()
            raise

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    async def terminate(self) -> None:
        self._signal(signal.SIGTERM)

    def output_tail(self) -> tuple[str, ...]:
        return self._output.last

    async def abandon(self) -> None:
        """End the process, perhaps before it is forked, and report nothing about it: `start` was cancelled."""
        self.is_reported = False
        self._close(self._ours)
        self.kill()
        for control in self.controls:
            await control.aclose()

    # Called by the backend.

    def rename(self, name: str, workers: tuple[Identity, ...]) -> None:
        self.spec = replace(self.spec, name=name, workers=workers)
        self._output.name = name

    @property
    def holds_exit_lock(self) -> bool:
        return self._exit_lock.fd >= 0

    @property
    def fds(self) -> list[int]:
        """Descriptors for the process: the write end of its output, its ends of the control connections, those that it is given,
        the memory of its exit lock."""
        controls, lock = [sock.fileno() for sock in self._theirs], [self._exit_lock.fd] if self.holds_exit_lock else []
        return [self._output.write_end, *controls, *self._descriptors, *lock]

    def close_theirs(self) -> None:
        self._close(self._theirs)
        if self._output.write_end >= 0:
            self._output.given_away()

    def on_forked(self, pid: int, pidfd: int) -> None:
        self.pid, self._pidfd = pid, pidfd
        self._exit_lock.given_away()
        loop = asyncio.get_running_loop()
        if pidfd >= 0:
            loop.add_reader(pidfd, self._reap, loop)
        elif CAN_ADOPT:
            loop.call_later(_REAP_POLL_SECONDS, self._reap, loop)
        if not self.is_reported or self.started.cancelled():  # the cancelled `start` has yet to call `abandon`
            self.is_reported = False
            self.kill()
            return
        self.controls = tuple(StreamChannel(sock, CONTROL_LIMITS, peer) for sock, peer in zip(self._ours, self.spec.workers, strict=True))
        self._ours.clear()
        self.started.set_result(None)

    def end_controls(self) -> None:
        """End the control connections of the dead process; what it has sent can still be received."""
        for control in self.controls:
            control.receive_rest()

    def note_exit(self, loop: asyncio.AbstractEventLoop) -> None:
        """Release the pidfd and the exit lock of the reaped process. Its output stays readable until `close`."""
        self._has_exited = True
        if self._pidfd >= 0:
            self._stop_watching(loop)
            os.close(self._pidfd)
            self._pidfd = -1
        self._exit_lock.close()
        if not self.is_reported:
            self.close()

    def close(self) -> None:
        """Release everything but a running process. Idempotent."""
        self.close_theirs()
        self._close(self._ours)
        self._exit_lock.close()
        self._output.close()

    def kill_and_wait(self, loop: asyncio.AbstractEventLoop) -> None:
        """Kill the process, and reap it if it is a child of this process. Blocks while it dies."""
        if self.pid and not self._has_exited:
            self.kill()
            has_ended = self._pidfd < 0
            if not has_ended:
                poller = select.poll()
                poller.register(self._pidfd, select.POLLIN)
                has_ended = bool(poller.poll(GRACE_SECONDS * 1000))
            if has_ended:
                wait_reaped(self.pid)
            self.note_exit(loop)
        self.close()

    def _signal(self, number: int) -> None:
        """Signal the process directly: the fork server may be busy. No-op before the fork: pid 0 would be this process and its group."""
        if self.pid and not self._has_exited:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                if self._pidfd >= 0:
                    signal.pidfd_send_signal(self._pidfd, number)
                else:
                    os.kill(self.pid, number)

    def _reap(self, loop: asyncio.AbstractEventLoop) -> None:
        """Reap the process once it has ended: the kernel reports its end, or it has no pidfd and is polled."""
        if self._has_exited:
            return
        try:
            status = reap(self.pid)
            is_over = status is not None
        except ChildProcessError:  # no child of this process: not adopted yet, or reaped by other code of the program
            self._missing_since = self._missing_since or loop.time()
            status, is_over = None, loop.time() >= self._missing_since + _ADOPTION_SECONDS
        if is_over:
            self._on_exited(status)
            return
        if self._pidfd >= 0:
            self._stop_watching(loop)
        loop.call_later(_REAP_POLL_SECONDS, self._reap, loop)

    def _stop_watching(self, loop: asyncio.AbstractEventLoop) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed already
            loop.remove_reader(self._pidfd)

    @staticmethod
    def _close(sockets: list[socket.socket]) -> None:
        for sock in sockets:
            sock.close()
        sockets.clear()
