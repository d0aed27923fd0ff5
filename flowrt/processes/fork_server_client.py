"""The `local` backend: worker processes of this host, forked by a fork server.

`LocalBackend` owns descriptors, the fork server and the workers, but no task: all input arrives through readers of the running loop. It
works on any loop in any thread. It needs no main guard, because the fork server is a fresh interpreter that runs flowrt's own module
(fork_server.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Collection, Sequence

from flowrt.errors import UserError, WorkerDiedError
from flowrt.graph.model import FORK_SERVER
from flowrt.processes.adopted_processes import CAN_ADOPT, begin_adopting, end_adopting, reap_group, reap_orphans, wait_reaped
from flowrt.processes.descriptors import check_descriptors
from flowrt.processes.fork_server_process import ForkServerProcess, start_error
from flowrt.processes.frames import Exited, Forked, ForkRequest, Loaded, NotForked, Report
from flowrt.processes.leftover import processes_marked
from flowrt.processes.local_process import GRACE_SECONDS, LocalProcess
from flowrt.processes.output_tail import exit_text
from flowrt.processes.weight_files import WeightFiles
from flowrt.system.machine_limits import available_tasks
from flowrt.system.process_backend import BackendOwner, ProcessSpec, WorkerProcess
from flowrt.system.process_status import exit_status
from flowrt.transports.contract import HostAddress, Identity

MAX_WORKERS = 240  # of a process: a message to the fork server has at most 253 descriptors, one of each worker and some of the process
ORPHAN_SECONDS = 1.0  # between two looks for orphans that have ended


class LocalBackend:
    """A fork server and the processes that it and earlier ones forked, keyed by start number. See system/process_backend.py."""

    def __init__(self, run_id: str, owner: BackendOwner, preload: Sequence[str], host_address: HostAddress = HostAddress()) -> None:
        self._run_id, self._owner, self._preload, self._host_address = run_id, owner, tuple(preload), host_address
        self._loop = asyncio.get_running_loop()
        self._server: ForkServerProcess | None = None  # the latest
        self._groups: list[int] = []  # process groups of all fork servers
        self._is_closing = self._is_closed = False
        self._processes: dict[int, LocalProcess] = {}  # requested, perhaps not forked yet; not reaped yet
        self._ended_of: dict[str, LocalProcess] = {}  # by name: the latest that ended, whose output can still be read
        self._num_starts = 0
        self._reaped = asyncio.Event()  # set at each exit
        self._weight_files = WeightFiles()
        begin_adopting()
        self._orphan_timer = self._loop.call_later(ORPHAN_SECONDS, self._reap_orphans)

    @classmethod
    async def open(
        cls,
        run_id: str,
        owner: BackendOwner,
        preload: Sequence[str],
        num_processes: int,
        seconds: float,
        host_address: HostAddress = HostAddress(),
    ) -> LocalBackend:
        """Start a fork server and wait until it serves; see OpenBackend. The fork server dies when the calling thread ends.
        `host_address`: that of the workers' Seams."""
        check_descriptors(num_processes)
        check_tasks(num_processes)
        if not sys.executable:
            raise WorkerDiedError(FORK_SERVER, "cannot start: this Python does not know its own executable (sys.executable is empty)")
        backend = cls(run_id, owner, preload, host_address)
        try:
            await backend.restart(seconds)
        except BaseException:
            backend.kill_all()
            raise
        return backend

    num_threads = 1  # threads that the imports left running in the fork server: a fork copies only the forking one

    @property
    def pid(self) -> int:
        return self._server.pid if self._server is not None and self._server.is_serving else 0

    async def restart(self, seconds: float) -> None:
        if self._server is not None:
            self._server.close()
        self._server = server = ForkServerProcess(self._run_id, self._preload, self._owner.on_output, self._on_report, self._on_server_end)
        self._groups.append(server.pid)
        try:
            self.num_threads = await server.load(seconds)
        except BaseException:
            server.close()
            raise

    def kill_server(self) -> None:
        if self._server is not None:
            self._server.kill()

    async def start(self, spec: ProcessSpec) -> LocalProcess:
        if self._is_closing or self._server is None or not self._server.is_serving:
            raise WorkerDiedError(FORK_SERVER, exit_text(-signal.SIGKILL)) if self._server is None else self._server.lost()
        if len(spec.workers) > MAX_WORKERS:
            text = f"{spec.name} would have {len(spec.workers)} workers in one process, at most {MAX_WORKERS} are possible"
            raise UserError(f"{text}; spread them over more processes (deploy.processes)")
        self._num_starts = number = self._num_starts + 1
        try:
            descriptors = {each: fd for each in spec.weights if (fd := self._weight_files.of(each)) >= 0} | dict(spec.descriptors)
            process = LocalProcess(
                spec,
                self._owner.on_output,
                lambda: self._on_dying(number),
                lambda status: self._on_exited(number, status),
                [*descriptors.values()],
            )
        except OSError as error:
            raise start_error(spec.name, error) from error
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
            descriptors=tuple(descriptors),
            host_address=self._host_address,
            num_fds=len(process.fds),
        )
        self._server.request(request, process)
        try:
            await process.started
        except BaseException:
            await process.abandon()
            raise
        return process

    def rename(self, process: WorkerProcess, name: str, workers: tuple[Identity, ...]) -> None:
        assert isinstance(process, LocalProcess)
        self._forget(name)
        process.rename(name, workers)

    def release(self, name: str, weights: Collection[str]) -> None:
        self._forget(name)
        self._weight_files.keep(weights)

    def output_tail(self) -> tuple[str, ...]:
        return () if self._server is None else self._server.output_tail

    async def aclose(self) -> None:
        """Kill all processes and wait for their ends. Then call `kill_all`, which kills what is left after GRACE_SECONDS or a
        cancellation."""
        self._is_closing = True
        try:
            for process in self._processes.values():
                process.kill()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(GRACE_SECONDS):
                    while any(process.pid for process in self._processes.values()):
                        self._reaped.clear()
                        await self._reaped.wait()
        finally:
            self.kill_all()

    def kill_all(self) -> None:
        """Kill the fork server, all processes that it and earlier ones forked, and all that those started. Normally blocks for
        milliseconds. Idempotent."""
        if self._is_closed:
            return
        self._is_closing = self._is_closed = True
        self._orphan_timer.cancel()
        for process in self._processes.values():
            process.kill()
        if self._server is not None:
            self._server.close(0.0 if CAN_ADOPT else GRACE_SECONDS)
        for process in (*self._processes.values(), *self._ended_of.values()):
            process.kill_and_wait(self._loop)
        if self._kill_marked():
            self._kill_marked()  # a process found before may have been forking another
        for group in self._groups:  # what was adopted
            reap_group(group)
        end_adopting()
        self._weight_files.close()

    # Inside.

    def _reap_orphans(self) -> None:
        """Reap what ended workers had started, such as the tokenizer process of a front end. They are in the process group of their fork
        server. Not while a process is being forked: it may have ended before its pid is known."""
        self._orphan_timer = self._loop.call_later(ORPHAN_SECONDS, self._reap_orphans)
        known = {*self._groups, *(process.pid for process in self._processes.values())}
        if CAN_ADOPT and 0 not in known:
            for group in self._groups:
                reap_orphans(group, known)

    def _kill_marked(self) -> bool:
        """Kill and reap the living processes of the run that are not known here. False: there are none."""
        pids = processes_marked(self._run_id)
        for pid in pids:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
            wait_reaped(pid)
        return bool(pids)

    def _on_report(self, report: Report, pidfd: int) -> None:
        match report:
            case NotForked(number=number, error=error):
                process = self._processes.pop(number)
                process.close()
                if not process.started.done():
                    process.started.set_exception(WorkerDiedError(process.spec.name, f"could not be forked: {error}"))
            case Forked(number=number, pid=pid):
                self._processes[number].on_forked(pid, pidfd)
            case Exited(number=number, status=status):
                self._on_exited(number, status)
            case Loaded():
                pass

    def _on_exited(self, number: int, status: int | None) -> None:
        """A process was reaped."""
        process = self._processes.pop(number)
        process.note_exit(self._loop)
        process.end_controls()  # a child of it may hold them open
        self._reaped.set()
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
            status = exit_status(process.pid)
            self._owner.on_dying(process, "" if status is None else exit_text(status))
            process.end_controls()

    def _report_exit(self, process: LocalProcess, how: str) -> None:
        if process.is_reported and not self._is_closing:
            self._owner.on_exited(process, how)

    def _on_server_end(self, reason: UserError | WorkerDiedError) -> None:
        """The fork server has ended: fail the starts that wait for it, and then report the loss."""
        for number, process in list(self._processes.items()):
            if not process.pid:
                del self._processes[number]
                process.close()
                if not process.started.done():
                    process.started.set_exception(reason)
                    process.started.exception()  # it counts as retrieved: the caller may have left
        how = reason.reason if isinstance(reason, WorkerDiedError) else str(reason)
        self._loop.call_soon(self._report_loss, how)

    def _report_loss(self, how: str) -> None:
        if not self._is_closing:
            self._owner.on_backend_lost(how)


_LAUNCHER, _PER_PROCESS = 4, 2  # fork server, the process that forks for it, threads of the launcher; a process and its compute thread


def check_tasks(num_processes: int) -> None:
    """Raises UserError when the limit leaves too few tasks to start `num_processes` OS processes. They may start more threads than that."""
    left, needed = available_tasks(), _LAUNCHER + _PER_PROCESS * num_processes
    if left is not None and left < needed:
        text = f"too few processes and threads are allowed (pids.max of the container leaves {left}, at least {needed} are needed)"
        raise UserError(f"{text}; raise it, for example with --pids-limit, or use fewer processes")
