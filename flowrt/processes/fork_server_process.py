"""One incarnation of the fork server, as the launcher holds it: its process, its connection, and its output."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Sequence

import msgspec

from flowrt.errors import UserError, WorkerDiedError
from flowrt.graph.model import FORK_SERVER
from flowrt.processes.descriptors import is_too_few, too_few_descriptors
from flowrt.processes.fork_server import ORIGINAL_PATH
from flowrt.processes.frames import ForkRequest, FrameReader, Loaded, MissingDescriptorsError, Report, encode
from flowrt.processes.import_path import import_path
from flowrt.processes.leftover import MARKER, PARENT_MARKER
from flowrt.processes.local_process import LocalProcess
from flowrt.processes.output_tail import OutputTail, exit_text

_REAP_SECONDS, _REAP_POLL_SECONDS = 1.0, 0.01  # from the end of the fork server's connection to its exit status


class ForkServerProcess:
    """A fork server, from its start on; the kernel kills it when the calling thread ends.

    `on_report` is called with each report but Loaded and with the descriptor that belongs to it (-1: none); `on_end` once, when the
    fork server has ended or sent what cannot be read, with the error for calls that wait for it. Raises WorkerDiedError or UserError, and
    leaves nothing open, when the system refuses to start it.
    """

    def __init__(
        self,
        run_id: str,
        preload: Sequence[str],
        on_output: Callable[[str, str], None],
        on_report: Callable[[Report, int], None],
        on_end: Callable[[UserError | WorkerDiedError], None],
    ) -> None:
        self._preload, self._on_report, self._on_end = preload, on_report, on_end
        self._loop = asyncio.get_running_loop()
        self._outbox: deque[tuple[bytes, LocalProcess | None]] = deque()  # frames for which the connection had no room yet
        self._loaded: asyncio.Future[int] = self._loop.create_future()  # the number of its threads
        self._has_ended = self._is_closed = False
        with contextlib.ExitStack() as undo:
            try:
                self._connection, theirs = map(undo.enter_context, socket.socketpair())
                self._output = OutputTail(FORK_SERVER, on_output)
                undo.callback(self._output.close)
                command = [sys.executable, "-P", "-m", "flowrt.processes.fork_server", str(theirs.fileno()), str(os.getpid()), *preload]
                self._server = subprocess.Popen(  # its own watcher: works on every loop, in every thread
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=self._output.write_end,
                    stderr=self._output.write_end,
                    pass_fds=[theirs.fileno()],
                    env=_environment(run_id),
                    start_new_session=True,  # only the launcher receives a terminal's Ctrl-C
                )
            except OSError as error:
                raise start_error(FORK_SERVER, error) from error
            undo.pop_all()
        theirs.close()
        self._output.given_away()
        self._reader = FrameReader[Report](self._connection, msgspec.msgpack.Decoder(Report))
        self._connection.setblocking(False)
        self._loop.add_reader(self._connection.fileno(), self._on_readable)

    @property
    def pid(self) -> int:
        """Names its process group, too."""
        return self._server.pid

    @property
    def is_serving(self) -> bool:
        return self._loaded.done() and not self._has_ended

    @property
    def output_tail(self) -> tuple[str, ...]:
        return self._output.last

    async def load(self, seconds: float) -> int:
        """Wait until it serves. Returns the number of threads that the imports have left running. When it fails, the caller closes it."""
        doing = f"while importing {', '.join(self._preload)}"
        try:
            async with asyncio.timeout(seconds):
                return await self._loaded
        except TimeoutError:
            raise WorkerDiedError(FORK_SERVER, f"sent nothing for {seconds:g} s {doing}", self._output.last) from None
        except WorkerDiedError as error:
            reason = f"{error.reason} {doing}" if self._preload else error.reason
            raise WorkerDiedError(FORK_SERVER, reason, self._output.last) from None

    def request(self, request: ForkRequest, process: LocalProcess) -> None:
        self._outbox.append((encode(request), process))
        if len(self._outbox) == 1:
            self._send()

    def kill(self) -> None:
        """Send SIGKILL; `on_end` follows. No-op after its end."""
        self._server.kill()

    def lost(self) -> WorkerDiedError:
        return WorkerDiedError(FORK_SERVER, exit_text(self._status()), self._output.last)

    def close(self, grace_seconds: float = 0.0) -> None:
        """End it, and all of its process group that it has not reaped; by itself within `grace_seconds`, when it notices the end of its
        connection. Blocks until it has ended. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = self._has_ended = True
        with contextlib.suppress(RuntimeError):  # the loop is closed already
            self._loop.remove_reader(self._connection.fileno())
            self._loop.remove_writer(self._connection.fileno())
        self._connection.close()
        self._reader.close()
        if grace_seconds and self._loaded.done() and not self._loaded.cancelled():
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._server.wait(grace_seconds)
        self._server.kill()
        self._server.wait()
        self._output.close()

    # Inside.

    def _status(self) -> int:
        status = self._server.poll()
        return -signal.SIGKILL if status is None else status

    def _send(self) -> None:
        """Send queued frames while the connection has room. A broken connection ends at the reader."""
        while self._outbox:
            data, process = self._outbox[0]
            try:
                sent = socket.send_fds(self._connection, [data], [] if process is None else process.fds)
            except BlockingIOError:
                self._loop.add_writer(self._connection.fileno(), self._send)
                return
            except ConnectionError:
                self._outbox.clear()
                break
            if process is not None:
                process.close_theirs()  # they travel with the first byte
            self._outbox[0] = data[sent:], None
            if sent == len(data):
                self._outbox.popleft()
        self._loop.remove_writer(self._connection.fileno())

    def _on_readable(self) -> None:
        try:
            open_still = self._reader.feed()
            for report in self._reader.frames():
                if isinstance(report, Loaded):
                    if report.error and not self._loaded.done():
                        self._has_ended = True
                        self._loaded.set_exception(UserError(report.error))
                    elif not self._loaded.done():
                        self._loaded.set_result(report.num_threads)
                else:
                    self._on_report(report, self._descriptor_of(report))
        except BlockingIOError:
            return
        except Exception as error:  # the event loop would only log it, and each waiting caller would wait forever
            reason = WorkerDiedError(FORK_SERVER, f"cannot be understood: {type(error).__name__}: {error}", self._output.last)
            self.kill()
            self._end(UserError(too_few_descriptors()) if is_too_few(error) else reason)
            return
        if not open_still:
            self._loop.remove_reader(self._connection.fileno())
            self._await_end(self._loop.time() + _REAP_SECONDS)

    def _descriptor_of(self, report: Report) -> int:
        """The report's descriptor; -1 where it has none, or no descriptor was free here."""
        with contextlib.suppress(MissingDescriptorsError):
            return self._reader.take_fds(report.num_fds)[0] if report.num_fds else -1
        return -1

    def _await_end(self, deadline: float) -> None:
        """Its connection has ended, so it is dying or dead. Polls for its exit status until `deadline` (loop time)."""
        if self._is_closed:
            return
        if self._server.poll() is None and self._loop.time() < deadline:
            self._loop.call_later(_REAP_POLL_SECONDS, self._await_end, deadline)
            return
        self._end(self.lost())

    def _end(self, reason: UserError | WorkerDiedError) -> None:
        if self._has_ended:
            return
        self._has_ended = True
        with contextlib.suppress(RuntimeError):
            self._loop.remove_reader(self._connection.fileno())
        if not self._loaded.done():
            self._loaded.set_exception(reason)
            self._loaded.exception()  # it counts as retrieved: the caller may have left
        else:
            self._on_end(reason)


def start_error(process: str, error: OSError) -> UserError | WorkerDiedError:
    """The error for a process that the system refuses to start."""
    return UserError(too_few_descriptors()) if is_too_few(error) else WorkerDiedError(process, f"cannot start: {error}")


def _environment(run_id: str) -> dict[str, str]:
    environment = {**os.environ, MARKER: run_id, PARENT_MARKER: str(os.getpid())}
    environment.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # idle compute threads sleep: other processes need the cores
    environment["OPENBLAS_NUM_THREADS"] = "1"  # numpy's OpenBLAS starts its threads on import, and a fork would lose them
    if "PYTHONPATH" in environment:
        environment[ORIGINAL_PATH] = environment["PYTHONPATH"]
    environment["PYTHONPATH"] = import_path()
    return environment
