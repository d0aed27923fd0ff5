"""The `local` backend: worker processes of this host, forked by a fork server.

`LocalBackend` owns descriptors and one child process, but no task: all input arrives through readers of the running loop. It works on any
loop in any thread. It needs no main guard, because the fork server is a fresh interpreter that runs flowrt's own module (fork_server.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Sequence
from typing import Any

import msgspec

from flowrt.errors import UserError, WorkerDiedError
from flowrt.graph.model import FORK_SERVER
from flowrt.process_backend import BackendOwner, ProcessSpec
from flowrt.processes.descriptors import check_descriptors, is_too_few, too_few_descriptors
from flowrt.processes.fork_server import ORIGINAL_PATH
from flowrt.processes.frames import Exited, Forked, ForkRequest, FrameReader, Loaded, MissingDescriptorsError, NotForked, Report, encode
from flowrt.processes.leftover import MARKER, PARENT_MARKER, processes_marked
from flowrt.processes.local_process import GRACE_SECONDS, LocalProcess, reap_adopted
from flowrt.processes.output_tail import OutputTail, exit_text

_REAP_SECONDS, _REAP_POLL_SECONDS = 1.0, 0.01  # from the end of the fork server's connection to its exit status


class LocalBackend:
    """A fork server and the processes it forked, keyed by start number. See flowrt.process_backend.ProcessBackend."""

    def __init__(
        self, run_id: str, owner: BackendOwner, server: subprocess.Popen[bytes], connection: socket.socket, output: OutputTail
    ) -> None:
        self._run_id, self._owner, self._server, self._connection, self._output = run_id, owner, server, connection, output
        self._loop = asyncio.get_running_loop()
        self._reader = FrameReader[Report](connection, msgspec.msgpack.Decoder(Report))
        self._outbox: deque[tuple[bytes, LocalProcess | None]] = deque()  # frames for which the connection had no room yet
        self._loaded: asyncio.Future[int] = self._loop.create_future()  # the number of the fork server's threads
        self._ended: asyncio.Future[None] = self._loop.create_future()  # the fork server has ended
        self._status: int | None = None  # of the fork server, once it has ended
        self._is_closing = self._is_closed = False
        self._processes: dict[int, LocalProcess] = {}  # requested, perhaps not forked yet; not reaped yet
        self._ended_of: dict[str, LocalProcess] = {}  # by name: the latest that ended, whose output can still be read
        self._num_starts = 0
        connection.setblocking(False)
        self._loop.add_reader(connection.fileno(), self._on_readable)

    @classmethod
    async def open(cls, run_id: str, owner: BackendOwner, preload: Sequence[str], num_processes: int, seconds: float) -> LocalBackend:
        """Start a fork server and wait until it serves; see OpenBackend. The fork server dies when the calling thread ends."""
        check_descriptors(num_processes)
        if not sys.executable:
            raise WorkerDiedError(FORK_SERVER, "cannot start: this Python does not know its own executable (sys.executable is empty)")
        environment = {**os.environ, MARKER: run_id, PARENT_MARKER: str(os.getpid())}
        environment.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # idle compute threads sleep: other processes need the cores
        environment["OPENBLAS_NUM_THREADS"] = "1"  # numpy's OpenBLAS starts its threads on import, and a fork would lose them
        if "PYTHONPATH" in environment:
            environment[ORIGINAL_PATH] = environment["PYTHONPATH"]
        environment["PYTHONPATH"] = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        with contextlib.ExitStack() as undo:
            ours, theirs = map(undo.enter_context, socket.socketpair())
            output = OutputTail(FORK_SERVER, owner.on_output)
            undo.callback(output.close)
            command = [sys.executable, "-P", "-m", "flowrt.processes.fork_server", str(theirs.fileno()), str(os.getpid()), *preload]
            try:
                server = subprocess.Popen(  # noqa: ASYNC220  (its own watcher: works on every loop, in every thread)
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=output.write_end,
                    stderr=output.write_end,
                    pass_fds=[theirs.fileno()],
                    env=environment,
                    start_new_session=True,  # only the launcher receives a terminal's Ctrl-C
                )
            except OSError as error:
                raise _start_error(FORK_SERVER, error) from error
            undo.pop_all()
        theirs.close()
        output.given_away()
        backend = cls(run_id, owner, server, ours, output)
        doing = f"while importing {', '.join(preload)}"
        try:
            async with asyncio.timeout(seconds):
                backend.num_threads = await backend._loaded
        except TimeoutError:
            reason = f"sent nothing for {seconds:g} s {doing}"
            raise WorkerDiedError(FORK_SERVER, reason, backend._kill_server()) from None
        except WorkerDiedError as error:
            raise WorkerDiedError(FORK_SERVER, f"{error.reason} {doing}" if preload else error.reason, backend._kill_server()) from None
        except BaseException:
            backend._kill_server()
            raise
        return backend

    num_threads = 1  # threads that the imports left running in the fork server: a fork copies only the forking one

    async def start(self, spec: ProcessSpec) -> LocalProcess:
        self._check_alive()
        self._num_starts = number = self._num_starts + 1
        try:
            process = LocalProcess(spec, self._owner.on_output, lambda: self._on_dying(number))
        except OSError as error:
            raise _start_error(spec.name, error) from error
        self._forget(spec.name)
        self._processes[number] = process
        request = ForkRequest(
            number=number,
            host=spec.name,
            workers=tuple(worker.name for worker in spec.workers),
            worker=spec.entry,
            threads=spec.threads,
            log_level=spec.log_level,
            holds_exit_lock=process.holds_exit_lock,
            num_fds=len(process.fds),
        )
        self._outbox.append((encode(request), process))
        if len(self._outbox) == 1:
            self._send()
        try:
            return await process.started
        except BaseException:
            await process.abandon()
            raise

    def output_tail(self) -> tuple[str, ...]:
        return self._output.last

    async def aclose(self) -> None:
        """Shut down the sending side of the connection, so that the fork server kills and reaps all it forked and ends. Then call
        `kill_all`, which kills what is left after GRACE_SECONDS or a cancellation."""
        self._is_closing = True
        try:
            if not self._is_closed and not self._ended.done():
                with contextlib.suppress(TimeoutError, OSError):
                    self._connection.shutdown(socket.SHUT_WR)
                    async with asyncio.timeout(GRACE_SECONDS):
                        await self._ended
        finally:
            self.kill_all()

    def kill_all(self) -> None:
        """Kill the fork server, all processes it forked, and all that those started. Normally blocks for milliseconds. Idempotent."""
        if self._is_closed:
            return
        self._is_closing = self._is_closed = True
        self._close_connection()
        if self._loaded.done() and not self._loaded.cancelled():  # at the end of its connection it kills and reaps all, and ends
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._server.wait(GRACE_SECONDS)
        if self._server.poll() is None:  # not reaped, so its process group id is not reused
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._server.pid, signal.SIGKILL)
            self._server.kill()
            self._server.wait()
        for process in (*self._processes.values(), *self._ended_of.values()):
            process.kill_and_wait(self._loop)
        for pid in processes_marked(self._run_id):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
            reap_adopted(pid)
        self._output.close()

    # Inside.

    def _kill_server(self) -> tuple[str, ...]:
        """End everything after a failed `open`. Returns the last output lines of the fork server."""
        self.kill_all()
        return self._output.last

    def _check_alive(self) -> None:
        if self._is_closing or self._status is not None:
            raise self._lost()

    def _lost(self) -> WorkerDiedError:
        status = -signal.SIGKILL if self._status is None else self._status
        return WorkerDiedError(FORK_SERVER, exit_text(status), self._output.last)

    def _close_connection(self) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed already
            self._loop.remove_reader(self._connection.fileno())
            self._loop.remove_writer(self._connection.fileno())
        self._connection.close()
        self._reader.close()

    def _send(self) -> None:
        """Send queued frames while the connection has room. A broken connection ends at the reader, which then fails every start."""
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
                self._on_report(report)
        except BlockingIOError:
            return
        except Exception as error:  # the event loop would only log it, and each waiting caller would wait forever
            self._on_broken_connection(error)
            return
        if not open_still:
            self._loop.remove_reader(self._connection.fileno())
            self._on_server_end(self._loop.time() + _REAP_SECONDS)

    def _on_report(self, report: Report) -> None:
        match report:
            case Loaded(num_threads=num_threads):
                if not self._loaded.done():
                    self._loaded.set_result(num_threads)
            case NotForked(number=number, error=error):
                process = self._processes.pop(number)
                process.close()
                if not process.started.done():
                    process.started.set_exception(WorkerDiedError(process.spec.name, f"could not be forked: {error}"))
            case Forked(number=number, pid=pid, num_fds=num_fds):
                pidfd = -1
                with contextlib.suppress(MissingDescriptorsError):  # no descriptor was free here: the reap reports the end, later
                    pidfd = self._reader.take_fds(num_fds)[0] if num_fds else -1
                self._processes[number].on_forked(pid, pidfd)
            case Exited(number=number, status=status):
                process = self._processes.pop(number)
                process.note_exit(self._loop)
                if process.is_reported:
                    self._forget(process.spec.name)
                    self._ended_of[process.spec.name] = process
                    self._loop.call_soon(self._report_exit, process, exit_text(status))  # after `start` has returned the process

    def _forget(self, name: str) -> None:
        """Drop the output of the latest ended process of this name."""
        if (former := self._ended_of.pop(name, None)) is not None:
            former.close()

    def _on_dying(self, number: int) -> None:
        process = self._processes.get(number)
        if process is not None and process.pid and process.is_reported and not self._is_closing:
            self._owner.on_dying(process)

    def _report_exit(self, process: LocalProcess, how: str) -> None:
        if process.is_reported and not self._is_closing:
            self._owner.on_exited(process, how)

    def _on_broken_connection(self, error: Exception) -> None:
        """Handle unreadable frames of the fork server: every waiting call raises the error. Without a waiting call the run ends as if the
        fork server had died."""
        self._loop.remove_reader(self._connection.fileno())
        reason: Exception = WorkerDiedError(FORK_SERVER, f"cannot be understood: {type(error).__name__}: {error}", self._output.last)
        if is_too_few(error):
            reason = UserError(too_few_descriptors())
        self._end_with(-signal.SIGKILL, reason)

    def _on_server_end(self, deadline: float) -> None:
        """Handle the end of the fork server's connection: it is dying or dead, and so are all processes it forked. Polls for its exit
        status until `deadline` (loop time)."""
        if self._is_closed:
            return
        status = self._server.poll()
        if status is None and self._loop.time() < deadline:
            self._loop.call_later(_REAP_POLL_SECONDS, self._on_server_end, deadline)
            return
        self._end_with(-signal.SIGKILL if status is None else status, None)

    def _end_with(self, status: int, reason: Exception | None) -> None:
        """Record the end of the fork server: fail the waiting calls, and report the loss to the owner. A `reason` that a waiting call
        raises is not reported again."""
        self._status = status
        if not self._ended.done():
            self._ended.set_result(None)
        starts: list[asyncio.Future[Any]] = [self._loaded, *(process.started for process in self._processes.values())]
        waiting = [start for start in starts if not start.done()]
        for start in waiting:
            start.set_exception(reason or self._lost())
            start.exception()  # it counts as retrieved: the caller may have left
        if not self._is_closing and (reason is None or not waiting):
            self._owner.on_backend_lost(exit_text(status))


def _start_error(process: str, error: OSError) -> UserError | WorkerDiedError:
    """The error for a process that the system refuses to start."""
    return UserError(too_few_descriptors()) if is_too_few(error) else WorkerDiedError(process, f"cannot start: {error}")
