"""Too few file descriptors: said in one line before anything starts, and heard by whoever waits when it happens later."""

from __future__ import annotations

import os
import resource
import socket

import pytest

from flowrt.errors import UserError, WorkerDiedError
from flowrt.processes.descriptors import check_descriptors
from flowrt.processes.fork_server_client import ForkServerProcess
from flowrt.processes.frames import Forked, FrameReader, encode


def test_the_need_is_known_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (30, 30))
    check_descriptors(2)
    with pytest.raises(UserError, match=r"RLIMIT_NOFILE is 30, about 51 are needed\); raise it: ulimit -n 1024"):
        check_descriptors(5)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    check_descriptors(5000)


@pytest.mark.parametrize(
    ("said", "error", "text"),
    [
        (encode(Forked(host="a", pid=1, num_fds=1)), UserError, "RLIMIT_NOFILE"),  # the kernel dropped the descriptor
        (b"\xff\xff\xff\xff", WorkerDiedError, "cannot be understood"),
    ],
)
async def test_what_cannot_be_read_ends_the_wait(said: bytes, error: type[Exception], text: str) -> None:
    ended: list[str] = []
    fork_server = ForkServerProcess("run", lambda name, line: None, lambda host, status: ended.append(host))
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    with theirs:
        fork_server._line, fork_server._reader = ours, FrameReader(ours)
        fork_server._loop.add_reader(ours.fileno(), fork_server._on_readable)
        theirs.sendall(said)
        with pytest.raises(error, match=text):
            await fork_server._answer("a")
        assert ended == []
        fork_server.end_now()


async def test_what_cannot_be_read_while_nobody_waits_ends_the_run() -> None:
    ended: list[str] = []
    fork_server = ForkServerProcess("run", lambda name, line: None, lambda host, status: ended.append(host))
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    with theirs:
        fork_server._line, fork_server._reader = ours, FrameReader(ours)
        fork_server._loop.add_reader(ours.fileno(), fork_server._on_readable)
        theirs.sendall(b"\xff" * 8)
        os.sched_yield()
        fork_server._on_readable()
        assert ended == ["fork server"]
        fork_server.end_now()
