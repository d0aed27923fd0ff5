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
from flowrt.processes.descriptors import check_descriptors
from flowrt.processes.fork_server_client import LocalBackend
from flowrt.processes.frames import Exited, Forked, encode
from flowrt.processes.output_tail import OutputTail


def test_the_need_is_known_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (30, 30))
    check_descriptors(2)
    with pytest.raises(UserError, match=r"RLIMIT_NOFILE is 30, about 51 are needed\); raise it: ulimit -n 1024"):
        check_descriptors(5)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    check_descriptors(5000)


class Server:
    """A backend whose fork server is this test."""

    def __init__(self) -> None:
        self.owner = Owner()
        ours, self.connection = socket.socketpair()
        process = subprocess.Popen(["sleep", "60"])
        self.backend = LocalBackend("run", self.owner, process, ours, OutputTail("fork server", self.owner.on_output))

    async def report(self, *frames: bytes) -> None:
        for frame in frames:
            self.connection.sendall(frame)
        await asyncio.sleep(0)

    def close(self) -> None:
        self.connection.close()
        self.backend.kill_all()


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    server = Server()
    yield server
    server.close()


async def test_a_frame_that_cannot_be_read_ends_the_waiting_start(server: Server) -> None:
    start = asyncio.ensure_future(server.backend.start(spec("a")))
    await server.report(b"\xff\xff\xff\xff")
    with pytest.raises(WorkerDiedError, match="cannot be understood"):
        await start
    assert server.owner.lost == []


async def test_a_frame_that_cannot_be_read_while_no_start_waits_loses_the_backend(server: Server) -> None:
    server.backend._loaded.set_result(1)
    await server.report(b"\xff" * 8)
    await server.owner.changed.wait()
    assert server.owner.lost == ["was killed by SIGKILL"]


async def test_a_process_without_a_descriptor_for_its_end_is_started_all_the_same(server: Server) -> None:
    start = asyncio.ensure_future(server.backend.start(spec("a")))
    await asyncio.sleep(0)
    await server.report(encode(Forked(number=1, pid=1 << 22, num_fds=1)))  # the kernel dropped the descriptor
    process = await start
    process.kill()  # no such process
    await server.report(encode(Exited(number=1, status=3)))
    assert await server.owner.wait_exit(process) == "exited with status 3"
    await close(process)


async def test_a_start_without_descriptors_is_refused_and_leaves_nothing(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    for module, name in ((socket, "socketpair"), (os, "pipe")):
        with monkeypatch.context() as patch:
            patch.setattr(module, name, refuse)
            with pytest.raises(UserError, match="RLIMIT_NOFILE"):
                await server.backend.start(spec("a"))
