"""Checks listening, connecting, keys, identities and leaks; each check takes a scheme."""

from __future__ import annotations

import asyncio

from flowrt.transports.conformance.channel_checks import TURNS
from flowrt.transports.conformance.kit import (
    MakePair,
    cancelled_after,
    carry,
    checks_of,
    expect,
    expect_error,
    fill,
    num_descriptors,
    until,
    within,
)
from flowrt.transports.contract import Channel, Identity, Limits, Listener
from flowrt.transports.errors import AddressError, BusyChannelError, ClosedChannelError, EndOfChannel, HandshakeError, TransportError
from flowrt.transports.registry import get_transport
from flowrt.transports.wire.handshake import KEY_BYTES

KEY = bytes(range(KEY_BYTES))
SMALL = Limits(max_message_bytes=1 << 18, capacity_messages=8, capacity_bytes=1 << 18)
HERE, THERE = Identity("here", "1"), Identity("there", "2")
NUM_CONNECTIONS = 150


def pair_maker(scheme: str, address: str = "") -> MakePair:
    """Returns a function that makes connected pairs over `scheme`, with both ends in this process."""

    async def make_pair(limits: Limits) -> tuple[Channel, Channel]:
        async with await listen(scheme, limits, address) as listener:
            return await connect_pair(scheme, listener, limits)

    return make_pair


async def listen(scheme: str, limits: Limits = SMALL, address: str = "") -> Listener:
    return await get_transport(scheme).listen(address or f"{scheme}://", limits, KEY, HERE)


async def connect(scheme: str, listener: Listener, caller: Identity = THERE, limits: Limits = SMALL, key: bytes = KEY) -> Channel:
    return await within(get_transport(scheme).connect(listener.address, limits, key, caller), "connect")


async def connect_pair(scheme: str, listener: Listener, limits: Limits = SMALL) -> tuple[Channel, Channel]:
    """Opens a channel through `listener` and returns (the connecting end, the accepted end)."""
    one = await connect(scheme, listener, limits=limits)
    return one, await within(listener.accept(), "accept")


async def check_identities_and_limits(scheme: str) -> None:
    """Each end knows the identity of the other; the smaller limit holds on both ends."""
    wide = Limits(max_message_bytes=1 << 20, max_tensors=2, capacity_messages=50)
    narrow = Limits(max_message_bytes=1 << 16, max_tensors=9, capacity_messages=2)
    async with await listen(scheme, wide) as listener:
        one, two = await connect_pair(scheme, listener, narrow)
        async with one, two:
            expect((one.peer, two.peer) == (HERE, THERE), "each end knows the other's identity")
            for channel in (one, two):
                sent = fill(channel)
                expect(sent == 2, f"the smaller capacity_messages holds, {sent} fitted instead of 2")
            expect(listener.rejected == 0, "no caller was rejected")


async def check_wrong_key(scheme: str) -> None:
    """A connector with another key gets HandshakeError and is counted; the listener keeps working."""
    async with await listen(scheme) as listener:
        for count in range(1, 4):
            await expect_error(HandshakeError, connect(scheme, listener, key=bytes(KEY_BYTES)), "a wrong key is refused")
            await until(lambda count=count: listener.rejected >= count, "rejected callers are counted")  # type: ignore[misc]
            expect(listener.rejected == count, "a rejected caller is counted once")
        await expect_error(HandshakeError, connect(scheme, listener, key=b"short"), "a short key is refused")
        one, two = await connect_pair(scheme, listener)
        async with one, two:
            await carry(one, two, 1)


async def check_addresses(scheme: str) -> None:
    """AddressError is raised for an address without a listener, an address already in use, and an invalid address."""
    transport = get_transport(scheme)
    async with await transport.listen(f"{scheme}://", SMALL, KEY, HERE) as listener:
        address = listener.address
        await expect_error(AddressError, transport.listen(address, SMALL, KEY, HERE), "an address serves one listener")
    await expect_error(AddressError, transport.connect(address, SMALL, KEY, THERE), "a closed address has no listener")
    async with await transport.listen(address, SMALL, KEY, HERE):
        pass  # free again
    for bad in ("", "no address", "other://x", f"{scheme}:/x"):
        await expect_error(AddressError, transport.connect(bad, SMALL, KEY, THERE), f"{bad!r} is not an address")
        await expect_error(AddressError, transport.listen(bad, SMALL, KEY, HERE), f"{bad!r} is not an address")


async def check_listener(scheme: str) -> None:
    """One accept runs at a time. Closing the listener wakes it, ends channels that were not accepted, and keeps the accepted ones open."""
    listener = await listen(scheme)
    one, two = await connect_pair(scheme, listener)
    async with one, two:
        accepting = asyncio.ensure_future(listener.accept())
        await asyncio.sleep(0)
        await expect_error(BusyChannelError, listener.accept(), "one task may be in accept")
        await cancelled_after(accepting)
        async with await connect(scheme, listener) as unaccepted:
            await within(asyncio.gather(listener.aclose(), listener.aclose()), "aclose")
            await expect_error(EndOfChannel, unaccepted.recv(), "a channel that was not accepted ends")
        await expect_error(ClosedChannelError, listener.accept(), "a closed listener is closed")
        await carry(one, two, 1)


async def check_many_connections(scheme: str, count: int = NUM_CONNECTIONS) -> None:
    """Channels are opened, used and closed one after another, and no descriptor is left open."""
    async with await listen(scheme) as listener:
        before = 0
        for number in range(count):
            one, two = await connect_pair(scheme, listener)
            async with one, two:
                await carry(one, two, number, 100)
            if number == 20:
                before = num_descriptors()
        after = num_descriptors()
        expect(after <= before + 4, f"no descriptor is left behind: {before} after 20 connections, {after} after {count}")


async def check_connect_cancelled_at_every_turn(scheme: str) -> None:
    """A connect that is cancelled after any number of turns leaves no resource, and the listener still serves other connectors."""
    async with await listen(scheme) as listener:
        await _meet(scheme, listener, 0)
        before = num_descriptors()
        for number, turns in enumerate(TURNS, 1):
            abandoned = Identity("abandoned", str(number))
            connecting = await cancelled_after(connect(scheme, listener, abandoned), turns)
            if not connecting.cancelled():
                await connecting.result().aclose()
            await _meet(scheme, listener, number)
        await until(lambda: num_descriptors() <= before + 2, "a cancelled connect leaves no descriptor behind")


async def check_accept_cancelled_at_every_turn(scheme: str) -> None:
    """An accept that is cancelled after any number of turns loses no connection."""
    async with await listen(scheme) as listener:
        for number, turns in enumerate(TURNS):
            connecting = asyncio.ensure_future(connect(scheme, listener, Identity("caller", str(number))))
            accepting = await cancelled_after(listener.accept(), turns)
            two = await within(listener.accept(), "accept after a cancelled one") if accepting.cancelled() else accepting.result()
            async with await connecting as one, two:
                expect(two.peer == Identity("caller", str(number)), "a connection is accepted once, by the next accept")
                await carry(one, two, number)


async def _meet(scheme: str, listener: Listener, number: int) -> None:
    """Checks that a channel through `listener` works. Channels of cancelled connectors may be accepted before it, and end."""
    caller = Identity(THERE.name, f"caller {number}")
    async with await connect(scheme, listener, caller) as one:
        while True:
            two = await within(listener.accept(), "accept")
            async with two:
                if two.peer == caller:
                    await carry(one, two, number, 100)
                    return
                try:
                    await within(two.recv(), "the end of a caller that has given up")
                except TransportError:
                    continue
                expect(False, "a caller that has given up sends nothing")


CONNECTION_CHECKS = checks_of(__name__)
