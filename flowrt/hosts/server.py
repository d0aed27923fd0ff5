"""The host server: a process on each host but the launcher's, which forks workers there and relays their control connections.

It runs as `python -m flowrt.hosts.server`, started by an engine (engine.py). It reads one line, listens at the address of its host, and
serves the one launcher that knows the key. It forks through the same fork server as the launcher does on its own host, and reports what
that reports. It ends, and all its processes with it, when stdin ends, or when the connection of the launcher ends or is silent.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Callable
from functools import partial

import msgspec

from flowrt.errors import UserError, WorkerDiedError
from flowrt.graph.model import FORK_SERVER, GATEWAY
from flowrt.hosts.connection import HostConnection
from flowrt.hosts.key_exchange import public_key, shared_key
from flowrt.hosts.messages import (
    MODEL,
    AnyHostMessage,
    HostFailed,
    HostMessage,
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
from flowrt.hosts.model_copy import ModelFolder, has_model, receive_model, remove_left
from flowrt.hosts.sampling import RelayedWorker, Sampling
from flowrt.processes.fork_server import run_loop
from flowrt.processes.fork_server_client import LocalBackend
from flowrt.seams import Seams
from flowrt.system.process_backend import CONTROL_LIMITS, OpenBackend, ProcessBackend, ProcessSpec, WorkerProcess
from flowrt.transports.contract import Channel, Identity, Listener
from flowrt.transports.errors import TransportError
from flowrt.transports.wire.message import Message

CALL_SECONDS = 30.0  # time limit for the launcher to connect
FORK_SECONDS = 3.0  # a start that is cancelled after so long shows that the fork server does not respond: it is replaced
IMPORT_SECONDS = 60.0  # time limit for a new fork server to serve
RETRY_SECONDS = 1.0  # between two attempts to start one


class HostServer:
    """Serves the launcher that connects to `listener`. It is the owner of the host's process backend, see BackendOwner."""

    def __init__(self, start: HostStart, listener: Listener, seams: Seams, open_backend: OpenBackend) -> None:
        self._start_line, self._listener, self._seams, self._open_local = start, listener, seams, open_backend
        self._launcher: asyncio.Future[HostConnection] = asyncio.get_running_loop().create_future()
        self._backend: ProcessBackend | None = None
        self._processes: dict[int, WorkerProcess] = {}
        self._numbers: dict[WorkerProcess, int] = {}
        self._starts: dict[int, asyncio.Task[None]] = {}
        self._controls: dict[str, Channel] = {}  # that the launcher has not opened yet
        self._sampling = Sampling(seams)
        self._folders = contextlib.ExitStack()  # for a copy of the model
        self._model_channel: asyncio.Future[Channel] = asyncio.get_running_loop().create_future()

    async def run(self) -> None:
        """Serve until the launcher's connection ends. A cancelled call ends all processes too."""
        try:
            async with asyncio.TaskGroup() as self._tasks:
                self._tasks.create_task(self._accept())
                async with asyncio.timeout(CALL_SECONDS):
                    launcher = await self._launcher
                self._tasks.create_task(self._prepare())
                if self._start_line.is_watched:
                    self._tasks.create_task(self._sampling.run())
                await launcher.run(self._on_message)
                raise _LauncherLeftError
        except* (_LauncherLeftError, TimeoutError):
            pass
        finally:
            if self._backend is not None:
                self._backend.kill_all()
            self._folders.close()

    # Notices of the backend.

    def on_dying(self, process: WorkerProcess, how: str) -> None:
        if (number := self._numbers.get(process)) is not None:
            self._post(ProcessDying(number, how, process.output_tail()))

    def on_exited(self, process: WorkerProcess, how: str) -> None:
        if (number := self._numbers.pop(process, None)) is not None:
            self._post(ProcessEnded(number, how, process.output_tail()))
            del self._processes[number]
            for index in range(len(process.controls)):  # the launcher has cancelled its start
                if (control := self._controls.pop(f"{number}/{index}", None)) is not None:
                    self._tasks.create_task(control.aclose())

    def on_backend_lost(self, how: str) -> None:
        self.on_output(FORK_SERVER, how)
        self._tasks.create_task(self._restart_backend())

    def on_output(self, name: str, line: str) -> None:
        self._post(OutputLine(name, line))

    # Inside.

    def _post(self, message: HostMessage) -> None:
        if self._launcher.done():
            self._launcher.result().post(message)

    async def _prepare(self) -> None:
        """Get the model's files if this host does not have them, and open the backend."""
        start = self._start_line
        if not start.model_path or has_model(start.model_path):
            await self._open_backend("")
            return
        compute = self._seams.new_compute("model")
        try:
            await compute.run("remove", remove_left, self._start_line.load_seconds)  # beside the loop, whose heartbeats go on
            folder = ModelFolder()
            self._folders.callback(folder.remove)
            self._post(ModelRequest())
            async with await self._model_channel as channel:
                await receive_model(channel, compute, folder.path)
        except UserError as error:
            self._post(HostFailed(str(error), is_user=True))
        else:
            await self._open_backend(str(folder.path))
        finally:
            await compute.aclose()

    async def _open_backend(self, model_path: str) -> None:
        start = self._start_line
        run_id = f"{start.run_id}.{start.host}.{self._seams.new_incarnation()}"  # closing a backend ends the processes of its run id
        try:
            self._backend = await self._open_local(run_id, self, start.preload, start.num_processes, start.load_seconds)
        except (WorkerDiedError, UserError) as error:
            self._post(HostFailed(str(error)))
        else:
            self._post(HostReady(self._backend.num_threads, model_path))

    async def _restart_backend(self) -> None:
        while self._backend is not None:
            try:
                await self._backend.restart(IMPORT_SECONDS)
            except (WorkerDiedError, UserError) as error:
                self.on_output(FORK_SERVER, str(error))
                await self._seams.clock.sleep(RETRY_SECONDS)
            else:
                return

    def _on_message(self, message: AnyHostMessage) -> None:
        match message:
            case ProcessRequest(number=number) if self._backend is not None:
                self._starts[number] = self._tasks.create_task(self._start(self._backend, message))
            case ProcessKilled(number, gently):
                if (starting := self._starts.pop(number, None)) is not None:
                    starting.cancel()
                elif (process := self._processes.get(number)) is not None:
                    if gently:
                        self._tasks.create_task(process.terminate())
                    else:
                        process.kill()

    async def _start(self, backend: ProcessBackend, request: ProcessRequest) -> None:
        number, error, is_lost = request.number, "", False
        spec = ProcessSpec(request.name, request.workers, request.entry, request.threads, request.log_level, request.weights)
        began = self._seams.clock.now()
        try:
            process = await backend.start(spec)
        except asyncio.CancelledError:
            if self._seams.clock.now() - began > FORK_SECONDS:
                backend.kill_server()
            raise
        except WorkerDiedError as died:
            error, is_lost = died.reason if died.process == request.name else str(died), died.process == FORK_SERVER
        except UserError as refused:
            error = str(refused)
        finally:
            self._starts.pop(number, None)
        if error:
            self._post(ProcessRefused(number, error, is_lost))
            return
        self._processes[number], self._numbers[process] = process, number
        self._controls |= {f"{number}/{index}": control for index, control in enumerate(process.controls)}
        self._post(ProcessStarted(number, process.pid))

    async def _accept(self) -> None:
        while True:
            channel = await self._listener.accept()
            if channel.peer.name == GATEWAY and not self._launcher.done():
                self._launcher.set_result(HostConnection(channel, self._seams, self._start_line.dead_seconds))
            elif channel.peer.name == MODEL and not self._model_channel.done():
                self._model_channel.set_result(channel)
            else:
                self._tasks.create_task(self._relay(channel))

    async def _relay(self, remote: Channel) -> None:
        """Relay a worker's control connection to the launcher, until one of both ends ends it."""
        async with remote:
            name = remote.peer.name
            local = self._controls.pop(name, None)
            if local is None:
                return
            process = self._processes[int(name.partition("/")[0])]
            worker = self._sampling.workers[name] = RelayedWorker(process.pid, remote.send_nowait, self._seams)
            try:
                async with local, asyncio.TaskGroup() as tasks:
                    tasks.create_task(_pass_on(local, remote, worker.on_message))
                    tasks.create_task(_pass_on(remote, local))
            finally:
                del self._sampling.workers[name]


async def _pass_on(source: Channel, target: Channel, look: Callable[[Message], None] = lambda message: None) -> None:
    """Send each message that arrives, when `look` has seen it. After the last one, close the target: its peer receives everything sent
    before."""
    try:
        while True:
            message = await source.recv()
            look(message)
            await target.send(message)
    except TransportError:
        await target.aclose()


class _LauncherLeftError(Exception):
    """Ends the tasks of a host server."""


async def serve(start: HostStart, seams: Seams, open_backend: OpenBackend, reply: Callable[[bytes], None]) -> None:
    """Listen, reply, and serve one launcher."""
    private, transport = seams.new_key(), seams.transport(start.scheme)
    try:
        if start.version != (version := own_version()):
            raise UserError(f"has flowrt {version}, and the launcher's host {start.version}; install the same version on both")
        key = shared_key(private, start.public_key)
        listener = await transport.listen(transport.address_at(start.host_address), CONTROL_LIMITS, key, Identity(start.host))
    except (TransportError, UserError, ValueError) as error:
        reply(msgspec.json.encode(HostReply(error=str(error))))
        return
    async with listener:
        reply(msgspec.json.encode(HostReply(address=listener.address, public_key=public_key(private))))
        await HostServer(start, listener, seams, open_backend).run()


async def _serve_until_stdin_ends(start: HostStart) -> None:
    own, stdin = asyncio.current_task(), sys.stdin.fileno()
    assert own is not None

    def on_readable() -> None:
        if not os.read(stdin, 1 << 16):
            loop.remove_reader(stdin)  # it stays readable
            own.cancel()

    loop = asyncio.get_running_loop()
    loop.add_reader(stdin, on_readable)
    open_backend = partial(LocalBackend.open, host_address=start.host_address)
    with contextlib.suppress(asyncio.CancelledError):
        await serve(start, Seams(), open_backend, lambda line: print(line.decode(), flush=True))


def main() -> None:
    """Run the host server."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    run_loop(_serve_until_stdin_ends(msgspec.json.decode(sys.stdin.buffer.readline(), type=HostStart)))


if __name__ == "__main__":
    main()
