"""The ZeroMQ transport: strangers at its endpoints, invalid frames, immediate notice of deaths, and release of the context."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import socket
import struct
import threading
import time
from pathlib import Path

import pytest
from ipv6 import has_ipv6_loopback

from flowrt.transports.conformance import channel_checks as checks
from flowrt.transports.conformance.connection_checks import HERE, KEY, SMALL, THERE, pair_maker
from flowrt.transports.conformance.kit import check_numbered, numbered, opened, receive_all, within
from flowrt.transports.conformance.process_checks import other_process, threads_sleep
from flowrt.transports.contract import HostAddress, Identity, Limits
from flowrt.transports.errors import AddressError, BrokenChannelError, EndOfChannel, TransportError
from flowrt.transports.registry import get_transport, unavailable_reason
from flowrt.transports.wire.handshake import Handshake
from flowrt.transports.wire.message import Message, Tensor, TensorSpec
from flowrt.transports.zeromq import sockets as zeromq_sockets
from flowrt.transports.zeromq import transport as zeromq
from flowrt.transports.zeromq.transport import ZeroMQChannel

if unavailable_reason("zmq") is not None:
    pytest.skip(str(unavailable_reason("zmq")), allow_module_level=True)

import zmq
from zmq.utils import z85


@pytest.mark.parametrize("address", ["zmq://0.0.0.0:5555", "zmq://10.1.2.3:5555", "zmq://*:5555", "zmq://[::]:1", "zmq://host.example:80"])
async def test_only_this_host_without_encryption(address: str) -> None:
    for call in (get_transport("zmq").listen, get_transport("zmq").connect):
        with pytest.raises(AddressError, match=r"not on this host and would not be encrypted; write zmq://ADDRESS:PORT\?curve"):
            await call(address, SMALL, KEY, HERE)


@pytest.mark.parametrize(
    ("address", "text"),
    [
        ("zmq://0.0.0.0:5555?curve", "the one address that the others reach this host by"),
        ("zmq://[::]:5555?curve", "the one address that the others reach this host by"),
        ("zmq://[fe80::1]:5555?curve", "not a link-local one"),
        ("zmq://somewhere?curve", "for an IP address and a port"),
        ("zmq://::1:5555?curve", "for an IP address and a port"),
        ("zmq://127.0.0.1:0?plain", r"the only option is \?curve"),
        ("zmq://10.1.2.3:5555?", r"the only option is \?curve"),
    ],
)
async def test_addresses_of_encrypted_listeners(address: str, text: str) -> None:
    with pytest.raises(AddressError, match=text):
        await get_transport("zmq").listen(address, SMALL, KEY, HERE)


async def test_acknowledgements_overtake_payload() -> None:
    limits = Limits(capacity_messages=4)
    async with opened(pair_maker("zmq"), limits) as (one, two):
        assert isinstance(one, ZeroMQChannel)
        for number in range(4):
            assert one.send_nowait(numbered(number))
        assert not one.send_nowait(numbered(4))
        one._loop.remove_reader(one._descriptors[0])
        with pytest.MonkeyPatch.context() as patch:  # what `two` sends stays in libzmq's queue
            patch.setattr(one, "_read", lambda: None)
            assert two.send_nowait(numbered(0, 100_000))
            for _ in range(4):
                await within(two.recv(), "a message")
            await within(one.send(numbered(4)), "room")
        one._loop.add_reader(one._descriptors[0], one._read)
        one._read()
        check_numbered(await within(one.recv(), "the payload"), 0, 100_000)


@pytest.mark.parametrize("sent_bytes", [b"\0" * 15, b"\xff" * 16])
async def test_wrong_acknowledgements_break_the_channel(sent_bytes: bytes) -> None:
    async with opened(pair_maker("zmq")) as (one, two):
        assert isinstance(two, ZeroMQChannel)
        two._peer_watch._socket.send(sent_bytes)
        with pytest.raises(BrokenChannelError, match=r"acknowledgement|reports \d+ messages as taken"):
            await within(one.recv(), "the end")


async def test_the_context_goes_with_the_last_channel() -> None:
    async with opened(pair_maker("zmq")):
        assert zeromq.shared_context()._context is not None
    assert zeromq.shared_context()._context is None


async def test_the_context_goes_even_when_signals_come() -> None:
    before, over = signal.signal(signal.SIGUSR1, lambda number, frame: None), threading.Event()

    def disturb(thread: int = threading.get_ident()) -> None:
        while not over.wait(1e-4):
            signal.pthread_kill(thread, signal.SIGUSR1)

    disturber = threading.Thread(target=disturb)
    disturber.start()
    try:
        for _ in range(50):
            async with opened(pair_maker("zmq")):
                pass
    finally:
        over.set()
        disturber.join()
        signal.signal(signal.SIGUSR1, before)
    # The fixture that looks for descriptors left finds a context that is.


@pytest.mark.parametrize(
    "frames",
    [
        [b""],
        [b"x"],
        [b"\x09" + bytes(7)],
        [b"\x01" + bytes(7)],
        [b"\x01\0\0\0\xff\xff\xff\xff"],
        [b"\x02" + bytes(7) + b"x"],
        [b"\x02" + bytes(7) + b"\x01" * 16],
        [b"\x06" + bytes(7) + bytes(32)],
        [b"\x01" + bytes(7)] + [b"x"] * 100,
        [bytes(1 << 21)],  # more than libzmq is configured to take
    ],
    ids=["empty", "short", "kind", "envelope", "too long", "taken", "taken of nothing", "greeting again", "many frames", "too large"],
)
async def test_invalid_messages_break_the_channel(frames: list[bytes], loop_kind: str) -> None:
    async with opened(pair_maker("zmq")) as (one, two):
        await one.send(numbered(0))
        assert isinstance(one, ZeroMQChannel)
        one._pair.send_multipart(frames)
        check_numbered(await two.recv(), 0)
        with pytest.raises(BrokenChannelError):
            await within(two.recv(), "recv")


def wait_until_carried(peer: asyncio.subprocess.Process) -> None:
    """Until the threads of the peer and those of libzmq here have nothing left to do, without a turn of the loop."""
    looks = 0
    while looks < 20:
        time.sleep(0.002)
        looks = looks + 1 if threads_sleep(peer.pid) and threads_sleep(os.getpid()) else 0


async def test_messages_of_a_dead_peer_arrive_although_unread_at_its_death(loop_kind: str) -> None:
    async with other_process("zmq", "send five and hang") as (channel, peer):
        check_numbered(await within(channel.recv(), "the first of five"), 0, 30_000)
        wait_until_carried(peer)  # the other four
        peer.send_signal(signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):  # the loop's thread has reaped it
            os.waitid(os.P_PID, peer.pid, os.WEXITED | os.WNOWAIT)  # noqa: ASYNC222
        await receive_all(channel, 1, 5, 30_000)
        with pytest.raises(BrokenChannelError):
            await within(channel.recv(), "recv")


async def test_an_end_that_libzmq_reports_before_earlier_messages_loses_none(loop_kind: str) -> None:
    async with opened(pair_maker("zmq")) as (one, two):
        assert isinstance(two, ZeroMQChannel)
        await one.send(numbered(0))
        two._disconnect()
        check_numbered(await within(two.recv(), "recv"), 0)
        with pytest.raises(BrokenChannelError):  # not at once: no more comes
            await within(two.recv(), "recv")


async def test_stranger_at_the_endpoint_is_ignored(monkeypatch: pytest.MonkeyPatch, loop_kind: str) -> None:
    """Even one that guesses the endpoint and is there before the peer."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    stranger = context.socket(zmq.PAIR)
    stranger.set(zmq.LINGER, 0)
    watcher = stranger.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
    bind = zeromq.bind

    def bind_and_let_in(pair: zmq.Socket[bytes], host: str | None, ports: range) -> str:
        endpoint = bind(pair, host, ports)
        stranger.connect(endpoint)
        stranger.send(b"\x06" + bytes(7) + bytes(32))
        assert watcher.poll(5000), "the stranger is neither in nor refused"
        return endpoint

    monkeypatch.setattr(zeromq, "bind", bind_and_let_in)
    try:
        async with await get_transport("zmq").listen("zmq://", SMALL, KEY, HERE) as listener, asyncio.timeout(60):
            try:
                one = await get_transport("zmq").connect(listener.address, SMALL, KEY, THERE)
            except TransportError:
                return  # the stranger sits in the peer's place
            async with one, await listener.accept() as two:  # it was greeted, and yet too late to be let in
                await one.send(numbered(1, 5000))
                await receive_all(two, 1, 2, 5000)
    finally:
        stranger.disable_monitor()
        watcher.close()
        stranger.close()
        context.term()


def _data_endpoints() -> list[str]:
    return re.findall(r"@flowrt/zmq-data/([0-9a-f]+)", Path("/proc/net/unix").read_text())


async def test_endpoints_are_abstract_and_long() -> None:
    async with opened(pair_maker("zmq")):
        names = _data_endpoints()
        assert names
        assert all(len(name) == 32 for name in names)


async def test_a_death_is_noticed_by_libzmq_and_not_by_waiting(monkeypatch: pytest.MonkeyPatch, loop_kind: str) -> None:
    monkeypatch.setattr(zeromq, "DEATH_SECONDS", 1000.0)
    async with other_process("zmq", "hang") as (channel, peer):
        assert isinstance(channel, ZeroMQChannel)
        await channel.greeted  # a peer killed before that is noticed by its socket only
        peer.kill()
        with pytest.raises(BrokenChannelError, match="died"):
            await within(channel.recv(), "recv")


async def test_lost_rendezvous_socket_breaks_the_channel(monkeypatch: pytest.MonkeyPatch) -> None:
    """If libzmq does not report the end, the socket of the rendezvous does."""
    monkeypatch.setattr(zeromq, "DEATH_SECONDS", 0.05)
    monkeypatch.setattr(ZeroMQChannel, "_read_monitor", lambda channel: None)
    async with other_process("zmq", "hang") as (channel, peer):
        peer.kill()
        with pytest.raises(BrokenChannelError, match="died"):
            await within(channel.recv(), "recv")


async def test_unaccepted_channel_ends_in_order_with_a_late_greeting(monkeypatch: pytest.MonkeyPatch) -> None:
    """The listener's end closes before it has read what the connector sent."""
    read, late = ZeroMQChannel._read, asyncio.Event()

    def read_late(channel: ZeroMQChannel) -> None:
        if not channel._is_listener or late.is_set():
            read(channel)
        else:
            channel._loop.call_later(0.01, channel._read)

    monkeypatch.setattr(ZeroMQChannel, "_read", read_late)
    listener = await get_transport("zmq").listen("zmq://", SMALL, KEY, HERE)
    async with listener, await get_transport("zmq").connect(listener.address, SMALL, KEY, THERE) as forgotten:
        asyncio.get_running_loop().call_later(0.1, late.set)
        await listener.aclose()
        with pytest.raises(EndOfChannel):
            await forgotten.recv()


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="the system does not let a process choose")
@pytest.mark.parametrize(("seconds", "probed"), [(0, [0, 0]), (1, [1, 1000, 1, 1]), (9, [1, 9000, 3, 3])])
async def test_the_kernel_probes_a_silent_host_as_long_as_the_limits_say(seconds: int, probed: list[int]) -> None:
    keys = [(socket.SOL_SOCKET, socket.SO_KEEPALIVE)]
    keys += [(socket.IPPROTO_TCP, key) for key in (socket.TCP_USER_TIMEOUT, socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL)]
    async with opened(pair_maker("zmq", "zmq://127.0.0.1:0"), Limits(silent_seconds=seconds)) as ends:
        for end in ends:
            assert isinstance(end, ZeroMQChannel)
            assert [end._peer_watch._socket.getsockopt(*key) for key in keys[: len(probed)]] == probed


needs_curve = pytest.mark.skipif(not zmq.has("curve"), reason="this libzmq has no CURVE")
CURVE = "zmq://127.0.0.1:0?curve"


@needs_curve
@pytest.mark.skipif(not has_ipv6_loopback(), reason="this system has no IPv6")
@pytest.mark.parametrize("address", ["zmq://[::1]:0", "zmq://[::1]:0?curve", "zmq://[0:0::1]:0?curve"])
@pytest.mark.parametrize("check", [checks.check_order, checks.check_close])
async def test_channel_over_ipv6_passes_the_checks(address: str, check: checks.Check) -> None:
    await check(pair_maker("zmq", address))


def test_address_of_a_host_with_ipv6_alone() -> None:
    address = get_transport("zmq").address_at(HostAddress(address="fd00::5", ports="7000-7099"))
    assert address == "zmq://[fd00::5]:0?curve:7000-7099"


@needs_curve
@pytest.mark.parametrize(
    "check", [checks.check_order, checks.check_bounds, checks.check_close, checks.check_lifetime, checks.check_close_both]
)
async def test_encrypted_channel_passes_the_checks(check: checks.Check, loop_kind: str) -> None:
    await check(pair_maker("zmq", CURVE))
    assert zeromq.shared_context().authenticator is None  # gone with the last encrypted channel


@needs_curve
def test_encrypted_channels_of_a_thread_outlive_the_loop_of_another() -> None:
    """As of a graph in a notebook that is started while another is up, which is then closed."""

    async def hold(is_open: threading.Event, ends: threading.Event) -> None:
        async with opened(pair_maker("zmq", CURVE)):
            is_open.set()
            await asyncio.to_thread(ends.wait)

    async def open_one_more(first: threading.Thread, ends: threading.Event) -> None:
        async with opened(pair_maker("zmq", CURVE)):
            ends.set()
            first.join()
            async with opened(pair_maker("zmq", CURVE)) as (one, two):
                await within(one.send(numbered(0, 10)), "send")
                check_numbered(await within(two.recv(), "receive"), 0, 10)

    is_open, ends = threading.Event(), threading.Event()
    first = threading.Thread(target=lambda: asyncio.run(hold(is_open, ends)))
    first.start()
    assert is_open.wait(20)
    try:
        asyncio.run(open_one_more(first, ends))
    finally:
        ends.set()
        first.join()


@needs_curve
async def test_the_next_handler_of_keys_can_bind_at_once_and_one_that_cannot_leaves_no_socket() -> None:
    """A process may open an encrypted channel when its last one has just closed."""
    context = zmq.Context()
    for _ in range(300):
        zeromq_sockets.Authenticator(context).close()
    first = zeromq_sockets.Authenticator(context)
    with pytest.raises(zmq.ZMQError):
        zeromq_sockets.Authenticator(context)
    first.close()
    context.term()  # waits for each open socket


async def test_encrypted_channel_takes_the_largest_message(loop_kind: str) -> None:
    """A tensor of the limit is longer than that when it is encrypted."""
    limits, nbytes = Limits(max_message_bytes=1 << 18), 1 << 18
    async with await get_transport("zmq").listen(CURVE, limits, KEY, HERE) as listener:
        accepting = asyncio.ensure_future(listener.accept())
        async with await get_transport("zmq").connect(listener.address, limits, KEY, THERE) as one, await accepting as two:
            await one.send(numbered(1, nbytes))
            await receive_all(two, 1, 2, nbytes)


@needs_curve
@pytest.mark.parametrize("ours", ["", "?curve"])
async def test_one_end_alone_cannot_decide_about_encryption(ours: str) -> None:
    theirs = "" if ours else "?curve"
    async with await get_transport("zmq").listen(f"zmq://127.0.0.1:0{theirs}", SMALL, KEY, HERE) as listener:
        with pytest.raises(TransportError):
            await get_transport("zmq").connect(listener.address.partition("?")[0] + ours, SMALL, KEY, THERE)
        assert listener.rejected == 1


def _event_of(watcher: zmq.Socket[bytes]) -> int:
    return int(struct.unpack("=Hi", watcher.recv_multipart()[0])[0])


def _stranger(monkeypatch: pytest.MonkeyPatch, keys: zeromq_sockets.CurveKeys | None) -> tuple[list[str], list[zmq.Socket[bytes]]]:
    """A stranger that finds the endpoint of a channel before its peer does, knows the server's key, and connects with its own `keys`."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    stranger = context.socket(zmq.PAIR)
    stranger.set(zmq.LINGER, 0)
    failures = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    watcher = stranger.get_monitor_socket(zmq.EVENT_CONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | failures | zmq.EVENT_DISCONNECTED)
    endpoints: list[str] = []
    derive, bind = zeromq_sockets.CurveKeys.derive, zeromq.bind

    def seen(handshake: Handshake) -> zeromq_sockets.CurveKeys:
        made = derive(handshake)
        if keys is not None and not endpoints:
            stranger.set(zmq.CURVE_SERVERKEY, zeromq_sockets.public_key(made.server))
            stranger.set(zmq.CURVE_SECRETKEY, z85.encode(keys.client))
            stranger.set(zmq.CURVE_PUBLICKEY, zeromq_sockets.public_key(keys.client))
        return made

    def bind_and_report(pair: zmq.Socket[bytes], host: str | None, ports: range) -> str:
        endpoints.append(bind(pair, host, ports))
        stranger.connect(endpoints[-1])
        assert watcher.poll(60_000), "the kernel accepts the connection"
        assert _event_of(watcher) == zmq.EVENT_CONNECTED
        stranger.send(b"\x06" + bytes(7) + bytes(32))
        return endpoints[-1]

    monkeypatch.setattr(zeromq.CurveKeys, "derive", seen)
    monkeypatch.setattr(zeromq, "bind", bind_and_report)
    return endpoints, [stranger, watcher]


@needs_curve
@pytest.mark.parametrize("keys", [None, zeromq_sockets.CurveKeys(b"s" * 32, b"c" * 32)], ids=["no keys", "other keys"])
@pytest.mark.parametrize("handler", ["alive", "dead"])
async def test_an_encrypted_channel_lets_in_its_own_peer_only(
    monkeypatch: pytest.MonkeyPatch, keys: zeromq_sockets.CurveKeys | None, handler: str
) -> None:
    """Also when the authentication handler of libzmq has died: then no peer is admitted, where libzmq by itself would admit every peer."""
    requested = asyncio.Event()
    if handler == "dead":
        monkeypatch.setattr(zeromq_sockets.Authenticator, "_respond", lambda authenticator: requested.set())
    endpoints, sockets = _stranger(monkeypatch, keys)
    stranger, watcher = sockets
    try:
        async with await get_transport("zmq").listen(CURVE, SMALL, KEY, HERE) as listener:
            connecting = asyncio.ensure_future(get_transport("zmq").connect(listener.address, SMALL, KEY, THERE))
            if handler == "dead":
                await within(requested.wait(), "libzmq requests the admission of a peer")
                assert not connecting.done() or isinstance(connecting.exception(), TransportError)
                connecting.cancel()
                await asyncio.wait([connecting])
                two = await listener.accept()
                await two.aclose()
            else:
                async with asyncio.timeout(60):
                    one = await connecting
                    two = await listener.accept()
                async with one, two:
                    await one.send(numbered(1, 20_000))
                    await receive_all(two, 1, 2, 20_000)
        assert endpoints
        sent = []
        while watcher.poll(20_000 if not sent else 0):  # its connection ends, if only with the listener
            sent.append(_event_of(watcher))
        assert sent
        assert zmq.EVENT_HANDSHAKE_SUCCEEDED not in sent
    finally:
        stranger.disable_monitor()
        watcher.close()
        stranger.close()
        stranger.context.term()


@needs_curve
@pytest.mark.parametrize("option", ["", pytest.param("?curve", marks=needs_curve)])
async def test_what_goes_over_the_wire_is_encrypted(monkeypatch: pytest.MonkeyPatch, option: str) -> None:
    """A proxy between the two ends sees every byte: all of the payload without encryption, none with it."""
    secret = b"these words must not be readable on the way"
    seen = bytearray()
    proxies: list[Proxy] = []
    bind = zeromq.bind

    def through_proxy(pair: zmq.Socket[bytes], host: str | None, ports: range) -> str:
        proxies.append(Proxy(int(bind(pair, host, ports).rpartition(":")[2]), seen))
        return f"tcp://127.0.0.1:{proxies[0].port}"

    monkeypatch.setattr(zeromq, "bind", through_proxy)
    one, two = await pair_maker("zmq", f"zmq://127.0.0.1:0{option}")(SMALL)
    async with one, two:
        await one.send(Message("data", tensors=(Tensor(TensorSpec("uint8", (len(secret),)), secret),)))
        assert bytes((await two.recv()).tensors[0].data) == secret  # type: ignore[call-overload]
    await proxies[0].aclose()
    assert len(seen) > len(secret)
    assert (secret in seen) == (option == "")


class Proxy:
    """Carries bytes between whoever connects to `port` and 127.0.0.1:target, and keeps them all in `seen`."""

    def __init__(self, target: int, seen: bytearray) -> None:
        self._loop = asyncio.get_running_loop()
        self._server = socket.create_server(("127.0.0.1", 0))
        self._server.setblocking(False)
        self.port = self._server.getsockname()[1]
        self._target = target
        self._seen = seen
        self._task = asyncio.ensure_future(self._serve())

    async def _serve(self) -> None:
        here, _ = await self._loop.sock_accept(self._server)
        with here, socket.socket() as there:
            for sock in (here, there):
                sock.setblocking(False)
            await self._loop.sock_connect(there, ("127.0.0.1", self._target))
            async with asyncio.TaskGroup() as group:
                group.create_task(self._carry(here, there))
                group.create_task(self._carry(there, here))

    async def _carry(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := await self._loop.sock_recv(source, 65536):
                self._seen += data
                await self._loop.sock_sendall(target, data)
            target.shutdown(socket.SHUT_WR)

    async def aclose(self) -> None:
        self._task.cancel()
        await asyncio.wait([self._task])
        self._server.close()


async def test_a_process_that_comes_back_under_its_name_is_another_peer() -> None:
    """No black hole: the old incarnation's channel and the new one's have sockets of their own."""
    transport = get_transport("zmq")
    async with await transport.listen("zmq://", SMALL, KEY, HERE) as listener:
        channels = []
        for incarnation in ("1", "2"):
            one = await transport.connect(listener.address, SMALL, KEY, Identity("worker", incarnation))
            channels.append((one, await listener.accept()))
        for number, (one, two) in enumerate(channels):
            assert two.peer == Identity("worker", str(number + 1))
            await one.send(numbered(number))
            await receive_all(two, number, number + 1)
        for pair in channels:
            for channel in pair:
                await channel.aclose()
