"""Checks listening, connecting, keys, identities, dead processes and leaks; each check takes a scheme."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, TypeAlias

from flowrt.transports.conformance.kit import (
    MakePair,
    check_numbered,
    expect,
    expect_error,
    num_descriptors,
    numbered,
    receive_all,
    send_all,
    until,
    until_waiting,
    within,
)
from flowrt.transports.contract import Channel, Identity, Limits, Listener
from flowrt.transports.errors import AddressError, BrokenChannelError, BusyChannelError, ClosedChannelError, EndOfChannel, HandshakeError
from flowrt.transports.registry import get_transport
from flowrt.transports.wire.handshake import KEY_BYTES

TransportCheck: TypeAlias = Callable[[str], Coroutine[Any, Any, None]]

KEY = bytes(range(KEY_BYTES))
SMALL = Limits(max_message_bytes=1 << 18, capacity_messages=8, capacity_bytes=1 << 18)
HERE, THERE = Identity("here", "1"), Identity("there", "2")
NUM_CONNECTIONS = 300
_IDLE_LOOKS = 20  # consecutive polls that find all threads of a process asleep


def pair_maker(scheme: str, address: str = "") -> MakePair:
    """Returns a function that makes connected pairs over `scheme`, with both ends in this process."""

    async def make_pair(limits: Limits) -> tuple[Channel, Channel]:
        async with await get_transport(scheme).listen(address or f"{scheme}://", limits, KEY, HERE) as listener:
            return await connect_pair(scheme, listener, limits)

    return make_pair


async def connect_pair(scheme: str, listener: Listener, limits: Limits) -> tuple[Channel, Channel]:
    """Opens a channel through `listener` and returns (the connecting end, the accepted end)."""
    one = await within(get_transport(scheme).connect(listener.address, limits, KEY, THERE), "connect")
    return one, await within(listener.accept(), "accept")


@asynccontextmanager
async def other_process(scheme: str, behaviour: str) -> AsyncIterator[tuple[Channel, asyncio.subprocess.Process]]:
    """Starts a process with the given `behaviour` (see peer.py) and yields this end of the channel to it, and the process.

    The process has ended when the context exits.
    """
    async with await get_transport(scheme).listen(f"{scheme}://", SMALL, KEY, HERE) as listener:
        peer = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "flowrt.transports.conformance.peer",
            listener.address,
            behaviour,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        try:
            async with await within(listener.accept(), "accept") as channel:
                yield channel, peer
        finally:
            if peer.returncode is None:
                with suppress(ProcessLookupError):
                    os.kill(
                        peer.pid, signal.SIGKILL
                    )  # peer.kill() could reap a process that has just died before asyncio does, which logs a warning
            await peer.wait()


def pause(peer: asyncio.subprocess.Process) -> None:
    """Sends SIGSTOP and returns once the process has stopped. Without the wait, its threads run until the kernel schedules each one."""
    peer.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, peer.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)


def threads_sleep(pid: int) -> bool:
    """Whether no thread of the process runs or is ready to run, except the main thread of this process."""
    with suppress(FileNotFoundError):  # a thread ended meanwhile
        for thread in Path(f"/proc/{pid}/task").iterdir():
            state = (thread / "stat").read_text().rpartition(")")[2].split()[0]
            if state != "S" and thread.name != str(os.getpid()):
                return False
    return True


async def until_idle(peer: asyncio.subprocess.Process) -> None:
    """Waits until the process is idle, so that everything that it sent has left it."""
    if sys.platform != "linux":
        await asyncio.sleep(1.0)
        return
    looks = deque([False], _IDLE_LOOKS)

    def is_idle() -> bool:
        looks.append(threads_sleep(peer.pid))
        return len(looks) == _IDLE_LOOKS and all(looks)

    await until(is_idle, "a process that only waits is idle")


async def check_identities_and_limits(scheme: str) -> None:
    """Each end knows the identity of the other; the smaller limit holds on both ends."""
    wide = Limits(max_message_bytes=1 << 20, max_tensors=2, capacity_messages=50)
    narrow = Limits(max_message_bytes=1 << 16, max_tensors=9, capacity_messages=2)
    async with await get_transport(scheme).listen(f"{scheme}://", wide, KEY, HERE) as listener:
        one, two = await connect_pair(scheme, listener, narrow)
        async with one, two:
            expect((one.peer, two.peer) == (HERE, THERE), "each end knows the other's identity")
            for channel in (one, two):
                sent = 0
                while channel.send_nowait(numbered(sent)):
                    sent += 1
                expect(sent == 2, f"the smaller capacity_messages holds, {sent} fitted instead of 2")
            expect(listener.rejected == 0, "nobody was rejected")


async def check_wrong_key(scheme: str) -> None:
    """A connector with another key gets HandshakeError and is counted; the listener keeps working."""
    async with await get_transport(scheme).listen(f"{scheme}://", SMALL, KEY, HERE) as listener:
        for count in range(1, 4):
            wrong = get_transport(scheme).connect(listener.address, SMALL, bytes(KEY_BYTES), THERE)
            await expect_error(HandshakeError, wrong, "a wrong key is refused")
            await until(lambda count=count: listener.rejected >= count, "rejected callers are counted")  # type: ignore[misc]
            expect(listener.rejected == count, "a rejected caller is counted once")
        await expect_error(
            HandshakeError, get_transport(scheme).connect(listener.address, SMALL, b"short", THERE), "a short key is refused"
        )
        one, two = await connect_pair(scheme, listener, SMALL)
        async with one, two:
            await one.send(numbered(1))
            await receive_all(two, 1, 2)


async def check_addresses(scheme: str) -> None:
    """AddressError is raised for an address without a listener, an address already in use, and an invalid address."""
    transport = get_transport(scheme)
    async with await transport.listen(f"{scheme}://", SMALL, KEY, HERE) as listener:
        address = listener.address
        await expect_error(AddressError, transport.listen(address, SMALL, KEY, HERE), "an address serves one listener")
    await expect_error(AddressError, transport.connect(address, SMALL, KEY, THERE), "nobody listens at a closed address")
    async with await transport.listen(address, SMALL, KEY, HERE):
        pass  # free again
    for bad in ("", "no address", "other://x", f"{scheme}:/x"):
        await expect_error(AddressError, transport.connect(bad, SMALL, KEY, THERE), f"{bad!r} is no address")
        await expect_error(AddressError, transport.listen(bad, SMALL, KEY, HERE), f"{bad!r} is no address")


async def check_listener(scheme: str) -> None:
    """One accept runs at a time. Closing the listener wakes it, ends channels that were not accepted, and keeps the accepted ones open."""
    listener = await get_transport(scheme).listen(f"{scheme}://", SMALL, KEY, HERE)
    one, two = await connect_pair(scheme, listener, SMALL)
    async with one, two:
        accepting = asyncio.ensure_future(listener.accept())
        await asyncio.sleep(0)
        await expect_error(BusyChannelError, listener.accept(), "one task may be in accept")
        accepting.cancel()
        await asyncio.wait([accepting])
        async with await within(get_transport(scheme).connect(listener.address, SMALL, KEY, THERE), "connect") as forgotten:
            await within(asyncio.gather(listener.aclose(), listener.aclose()), "aclose")
            await expect_error(EndOfChannel, forgotten.recv(), "a channel nobody accepted ends")
        await expect_error(ClosedChannelError, listener.accept(), "a closed listener is closed")
        await one.send(numbered(1))
        await receive_all(two, 1, 2)


async def check_many_connections(scheme: str, count: int = NUM_CONNECTIONS) -> None:
    """Hundreds of channels are opened, used and closed one after another, and no descriptor is left open."""
    async with await get_transport(scheme).listen(f"{scheme}://", SMALL, KEY, HERE) as listener:
        before = 0
        for number in range(count):
            one, two = await connect_pair(scheme, listener, SMALL)
            async with one, two:
                await one.send(numbered(number, 100))
                await receive_all(two, number, number + 1, 100)
            if number == 20:
                before = num_descriptors()
        after = num_descriptors()
        expect(after <= before + 4, f"no descriptor is left behind: {before} after 20 connections, {after} after {count}")


async def check_other_process(scheme: str) -> None:
    """Messages are echoed by another process, which exits normally after this side closes the channel."""
    async with other_process(scheme, "echo") as (channel, peer):
        sizes = [0, 1, 5000, 60_000, 250_000]
        for number in range(40):
            await channel.send(numbered(number, sizes[number % 5]))
            check_numbered(await within(channel.recv(), "echo"), number, sizes[number % 5])
        await within(channel.aclose(), "aclose")
        expect(await within(peer.wait(), "the peer ends when the channel does") == 0, "the peer sees an orderly end")
        expect(channel.statistics().late_wakeups == 0, "no wake-up is lost and found only by the bounded re-check")


async def check_dead_peer(scheme: str) -> None:
    """After a peer is killed, the messages that it sent arrive, then every call raises BrokenChannelError, pending calls included."""
    async with other_process(scheme, "send five and hang") as (channel, peer):
        check_numbered(await within(channel.recv(), "the first of five"), 0, 30_000)
        await until_idle(peer)  # the other four messages have been sent
        number = 0
        while channel.send_nowait(numbered(number, 1000)):
            number += 1
        sending = asyncio.ensure_future(channel.send(numbered(number, 1000)))
        peer.send_signal(signal.SIGKILL)
        await receive_all(channel, 1, 5, 30_000)
        await expect_error(BrokenChannelError, channel.recv(), "a dead peer is a broken channel")
        await expect_error(BrokenChannelError, sending, "a dead peer wakes a waiting send")
        await expect_error(BrokenChannelError, channel.send(numbered(1)), "a dead peer is a broken channel")
        expect(channel.closed, "a broken channel is closed")
    async with other_process(scheme, "hang") as (channel, peer):
        receiving = asyncio.ensure_future(channel.recv())
        await asyncio.sleep(0)
        peer.send_signal(signal.SIGKILL)
        await expect_error(BrokenChannelError, receiving, "a dead peer wakes recv")


async def check_stopped_peer(scheme: str) -> None:
    """A stopped peer makes send wait. When it continues, all messages arrive. Closing does not wait for it indefinitely."""
    async with other_process(scheme, "echo") as (channel, peer):
        await channel.send(numbered(0, 1000))
        check_numbered(await within(channel.recv(), "echo"), 0, 1000)
        pause(peer)
        sending = asyncio.ensure_future(send_all(channel, 1, 30, 30_000))
        await until_waiting(channel, 1)
        expect(not sending.done(), "a stopped peer makes send wait")
        peer.send_signal(signal.SIGCONT)
        await receive_all(channel, 1, 30, 30_000)
        await within(sending, "send goes on when the peer does")
        pause(peer)
        await within(channel.aclose(), "aclose with a stopped peer")
        peer.send_signal(signal.SIGCONT)


MEETING_CHECKS: tuple[TransportCheck, ...] = (
    check_identities_and_limits,
    check_wrong_key,
    check_addresses,
    check_listener,
    check_many_connections,
)
PROCESS_CHECKS: tuple[TransportCheck, ...] = (check_other_process, check_dead_peer, check_stopped_peer)
