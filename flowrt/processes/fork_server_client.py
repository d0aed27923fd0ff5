"""The fork server as the launcher sees it: starting it, asking it for processes, hearing of their ends, and leaving none behind.

Here: `ForkServerProcess`. Not here: the fork itself (fork_server.py), output tail (words.py), what workers are told (launcher.py).
Owns descriptors and one child process, no task: everything arrives through readers of the running loop. Works on any loop in
any thread, and needs no main guard: the fork server is a fresh interpreter that runs flowrt's own module.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence

from flowrt.errors import UserError, WorkerDiedError
from flowrt.graph.model import FORK_SERVER
from flowrt.processes.descriptors import NO_DESCRIPTOR, too_few_descriptors
from flowrt.processes.exit_lock import ExitLock
from flowrt.processes.fork_server import ORIGINAL_PATH
from flowrt.processes.frames import (
    Exited,
    Fork,
    Forked,
    Frame,
    FrameReader,
    Kill,
    Loaded,
    MissingDescriptorsError,
    NotForked,
    decode_report,
    encode,
    send_first,
)
from flowrt.processes.leftover import MARKER, PARENT_MARKER, processes_marked
from flowrt.processes.output_tail import OutputTail, exit_text

_REAP_SECONDS, _REAP_POLL_SECONDS = 1.0, 0.01  # from the end of the fork server's line to its exit status
_GRACE_SECONDS = 3.0  # for the fork server to end all it forked, and itself, once told to


def _reap_adopted(pid: int) -> None:
    """Reap a dying orphan that has become our child: as process 1 of a container, or a subreaper, we inherit them."""
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, 0)


class ForkServerProcess:
    """A running fork server and the OS processes it forked, called by their host names.

    `on_exit(host, status)` is called once per process that ends by itself, and with host FORK_SERVER when the fork server does. Where the
    kernel
    can tell, `on_gone(host)` comes before it, whatever the fork server is busy with: once when the process begins to die (its exit lock),
    once
    when it has ended (pidfd).
    """

    def __init__(
        self,
        run_id: str,
        on_line: Callable[[str, str], None],
        on_exit: Callable[[str, int], None],
        on_gone: Callable[[str], None] = lambda host: None,
    ) -> None:
        self._run_id, self._on_line, self._on_exit, self._on_gone = run_id, on_line, on_exit, on_gone
        self._loop = asyncio.get_running_loop()
        self._process: subprocess.Popen[bytes] | None = None
        self._line: socket.socket | None = None
        self._loaded = False
        self._importing = ""  # what the fork server is busy with, for its death notice
        self._reader: FrameReader | None = None
        self._words: dict[str, OutputTail] = {}
        self._exit_locks: dict[str, ExitLock] = {}
        self._pidfds: dict[str, int] = {}
        self._pids: dict[str, int] = {}
        self._answers: dict[str, asyncio.Future[int]] = {}  # host -> its pid; FORK_SERVER -> its number of threads
        self._ended: asyncio.Future[None] = self._loop.create_future()  # the fork server has ended
        self.statuses: dict[str, int] = {}  # of those that have ended

    async def start(self, preload: Sequence[str]) -> int:
        """Start the fork server and wait until it has imported `preload`. Returns its number of threads.

        Raises WorkerDiedError(FORK_SERVER) when an import fails. The fork server dies when the calling thread does.
        """
        if not sys.executable:
            raise WorkerDiedError(FORK_SERVER, "cannot start: this Python does not know its own executable (sys.executable is empty)")
        ours, theirs = socket.socketpair()
        words = self._words[FORK_SERVER] = OutputTail(FORK_SERVER, self._on_line)
        self._line, self._reader = ours, FrameReader(ours)
        environment = {**os.environ, MARKER: self._run_id, PARENT_MARKER: str(os.getpid())}
        environment.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # idle compute threads sleep: other processes need the cores
        environment["OPENBLAS_NUM_THREADS"] = "1"  # numpy's copy starts its threads on import, and a fork would lose them
        if "PYTHONPATH" in environment:
            environment[ORIGINAL_PATH] = environment["PYTHONPATH"]
        environment["PYTHONPATH"] = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        command = [sys.executable, "-P", "-m", "flowrt.processes.fork_server", str(theirs.fileno()), str(os.getpid()), *preload]
        with theirs:
            self._process = subprocess.Popen(  # noqa: ASYNC220  (its own watcher: works on every loop, in every thread)
                command,
                stdin=subprocess.DEVNULL,
                stdout=words.write_end,
                stderr=words.write_end,
                pass_fds=[theirs.fileno()],
                env=environment,
                start_new_session=True,  # a terminal's Ctrl-C is the launcher's to handle
            )
        words.given_away()
        ours.setblocking(False)
        self._loop.add_reader(ours.fileno(), self._on_readable)
        self._importing = f" while importing {', '.join(preload)}" if preload else ""
        num_threads = await self._answer(FORK_SERVER)
        self._importing = ""
        self._loaded = True
        return num_threads

    async def fork(self, host: str, workers: Sequence[str], worker: str, threads: int, log_level: str) -> tuple[int, list[socket.socket]]:
        """A new OS process running `worker` ("module:function") once per name. Returns its pid and our ends of the control connections.

        A process of this name that has ended, and whose end was told, is forgotten. Raises WorkerDiedError when the kernel refuses or
        the fork server is gone.
        """
        self.statuses.pop(host, None)
        self._pids.pop(host, None)
        if (former := self._words.pop(host, None)) is not None:
            former.close()
        words = self._words[host] = OutputTail(host, self._on_line)
        exit_lock = self._exit_locks[host] = ExitLock(host, lambda: self._on_gone(host))
        ours: list[socket.socket] = []
        theirs: list[socket.socket] = []
        try:
            for _ in workers:
                mine, other = socket.socketpair()
                ours.append(mine)
                theirs.append(other)
            fds = [words.write_end, *(line.fileno() for line in theirs), *([exit_lock.fd] if exit_lock.fd >= 0 else [])]
            request = Fork(
                host=host,
                workers=tuple(workers),
                worker=worker,
                threads=threads,
                log_level=log_level,
                holds_exit_lock=exit_lock.fd >= 0,
                num_fds=len(fds),
            )
            await self._send(request, fds)
            pid = await self._answer(host)
            exit_lock.given_away()
        except BaseException:
            exit_lock.close()
            for line in ours:
                line.close()
            raise
        finally:
            for line in theirs:
                line.close()
            if words.write_end >= 0:
                words.given_away()
        for line in ours:
            line.setblocking(False)
        return pid, ours

    async def kill(self, host: str, number: int) -> None:
        """Send a signal, if the process still lives."""
        if host not in self.statuses and FORK_SERVER not in self.statuses:
            with contextlib.suppress(WorkerDiedError):
                await self._send(Kill(host=host, signal=number))

    def kill_now(self, host: str) -> None:
        """SIGKILL, if the process still lives, without asking the fork server, which may be busy."""
        if (pidfd := self._pidfds.get(host)) is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        elif host in self._pids and host not in self.statuses:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(self._pids[host], signal.SIGKILL)

    def output_tail(self, host: str) -> tuple[str, ...]:
        """The last lines `host` wrote, oldest first."""
        words = self._words.get(host)
        return words.last if words is not None else ()

    async def aclose(self) -> None:
        """End our half of the line, upon which the fork server kills and reaps all it forked and ends; make sure of it. Idempotent."""
        try:
            if self._line is not None and not self._ended.done():
                with contextlib.suppress(TimeoutError, OSError):
                    self._line.shutdown(socket.SHUT_WR)
                    async with asyncio.timeout(_GRACE_SECONDS):
                        await self._ended
        finally:
            self.end_now()

    def end_now(self) -> None:
        """Kill all that was forked and all that those started, then the fork server. None of them runs when it returns. Idempotent.

        Blocks while they die, milliseconds as a rule, so that not even a cancelled caller leaves anything.
        """
        self._close_line()
        process, self._process = self._process, None
        if process is not None:
            if self._loaded:  # it serves: told by the end of its line, it ends everything and reaps it
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_GRACE_SECONDS)
            if process.poll() is None:  # not reaped, so the number of its group is still its own
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.kill()
                process.wait()
            for host, pidfd in self._pidfds.items():  # of a fork server that could not end them itself
                self._watch_no_more(pidfd)
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(pidfd, signal.SIGKILL)
                gone = select.poll()
                gone.register(pidfd, select.POLLIN)
                gone.poll(_GRACE_SECONDS * 1000)
                os.close(pidfd)
                _reap_adopted(self._pids[host])
            self._pidfds.clear()
            for pid in processes_marked(self._run_id):
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
                _reap_adopted(pid)
        for exit_lock in self._exit_locks.values():
            exit_lock.close()
        self._exit_locks.clear()
        for words in self._words.values():
            words.close()

    def _close_line(self) -> None:
        if self._line is not None:
            with contextlib.suppress(RuntimeError):
                self._loop.remove_reader(self._line.fileno())
            self._line.close()
            self._line = None
        if self._reader is not None:
            self._reader.close()

    async def _answer(self, host: str) -> int:
        if FORK_SERVER in self.statuses:
            raise self._lost()
        future: asyncio.Future[int] = self._loop.create_future()
        self._answers[host] = future
        try:
            return await future
        finally:
            del self._answers[host]

    async def _send(self, frame: Frame, fds: Sequence[int] = ()) -> None:
        data = encode(frame)
        while True:
            if self._line is None or FORK_SERVER in self.statuses:
                raise self._lost()
            try:
                sent = send_first(self._line, data, fds)
            except BlockingIOError:
                await self._wait_writable(self._line.fileno())
            except ConnectionError as error:
                raise self._lost() from error
            else:
                break
        if sent < len(data):
            await self._loop.sock_sendall(self._line, data[sent:])

    async def _wait_writable(self, fd: int) -> None:
        writable: asyncio.Future[None] = self._loop.create_future()
        self._loop.add_writer(fd, lambda: None if writable.done() else writable.set_result(None))
        try:
            await writable
        finally:
            self._loop.remove_writer(fd)

    def _on_readable(self) -> None:
        if self._line is None or self._reader is None:
            return
        try:
            open_still = self._reader.feed()
            while (body := self._reader.next_body()) is not None:
                self._on_report(decode_report(body), self._reader)
        except BlockingIOError:
            return
        except Exception as error:  # an event loop would log it and go on, and whoever awaits an answer would do so for ever
            self._on_broken_line(error)
            return
        if not open_still:
            self._loop.remove_reader(self._line.fileno())
            self._on_fork_server_end(self._loop.time() + _REAP_SECONDS)

    def _on_report(self, report: Loaded | Forked | NotForked | Exited, reader: FrameReader) -> None:
        if isinstance(report, Exited):
            self.statuses[report.host] = report.status
            if (pidfd := self._pidfds.pop(report.host, None)) is not None:
                self._watch_no_more(pidfd)
                os.close(pidfd)
            if (exit_lock := self._exit_locks.pop(report.host, None)) is not None:
                exit_lock.close()
            self._on_exit(report.host, report.status)
            return
        host = FORK_SERVER if isinstance(report, Loaded) else report.host
        if isinstance(report, Forked):
            self._pids[host] = report.pid
            if report.num_fds:
                (pidfd,) = reader.take_fds(report.num_fds)
                self._pidfds[host] = pidfd
                self._loop.add_reader(pidfd, self._on_pidfd, host, pidfd)
        answer = self._answers.get(host)
        if answer is None or answer.done():  # its caller was cancelled
            return
        if isinstance(report, NotForked):
            answer.set_exception(WorkerDiedError(host, f"could not be forked: {report.error}"))
        else:
            answer.set_result(report.pid if isinstance(report, Forked) else report.num_threads)

    def _on_pidfd(self, host: str, pidfd: int) -> None:
        self._watch_no_more(pidfd)  # it stays readable
        self._on_gone(host)

    def _watch_no_more(self, pidfd: int) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed already
            self._loop.remove_reader(pidfd)

    def _on_broken_line(self, error: Exception) -> None:
        """What the fork server says cannot be read any more: whoever waits hears why, and the run ends as if the fork server had."""
        assert self._line is not None
        self._loop.remove_reader(self._line.fileno())
        reason: Exception = WorkerDiedError(
            FORK_SERVER, f"cannot be understood: {type(error).__name__}: {error}", self.output_tail(FORK_SERVER)
        )
        if isinstance(error, MissingDescriptorsError) or (isinstance(error, OSError) and error.errno in NO_DESCRIPTOR):
            reason = UserError(too_few_descriptors())
        waiting = [answer for answer in self._answers.values() if not answer.done()]
        for answer in waiting:
            answer.set_exception(reason)
        if not self._ended.done():
            self._ended.set_result(None)
        if not waiting:  # nobody to tell it to but the run's owner
            self.statuses[FORK_SERVER] = -signal.SIGKILL
            self._on_exit(FORK_SERVER, self.statuses[FORK_SERVER])

    def _on_fork_server_end(self, deadline: float) -> None:
        """Its line ended: it is dying or dead, and all it forked with it. Looks again until its status can be had, or `deadline`."""
        if self._process is None:  # ended by us meanwhile
            return
        status = self._process.poll()
        if status is None and self._loop.time() < deadline:
            self._loop.call_later(_REAP_POLL_SECONDS, self._on_fork_server_end, deadline)
            return
        self.statuses[FORK_SERVER] = -signal.SIGKILL if status is None else status
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(self._lost())
        if not self._ended.done():
            self._ended.set_result(None)
        self._on_exit(FORK_SERVER, self.statuses[FORK_SERVER])

    def _lost(self) -> WorkerDiedError:
        return WorkerDiedError(
            FORK_SERVER, exit_text(self.statuses.get(FORK_SERVER, -signal.SIGKILL)) + self._importing, self.output_tail(FORK_SERVER)
        )
