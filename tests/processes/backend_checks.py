"""Checks that every backend of worker processes (flowrt/system/process_backend.py) must pass, on the one that `open_backend` opens."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from flowrt.errors import WorkerDiedError
from flowrt.graph.model import FORK_SERVER
from flowrt.seams import Seams
from flowrt.system.process_backend import ProcessBackend, ProcessSpec, WorkerProcess
from flowrt.transports.contract import Channel, Identity
from flowrt.transports.errors import BrokenChannelError, EndOfChannel
from flowrt.transports.wire.message import Message


async def run_worker(control: Channel, seams: Seams) -> None:
    """Answers each message with its kind, until one says otherwise."""
    while (message := await control.recv()).kind != "leave":
        if message.kind == "fail":
            raise ValueError("as ordered")
        await control.send(Message(message.kind))


class Owner:
    """Keeps the notices."""

    def __init__(self) -> None:
        self.dying: list[WorkerProcess] = []
        self.known: dict[WorkerProcess, str] = {}  # before the exit; "": it is not known how
        self.exited: dict[WorkerProcess, str] = {}
        self.lost: list[str] = []
        self.changed = asyncio.Event()

    def on_dying(self, process: WorkerProcess, how: str) -> None:
        assert process not in self.exited
        self.known[process] = how
        self.dying.append(process)

    def on_exited(self, process: WorkerProcess, how: str) -> None:
        assert process not in self.exited
        assert self.known.get(process, "") in ("", how)
        self.exited[process] = how
        self.changed.set()

    def on_backend_lost(self, how: str) -> None:
        self.lost.append(how)
        self.changed.set()

    def on_output(self, name: str, line: str) -> None:
        return

    async def wait_exit(self, process: WorkerProcess) -> str:
        while process not in self.exited:
            self.changed.clear()
            await self.changed.wait()
        return self.exited[process]


Open = Callable[[Owner], Awaitable[ProcessBackend]]


def spec(name: str, *workers: str) -> ProcessSpec:
    return ProcessSpec(name, tuple(Identity(worker, "1") for worker in workers or (name,)), "processes.backend_checks:run_worker")


async def talk(process: WorkerProcess) -> None:
    for number, control in enumerate(process.controls):
        assert control.peer.name == process.spec.workers[number].name
        await control.send(Message(f"hello.{number}"))
        assert (await control.recv()).kind == f"hello.{number}"


async def close(*processes: WorkerProcess) -> None:
    for process in processes:
        for control in process.controls:
            await control.aclose()


async def check_workers_of_a_process_answer_and_its_end_is_reported(backend: ProcessBackend, owner: Owner) -> None:
    process = await backend.start(spec("pair", "one", "two"))
    await talk(process)
    for control in process.controls:
        await control.send(Message("leave"))
    assert await owner.wait_exit(process) == "exited with status 0"
    await close(process)


async def check_a_failing_worker_ends_its_process(backend: ProcessBackend, owner: Owner) -> None:
    process = await backend.start(spec("pair", "one", "two"))
    await talk(process)
    await process.controls[0].send(Message("fail"))
    assert await owner.wait_exit(process) == "exited with status 1"
    with pytest.raises((EndOfChannel, BrokenChannelError)):
        await process.controls[1].recv()
    await close(process)


async def check_signals(backend: ProcessBackend, owner: Owner) -> None:
    killed, terminated, spared = [await backend.start(spec(name)) for name in ("a", "b", "c")]
    for process in (killed, terminated, spared):
        await talk(process)
    killed.kill()
    assert await owner.wait_exit(killed) == "was killed by SIGKILL"
    await terminated.terminate()
    assert await owner.wait_exit(terminated) == "was killed by SIGTERM"
    for process in (killed, terminated):  # no-ops after the end
        process.kill()
        await process.terminate()
        assert isinstance(process.output_tail(), tuple)
    await talk(spared)
    assert spared not in owner.exited
    await close(killed, terminated, spared)


async def check_a_second_process_of_a_name(backend: ProcessBackend, owner: Owner) -> None:
    first = await backend.start(spec("same"))
    first.kill()
    second = await backend.start(spec("same"))  # the end of the first may not be reported yet
    await talk(second)
    assert await owner.wait_exit(first) == "was killed by SIGKILL"
    assert second not in owner.exited
    await close(first, second)


async def check_a_renamed_process(backend: ProcessBackend, owner: Owner) -> None:
    former, renamed = await backend.start(spec("former")), await backend.start(spec("standby"))
    former.kill()
    await owner.wait_exit(former)
    backend.rename(renamed, "former", (Identity("former", "2"),))
    assert (renamed.spec.name, renamed.spec.workers) == ("former", (Identity("former", "2"),))
    another = await backend.start(spec("standby"))
    await renamed.controls[0].send(Message("leave"))
    assert await owner.wait_exit(renamed) == "exited with status 0"
    assert another not in owner.exited
    await close(former, renamed, another)


async def check_a_cancelled_start_reports_nothing(backend: ProcessBackend, owner: Owner) -> None:
    for turns in range(5):
        start = asyncio.ensure_future(backend.start(spec("cancelled")))
        for _ in range(turns):
            await asyncio.sleep(0)
        start.cancel()
        with pytest.raises(asyncio.CancelledError):
            await start
    process = await backend.start(spec("kept"))
    await talk(process)
    assert owner.exited == {}
    await close(process)


async def check_the_end_of_the_backend(backend: ProcessBackend, owner: Owner) -> None:
    process = await backend.start(spec("a"))
    await talk(process)
    await backend.aclose()
    await backend.aclose()
    backend.kill_all()
    with pytest.raises((EndOfChannel, BrokenChannelError)):
        await process.controls[0].recv()
    with pytest.raises(WorkerDiedError, match=FORK_SERVER):
        await backend.start(spec("b"))
    assert (owner.exited, owner.lost) == ({}, [])
    await close(process)


CHECKS = (
    check_workers_of_a_process_answer_and_its_end_is_reported,
    check_a_failing_worker_ends_its_process,
    check_signals,
    check_a_second_process_of_a_name,
    check_a_renamed_process,
    check_a_cancelled_start_reports_nothing,
    check_the_end_of_the_backend,
)
Check = Callable[[ProcessBackend, Owner], Awaitable[None]]


async def run_check(check: Check, open_backend: Open) -> None:
    owner = Owner()
    backend = await open_backend(owner)
    assert backend.num_threads >= 1
    try:
        await check(backend, owner)
    finally:
        await backend.aclose()
