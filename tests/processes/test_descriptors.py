"""Too few file descriptors: one error line before anything starts, and a refused start later."""

from __future__ import annotations

import asyncio
import errno
import os
import resource
import socket
import subprocess
from collections.abc import AsyncIterator

import pytest
from processes.backend_checks import Owner, close, spec

from flowrt.errors import UserError, WorkerDiedError
from flowrt.processes import descriptors
from flowrt.processes.descriptors import allow_connections, check_descriptors, check_front_end
from flowrt.processes.fork_server_client import LocalBackend
from flowrt.processes.frames import Forked, Loaded, encode


def test_the_need_is_known_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (32, 32))
    monkeypatch.setattr(resource, "setrlimit", lambda *_: None)  # else the limit of this whole process is lowered for good
    check_descriptors(2)
    with pytest.raises(UserError, match=r"RLIMIT_NOFILE is 32, about 56 are needed\); raise it: ulimit -n 1024"):
        check_descriptors(5)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    check_descriptors(5000)


@pytest.mark.parametrize(
    ("soft", "hard", "most", "leaving", "raised"),
    [
        (1024, 4096, 2048, 256, 2340),  # 20 are open, 16 are spare
        (1024, 1024, 865, 123, 1024),
        (128, 128, 81, 11, 128),
        (64, 64, 20, 8, 64),
        (40, 40, 2, 2, 40),
        (10, 10, 1, 1, 10),
        (1024, resource.RLIM_INFINITY, 2048, 256, 2340),
        (4096, 4096, 2048, 256, None),
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, 2048, 256, None),
    ],
)
def test_front_end_accepts_what_its_limit_allows(
    soft: int, hard: int, most: int, leaving: int, raised: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    changed = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: changed.append(limits))
    monkeypatch.setattr(descriptors, "_num_open", lambda: 20)
    assert allow_connections(2048) == (most, leaving)
    assert changed == ([] if raised is None else [(raised, hard)])


def test_a_soft_limit_is_raised_before_anything_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    changed: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (20, 4096))
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: changed.append(limits))
    check_descriptors(5)
    check_front_end()
    assert changed == [(56, 4096), (56, 4096)]
    monkeypatch.setattr(resource, "getrlimit", lambda _: (55, 55))
    with pytest.raises(UserError, match="RLIMIT_NOFILE is 55, about 56 are needed"):
        check_front_end()


class Server:
    """A backend whose fork server is this test."""

    def __init__(self) -> None:
        self.owner = Owner()
        self.backend = LocalBackend(f"descriptors of {os.getpid()}", self.owner, ())

    async def serve(self, monkeypatch: pytest.MonkeyPatch) -> None:
        popen = subprocess.Popen

        def start_sleep(command: list[str], *, pass_fds: list[int], **options: object) -> subprocess.Popen[bytes]:
            self.connection = socket.socket(fileno=os.dup(pass_fds[0]))
            return popen(["sleep", "60"])

        monkeypatch.setattr(subprocess, "Popen", start_sleep)
        opened = asyncio.ensure_future(self.backend.restart(60.0))
        await asyncio.sleep(0)
        monkeypatch.undo()
        await self.report(encode(Loaded(num_threads=1)))
        await opened

    async def report(self, *frames: bytes) -> None:
        for frame in frames:
            self.connection.sendall(frame)
        await asyncio.sleep(0)

    def close(self) -> None:
        self.connection.close()
        self.backend.kill_all()


@pytest.fixture
async def server(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Server]:
    server = Server()
    await server.serve(monkeypatch)
    yield server
    server.close()


async def test_a_frame_that_cannot_be_read_ends_the_waiting_start_and_loses_the_backend(server: Server) -> None:
    start = asyncio.ensure_future(server.backend.start(spec("a")))
    await server.report(b"\xff\xff\xff\xff")
    with pytest.raises(WorkerDiedError, match="cannot be understood"):
        await start
    await server.owner.changed.wait()
    (how,) = server.owner.lost
    assert how.startswith("cannot be understood")


async def test_a_process_without_a_descriptor_for_its_end_is_started_all_the_same(server: Server) -> None:
    start = asyncio.ensure_future(server.backend.start(spec("a")))
    await asyncio.sleep(0)
    child = subprocess.Popen(["sleep", "60"])
    await server.report(encode(Forked(number=1, pid=child.pid, num_fds=1)))  # the kernel dropped the descriptor
    process = await start
    process.kill()
    assert await server.owner.wait_exit(process) == "was killed by SIGKILL"
    assert child.wait() == 0, "it was reaped already"
    await close(process)


async def test_a_process_that_other_code_has_reaped_ends_with_an_unknown_status(server: Server) -> None:
    start = asyncio.ensure_future(server.backend.start(spec("a")))
    await asyncio.sleep(0)
    await server.report(encode(Forked(number=1, pid=1 << 22)))
    process = await start
    assert await server.owner.wait_exit(process) == "has ended with an unknown exit status"
    await close(process)


async def test_a_start_without_descriptors_is_refused_and_leaves_nothing(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    for module, name in ((socket, "socketpair"), (os, "pipe")):
        with monkeypatch.context() as patch:
            patch.setattr(module, name, refuse)
            with pytest.raises(UserError, match="RLIMIT_NOFILE"):
                await server.backend.start(spec("a"))
