"""The launcher's view of one other host: its host server, and the processes that it has started there."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec
from msgspec.structs import replace

from flowrt.errors import UserError, WorkerDiedError
from flowrt.graph.model import FORK_SERVER, GATEWAY
from flowrt.hosts.connection import HostConnection
from flowrt.hosts.key_exchange import public_key, shared_key
from flowrt.hosts.messages import (
    MODEL,
    AnyHostMessage,
    HostFailed,
    HostReady,
    HostReply,
    HostStart,
    ModelRequest,
    OutputLine,
    ProcessDying,
    ProcessEnded,
    ProcessKilled,
    ProcessRefused,
    ProcessRequest,
    ProcessStarted,
    own_version,
)
from flowrt.hosts.model_copy import send_model
from flowrt.seams import Seams
from flowrt.system.clock_offset import ClockExchange, ClockOffset
from flowrt.system.host_engine import HostEngine, HostProcess
from flowrt.system.process_backend import CONTROL_LIMITS, BackendOwner, ProcessSpec
from flowrt.transports.contract import Channel, HostAddress, Identity
from flowrt.transports.errors import TransportError

CONNECT_SECONDS = 10.0  # time limit of the connection to a host server
END_SECONDS = 0.5  # within which the end of a host server is known, after a connection to it has failed

Spawn = Callable[..., asyncio.Task[None]]


@dataclass(frozen=True)
class HostTerms:
    """What all hosts of a run have in common. `spawn` creates tasks, which the run ends when it ends itself. `seconds`: time limit for a
    host to be ready, since the latest progress. `is_watched`: the run has a monitor. `model_path`: of the model's files; "": none.
    `host_address`: of the launcher's host; another host has an address of its own."""

    run_id: str
    scheme: str
    spawn: Spawn
    preload: tuple[str, ...]
    seconds: float
    dead_seconds: float
    is_watched: bool
    model_path: str
    host_address: HostAddress


class RemoteProcess:
    """One process on another host; see flowrt.system.process_backend.WorkerProcess."""

    pid = 0  # of no process of this host

    def __init__(self, spec: ProcessSpec, signal: Callable[[bool], None], clocks: ClockExchange, model_path: str) -> None:
        self.spec, self._signal, self._clocks, self.model_path = spec, signal, clocks, model_path
        self.controls: tuple[Channel, ...] = ()
        self.tail: tuple[str, ...] = ()
        self.started: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.early: list[Callable[[], None]] | None = []  # notices that came before `start` has returned this; None: it has

    @property
    def clock_offset(self) -> ClockOffset:
        return self._clocks.offset

    def kill(self) -> None:
        self._signal(False)

    async def terminate(self) -> None:
        self._signal(True)

    def output_tail(self) -> tuple[str, ...]:
        return self.tail

    def end_controls(self, reason: str) -> None:
        for control in self.controls:
            control.abort(reason)


class RemoteHost:
    """`open` starts its host server. When that is lost, all its processes are, and the next `start` of one begins to open it again."""

    def __init__(self, name: str, num_processes: int, engine: HostEngine, terms: HostTerms, owner: BackendOwner, seams: Seams) -> None:
        self.name, self._num_processes = name, num_processes
        self._engine, self._terms, self._owner, self._seams = engine, terms, owner, seams
        self._connection: HostConnection | None = None  # while its host server is ready
        self._key, self._address, self._how_lost = b"", "", "is not open"
        self._processes: dict[int, RemoteProcess] = {}
        self._num_starts = 0
        self._serving: asyncio.Task[None] | None = None
        self._reopening: asyncio.Task[None] | None = None
        self._copying: asyncio.Task[None] | None = None  # the model to it
        self._on_progress: Callable[[], None] = lambda: None
        self._model_path = ""  # where this host has the model's files, if elsewhere than the launcher's
        self.num_threads = 1

    async def open(self) -> None:
        """Start the host server and wait until it can fork. The time limit begins again with each part of a model that is copied to it.
        Raises UserError or WorkerDiedError."""
        seconds = self._terms.seconds
        try:
            async with asyncio.timeout(seconds) as limit:
                self._on_progress = lambda: limit.reschedule(asyncio.get_running_loop().time() + seconds)
                await self._open()
        except TimeoutError:
            raise WorkerDiedError(self.name, f"was not ready within {seconds:g} s") from None
        finally:
            if self._copying is not None:
                self._copying.cancel()

    async def _open(self) -> None:
        private, terms, self._copying = self._seams.new_key(), self._terms, None
        server = await self._engine.open_host(self.name)
        start = HostStart(
            version=own_version(),
            run_id=terms.run_id,
            host=self.name,
            host_address=replace(terms.host_address, address=server.address),
            scheme=terms.scheme,
            public_key=public_key(private),
            preload=terms.preload,
            num_processes=self._num_processes,
            load_seconds=terms.seconds,
            dead_seconds=terms.dead_seconds,
            is_watched=terms.is_watched,
            model_path=terms.model_path,
        )
        try:
            channel = await self._connect(server, await server.start(msgspec.json.encode(start)), private)
            ready: asyncio.Future[HostReady] = asyncio.get_running_loop().create_future()
            connection = HostConnection(channel, self._seams, terms.dead_seconds)
            self._serving = self._terms.spawn(self._serve(server, connection, ready), name=f"host server of {self.name}")
            is_ready = await ready
            self.num_threads, self._model_path = is_ready.num_threads, is_ready.model_path
            self._connection = None if self._serving.done() else connection
        except BaseException:
            server.kill()
            raise

    async def start(self, spec: ProcessSpec) -> RemoteProcess:
        """See ProcessBackend.start."""
        self._num_starts = number = self._num_starts + 1
        try:
            connection = self._connection or await self._open_again()
            signal = partial(self._signal, connection, number)
            process = RemoteProcess(spec, signal, connection.clocks, self._model_path)
            self._processes[number] = process
            connection.post(ProcessRequest(number, spec.name, spec.workers, spec.entry, spec.threads, spec.log_level, spec.weights))
            await process.started
            process.controls = await self._open_controls(number, spec.workers)
        except BaseException as error:
            if (abandoned := self._processes.pop(number, None)) is not None:
                abandoned.kill()
            if isinstance(error, TransportError):
                raise WorkerDiedError(spec.name, f"was started by {self.name}, and cannot be reached: {error}") from None
            raise
        asyncio.get_running_loop().call_soon(self._release, process)
        return process

    async def aclose(self) -> None:
        """End the connection, with which all processes of the host end. Idempotent."""
        tasks = [task for task in (self._reopening, self._serving, self._copying) if task is not None]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        self.end_controls()

    def end_controls(self) -> None:
        for process in self._processes.values():
            process.end_controls("the run has ended")

    # Inside.

    async def _connect(self, server: HostProcess, line: bytes, private: bytes) -> Channel:
        """Open the connection to a new host server, which has replied with this line."""
        try:
            reply = msgspec.json.decode(line, type=HostReply)
        except msgspec.DecodeError:
            how = f"replied {line[:80]!r}" if line else "ended before it replied"
            raise WorkerDiedError(self.name, f"{how}; can it run python -m flowrt.hosts.server?") from None
        if reply.error:
            raise UserError(f"{self.name}: {reply.error}")
        try:
            self._key, self._address = shared_key(private, reply.public_key), reply.address
        except ValueError as error:
            raise WorkerDiedError(self.name, f"replied what no host server does: {error}") from None
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                return await self._dial(GATEWAY)
        except (TimeoutError, TransportError) as error:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(END_SECONDS):
                    raise WorkerDiedError(self.name, await server.wait()) from None
            reason = str(error) or f"no answer within {CONNECT_SECONDS:g} s"
            text = f"{self.name} cannot be reached at {self._address} from {self._engine.address}: {reason}"
            raise UserError(f"{text}; let TCP connections between these two pass") from None

    async def _dial(self, name: str) -> Channel:
        transport = self._seams.transport(self._terms.scheme)
        return await transport.connect(self._address, CONTROL_LIMITS, self._key, Identity(name))

    async def _open_controls(self, number: int, workers: Sequence[Identity]) -> tuple[Channel, ...]:
        controls: list[Channel] = []
        try:
            for index, worker in enumerate(workers):
                controls.append(await self._dial(f"{number}/{index}"))
                controls[-1].peer = worker
        except BaseException:
            for control in controls:
                await control.aclose()
            raise
        return tuple(controls)

    def _signal(self, connection: HostConnection, number: int, gently: bool) -> None:
        connection.post(ProcessKilled(number, gently))

    def _release(self, process: RemoteProcess) -> None:
        """Report what has happened since the process was started: `start` has returned it now."""
        early, process.early = process.early or [], None
        for notice in early:
            notice()

    async def _serve(self, server: HostProcess, connection: HostConnection, ready: asyncio.Future[HostReady]) -> None:
        """Receive from the host server until it is lost; then all its processes are."""
        async with asyncio.TaskGroup() as tasks:
            ends = [
                tasks.create_task(server.wait(), name=f"end of {self.name}"),
                tasks.create_task(connection.run(partial(self._on_message, ready)), name=f"connection to {self.name}"),
            ]
            try:
                await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
                how = next(task.result() for task in ends if task.done())
            finally:
                server.kill()
                for task in ends:
                    task.cancel()
        self._connection, self._how_lost = None, how
        if not ready.done():
            ready.set_exception(WorkerDiedError(self.name, how))
            ready.exception()  # it counts as retrieved: the caller may have left
        while self._processes:
            _, process = self._processes.popitem()
            if not process.started.done():
                process.started.set_exception(WorkerDiedError(process.spec.name, f"was not started: {self.name} {how}"))
            process.end_controls(f"{self.name} {how}")
            self._report(process, partial(self._owner.on_exited, process, f"was lost with {self.name}, which {how}"))

    def _on_message(self, ready: asyncio.Future[HostReady], message: AnyHostMessage) -> None:
        match message:
            case HostReady() if not ready.done():
                ready.set_result(message)
            case HostFailed(error, is_user) if not ready.done():
                ready.set_exception(UserError(f"{self.name}: {error}") if is_user else WorkerDiedError(self.name, error))
            case ModelRequest() if self._terms.model_path and self._copying is None:
                self._copying = self._terms.spawn(self._send_model(ready), name=f"model for {self.name}")
            case OutputLine(name, line):
                self._owner.on_output(f"{self.name} {name}", line)
            case ProcessStarted(number=number) | ProcessRefused(number=number) | ProcessDying(number=number) | ProcessEnded(number=number):
                if (process := self._processes.get(number)) is not None:
                    self._on_notice(process, message)

    def _on_notice(self, process: RemoteProcess, message: ProcessStarted | ProcessRefused | ProcessDying | ProcessEnded) -> None:
        match message:
            case ProcessStarted() if not process.started.done():
                process.started.set_result(None)
            case ProcessRefused(number, error, is_fork_server_lost):
                del self._processes[number]
                if not process.started.done():
                    process.started.set_exception(WorkerDiedError(FORK_SERVER if is_fork_server_lost else process.spec.name, error))
            case ProcessDying(_, how, tail):
                process.tail = tail
                self._report(process, partial(self._owner.on_dying, process, how))
            case ProcessEnded(number, how, tail):
                del self._processes[number]
                process.tail = tail
                self._report(process, partial(self._owner.on_exited, process, how))

    def _report(self, process: RemoteProcess, notice: Callable[[], None]) -> None:
        if process.early is None:
            notice()
        else:
            process.early.append(notice)

    async def _send_model(self, ready: asyncio.Future[HostReady]) -> None:
        compute = self._seams.new_compute("model")
        try:
            async with await self._dial(MODEL) as channel:
                await send_model(Path(self._terms.model_path), channel, compute, self._on_progress)
        except UserError as error:
            if not ready.done():
                ready.set_exception(error)
        except TransportError:  # the host server reports why, or is lost
            pass
        finally:
            await compute.aclose()

    async def _open_again(self) -> HostConnection:
        """Open the lost host, and wait for it. The attempt goes on when the caller leaves; there is one at a time. The restart policy of
        the host's processes decides when another one begins."""
        if self._reopening is None or self._reopening.done():
            self._reopening = self._terms.spawn(self._reopen(), name=f"reopening {self.name}")
        await asyncio.wait([self._reopening])
        if self._connection is None:
            raise WorkerDiedError(self.name, self._how_lost)
        return self._connection

    async def _reopen(self) -> None:
        try:
            await self.open()
        except WorkerDiedError as error:
            self._how_lost = error.reason
        except UserError as error:
            self._how_lost = f"cannot be used: {error}"
