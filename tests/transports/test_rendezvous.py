"""The listener's table of callers: silent callers, evictions, and a process without free descriptors."""

from __future__ import annotations

import asyncio
import errno
import os
import re
import resource
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import msgspec
import pytest

from flowrt.transports.channel import rendezvous
from flowrt.transports.channel.peer_watch import PeerWatch
from flowrt.transports.channel.rendezvous import LocalEnd, Meeting, SocketListener, socket_address
from flowrt.transports.conformance.connection_checks import HERE, KEY, SMALL, THERE
from flowrt.transports.conformance.kit import num_descriptors, until, within
from flowrt.transports.contract import Listener
from flowrt.transports.errors import AddressError, HandshakeError, TransportError
from flowrt.transports.inproc import InprocChannel
from flowrt.transports.registry import get_transport, unavailable_reason
from flowrt.transports.wire.address import parse_address
from flowrt.transports.wire.handshake import EVICTED, Handshake

pytestmark = pytest.mark.skipif(get_transport("shm").unavailable_reason() is not None, reason="needs shared memory")
HOUR = 3600.0
PATIENT = msgspec.structs.replace(SMALL, silent_seconds=3600)


async def test_silent_callers_are_evicted_when_the_table_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "HANDSHAKE_SECONDS", HOUR)
    monkeypatch.setattr(rendezvous, "FULL_TABLE_SECONDS", 0.1, raising=False)
    async with await get_transport("shm").listen("shm://", SMALL, KEY, HERE) as listener:
        silent = [call(listener.address) for _ in range(2 * rendezvous.MAX_CALLERS)]
        await meet(listener)
        assert silent[0].recv(100) == EVICTED
        assert silent[0].recv(100) == b""
        assert listener.rejected >= rendezvous.MAX_CALLERS + 1
        close(silent)


async def test_a_slow_caller_keeps_its_place_while_the_table_has_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "MAX_CALLERS", 4)
    monkeypatch.setattr(rendezvous, "FULL_TABLE_SECONDS", 0.0, raising=False)
    async with await get_transport("shm").listen("shm://", SMALL, KEY, HERE) as listener:
        slow = [call(listener.address) for _ in range(2)]
        for _ in range(10):
            await meet(listener)
        for sock in slow:
            with pytest.raises(BlockingIOError):
                sock.recv(100)
        assert listener.rejected == 0
        close(slow)


async def test_a_caller_whose_proof_has_arrived_is_not_evicted() -> None:
    """The loop has yet to read the proof when the eviction is due."""

    def make_channel(meeting: Meeting) -> InprocChannel:
        meeting.sock.close()
        return InprocChannel(meeting.limits, meeting.peer)

    async with SocketListener(LocalEnd("shm", "proved", "", SMALL, KEY, HERE), make_channel) as listener:
        sock, handshake = call(listener.address), Handshake("connector", KEY, THERE, SMALL, scheme="shm")
        sock.send(handshake.start())
        proof = handshake.receive(await within(asyncio.get_running_loop().sock_recv(sock, 4096), "the listener's proof"))
        sock.send(proof)
        (caller,) = listener._callers
        caller.evict()
        assert (await within(listener.accept(), "accept")).peer == THERE
        sock.close()


async def test_an_evicted_caller_calls_again() -> None:
    with listening("busy") as calls:
        connecting = asyncio.ensure_future(get_transport("shm").connect("shm://busy", SMALL, KEY, THERE))
        loop = asyncio.get_running_loop()
        first, _ = await within(loop.sock_accept(calls), "the first call")
        first.send(EVICTED)
        first.close()
        second, _ = await within(loop.sock_accept(calls), "the second call")
        handshake = Handshake("listener", KEY, HERE, SMALL, scheme="shm")
        while not handshake.done:
            second.send(handshake.receive(await within(loop.sock_recv(second, 4096), "a frame")))
        second.send(b"\x01")
        async with await within(connecting, "connect") as channel:
            assert channel.peer == HERE
        second.close()


async def test_a_caller_that_is_evicted_again_and_again_gives_up() -> None:
    with listening("full") as calls:
        connecting = asyncio.ensure_future(get_transport("shm").connect("shm://full", SMALL, KEY, THERE))
        for _ in range(rendezvous.MAX_EVICTIONS):
            sock, _ = await within(asyncio.get_running_loop().sock_accept(calls), "a call")
            sock.send(EVICTED)
            sock.close()
        with pytest.raises(HandshakeError, match="too many callers"):
            await within(connecting, "connect")


@pytest.mark.parametrize("scheme", ["shm", "zmq", "ucx"])
async def test_a_channel_that_cannot_be_made_costs_one_connection(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when the error is not one that a transport expects. Nothing is left of the connection, as the leak check of the tests shows."""
    if (reason := unavailable_reason(scheme)) is not None:
        pytest.skip(reason)
    unexpected: list[type] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: unexpected.append(type(context.get("exception"))))
    async with await get_transport(scheme).listen(f"{scheme}://", SMALL, KEY, HERE) as listener:
        before = num_descriptors()
        with monkeypatch.context() as patch:
            patch.setattr(PeerWatch, "__init__", fail_at_listener)
            with pytest.raises(TransportError):
                await within(get_transport(scheme).connect(listener.address, SMALL, KEY, THERE), "connect")
        assert listener.rejected == 1
        await until(lambda: num_descriptors() <= before, "no descriptor is left")
        await meet(listener)
    assert unexpected == [ZeroDivisionError]


def fail_at_listener(watch: PeerWatch, sock: socket.socket, on_end: Callable[[str | None], None]) -> None:
    raise ZeroDivisionError


async def test_a_listener_without_descriptors_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "MIN_PAUSE_SECONDS", HOUR, raising=False)
    attempts = count_attempts(monkeypatch)
    async with await get_transport("shm").listen("shm://", SMALL, KEY, HERE) as listener:
        sock = call(listener.address)
        with no_descriptors():
            for _ in range(100):
                await asyncio.sleep(0)
        assert attempts == ["accept"]
        sock.close()


async def test_a_listener_accepts_again_once_there_are_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    attempts = count_attempts(monkeypatch)
    async with await get_transport("shm").listen("shm://", SMALL, KEY, HERE) as listener:
        sock = call(listener.address)
        with no_descriptors():
            while not attempts:  # noqa: ASYNC110  (a list wakes no task)
                await asyncio.sleep(0)
        await meet(listener)
        sock.close()


def count_attempts(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A list that grows with each attempt of a listener to accept."""
    attempts: list[str] = []
    on_call = SocketListener._on_call

    def count(listener: SocketListener) -> None:
        attempts.append("accept")
        on_call(listener)

    monkeypatch.setattr(SocketListener, "_on_call", count)
    return attempts


async def test_a_host_that_cannot_be_reached_yet_is_tried_for_silent_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel reports a host as unreachable for some seconds after the link to it is back."""
    loop = asyncio.get_running_loop()
    connect, failures = loop.sock_connect, [errno.EHOSTUNREACH, errno.ENETUNREACH]

    async def sock_connect(sock: socket.socket, address: Any) -> None:
        if failures:
            raise OSError(failures.pop(), f"Connect call failed {address}")
        await connect(sock, address)

    monkeypatch.setattr(loop, "sock_connect", sock_connect)
    async with await get_transport("zmq").listen("zmq://127.0.0.1:0?curve", PATIENT, KEY, HERE) as listener:
        async with await within(get_transport("zmq").connect(listener.address, PATIENT, KEY, THERE), "connect"):
            await (await within(listener.accept(), "accept")).aclose()
        assert not failures
        failures.append(errno.EHOSTUNREACH)
        with pytest.raises(AddressError, match=rf"^cannot connect to {re.escape(listener.address.partition('?')[0])}: No route to host$"):
            await get_transport("zmq").connect(listener.address, SMALL, KEY, THERE)


@contextmanager
def no_descriptors() -> Iterator[None]:
    """This process has none left."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    opened: list[int] = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 1, hard))
    try:
        with suppress(OSError):
            while True:
                opened.append(os.open("/dev/null", os.O_RDONLY))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for descriptor in opened:
            os.close(descriptor)


@contextmanager
def listening(name: str) -> Iterator[socket.socket]:
    """A socket where `shm://NAME` calls, without a listener behind it."""
    with socket.socket(socket.AF_UNIX) as calls:
        calls.bind(socket_address("shm", name)[1])
        calls.listen()
        calls.setblocking(False)
        yield calls


async def meet(listener: Listener) -> None:
    """Open and close one channel through `listener`."""
    scheme = parse_address(listener.address).scheme
    async with await within(get_transport(scheme).connect(listener.address, SMALL, KEY, THERE), "connect"):
        await (await within(listener.accept(), "accept")).aclose()


def call(address: str) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX)
    sock.setblocking(False)
    sock.connect(socket_address("shm", address.partition("://")[2])[1])
    return sock


def close(connections: list[socket.socket]) -> None:
    for connection in connections:
        connection.close()
