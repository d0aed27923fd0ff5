"""Checks one-sided windows of every transport, native or carried by messages."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from flowrt.transports.conformance.kit import (
    SMALL,
    MakePair,
    cancelled_after,
    carry,
    carry_one,
    checks_of,
    expect,
    expect_error,
    opened,
    pattern,
    receive_all,
    send_all,
    within,
)
from flowrt.transports.contract import MAX_FLAGS, MAX_WINDOWS, Channel, Limits, RemoteWindow, Window
from flowrt.transports.errors import BrokenChannelError, ClosedChannelError, WindowError

_BYTES = 300_000  # more than one piece, and more than any transport sends inline


@asynccontextmanager
async def _windowed(
    make_pair: MakePair, nbytes: int = _BYTES, num_flags: int = 4, limits: Limits = SMALL
) -> AsyncIterator[tuple[Channel, Channel, Window, RemoteWindow]]:
    """Yields the two ends of a channel, a window of the first end, and the second end's remote view of it."""
    async with opened(make_pair, limits) as (one, two):
        window = one.open_window(nbytes, num_flags)
        yield one, two, window, await within(two.attach_window(window.key), "attach_window")


async def check_window_writes_and_reads(make_pair: MakePair) -> None:
    """Bytes written at an offset are visible when their flag is set, reads return the owner's writes, and no other byte changes."""
    async with _windowed(make_pair) as (_, _, window, remote):
        expect((remote.nbytes, remote.num_flags) == (_BYTES, 4) == (window.nbytes, window.num_flags), "both ends know the window's size")
        expect(window.buffer.nbytes == _BYTES and not any(window.buffer), "a new window is zero")
        expect(await within(remote.read(0, _BYTES), "read") == bytes(_BYTES), "a new window is read as zero")
        for turn, (offset, nbytes) in enumerate([(0, 1), (1, 0), (17, 4097), (_BYTES - 1, 1), (0, _BYTES), (3, _BYTES - 5)]):
            before = bytes(window.buffer)
            data = pattern(nbytes, turn)
            await within(remote.write(offset, data, 1, turn + 1), "write")
            expect(await within(window.wait_flag(1, turn), "wait_flag") == turn + 1, "the flag comes after the bytes, with its value")
            expected = before[:offset] + data + before[offset + nbytes :]
            expect(window.buffer == expected, f"{nbytes} bytes written at {offset} are there, and all others as before")
            expect(await within(remote.read(offset, nbytes), "read") == data, "what was written is read")
        window.buffer[100:104] = b"mine"
        expect(await within(remote.read(99, 6), "read") == bytes(window.buffer[99:105]), "what the owner writes is read")


async def check_window_of_strides(make_pair: MakePair) -> None:
    """A strided slice is written row by row, and a buffer of any format is written as its bytes."""
    async with _windowed(make_pair, 5000) as (_, _, window, remote):
        strided = memoryview(pattern(2000))[::2]
        await within(remote.write(8, strided), "write")
        expect(window.buffer[8:1008] == bytes(strided), "a buffer with strides arrives packed")
        await within(remote.write(2000, memoryview(pattern(64)).cast("d")), "write")
        expect(window.buffer[2000:2064] == pattern(64), "a buffer of doubles arrives as its bytes")
        await expect_error(WindowError, remote.write(0, object()), "only buffers can be written")


async def check_window_bounds(make_pair: MakePair) -> None:
    """Accesses outside a window or to missing flags raise WindowError, and the channel keeps working."""
    async with _windowed(make_pair, 1000, 2) as (one, two, window, remote):
        for offset, nbytes in ((-1, 1), (1000, 1), (999, 2), (0, 1001), (2**63, 1), (-(2**63), 5)):
            await expect_error(WindowError, remote.write(offset, bytes(nbytes)), f"{nbytes} bytes at {offset} are outside")
            await expect_error(WindowError, remote.read(offset, nbytes), f"{nbytes} bytes at {offset} are outside")
        await expect_error(WindowError, remote.read(0, -1), "fewer than no bytes cannot be read")
        for flag, value in ((-1, 1), (2, 1), (0, -1), (0, 2**64)):
            await expect_error(WindowError, remote.write(0, b"x", flag, value), f"flag {flag} cannot be {value}")
            await expect_error(WindowError, remote.set_flag(flag, value), f"flag {flag} cannot be {value}")
            await expect_error(WindowError, _set(window, flag, value), f"flag {flag} cannot be {value}")
        await expect_error(WindowError, window.wait_flag(2), "there is no such flag")
        expect(not any(window.buffer) and window.flag(0) == 0, "what is refused changes nothing")
        await carry(one, two, 1, 5000)


async def _set(window: Window, flag: int, value: int) -> None:
    window.set_flag(flag, value)


async def check_window_keys(make_pair: MakePair) -> None:
    """A key opens its own window on its own channel only, and altered keys open nothing."""
    async with opened(make_pair) as (one, two), opened(make_pair) as (three, four):
        windows = [one.open_window(100) for _ in range(4)]
        expect(len({bytes(window.key) for window in windows}) == 4, "every window has a key of its own")
        foreign = three.open_window(100)
        key = windows[0].key
        wrong = [b"", key[:-1], key + b"x", bytes(len(key)), foreign.key]
        wrong += [key[:-4] + b"\xff" * 4, *(_flipped(key, place) for place in range(0, len(key), 5))]
        for each in wrong:
            await expect_error(WindowError, two.attach_window(each), "a wrong key opens nothing")
        await expect_error(WindowError, one.attach_window(key), "a key is for the peer")
        remote = await within(two.attach_window(key), "attach_window")
        await within(remote.write(0, b"right"), "write")
        expect(
            bytes(windows[0].buffer[:5]) == b"right" and not any(any(other.buffer) for other in windows[1:]), "only that window is written"
        )
        await within(four.attach_window(foreign.key), "attach_window")


def _flipped(key: bytes, place: int) -> bytes:
    return key[:place] + bytes([key[place] ^ 1]) + key[place + 1 :]


async def check_window_flags(make_pair: MakePair) -> None:
    """Setting a flag on either side wakes waiters on the other. Several calls wait at once. A flag set before a wait is not lost."""
    async with _windowed(make_pair, 64, MAX_FLAGS) as (_, _, window, remote):
        for turn in range(1, 30):
            waiting = asyncio.ensure_future(window.wait_flag(3, turn - 1))
            other = asyncio.ensure_future(window.wait_flag(MAX_FLAGS - 1, turn - 1))
            if turn % 2:
                await asyncio.sleep(0.001 * (turn % 3))
            await within(remote.set_flag(3, turn), "set_flag")
            expect(await within(waiting, "wait_flag") == turn, "the owner is woken")
            expect(not other.done(), "another flag is another flag")
            await within(remote.set_flag(MAX_FLAGS - 1, turn), "set_flag")
            expect(await within(other, "wait_flag") == turn, "the owner is woken")
            responding = asyncio.ensure_future(remote.wait_flag(0, turn - 1))
            if turn % 2:
                await asyncio.sleep(0.001 * (turn % 3))
            window.set_flag(0, turn)
            expect(await within(responding, "wait_flag") == turn == remote.flag(0), "the peer is woken")
        expect(window.flag(3) == 29 == remote.flag(3), "both ends know what the peer set")
        await within(remote.set_flag(5, 2**64 - 1), "set_flag")
        expect(await within(window.wait_flag(5), "wait_flag") == 2**64 - 1, "a flag has 64 bits")


async def check_window_is_one_sided(make_pair: MakePair) -> None:
    """A window is read and written without any call of the owner's user. Messages in flight arrive in order, and unread messages do not
    delay the window."""
    async with _windowed(make_pair) as (one, two, window, remote):
        await send_all(two, 0, 3, 1000)  # not received yet
        for turn in range(100):
            await within(remote.write(turn, pattern(1000, turn)), "write")
        await within(remote.write(50_000, pattern(200_000)), "write")
        expect(await within(remote.read(50_000, 200_000), "read") == pattern(200_000), "what was written is read")
        expect(window.buffer[99:1099] == pattern(1000, 99), "the last write holds")
        await receive_all(one, 0, 3, 1000)
        expect(one.recv_nowait() is None, "a window's traffic is not received as messages")


async def check_window_among_messages(make_pair: MakePair) -> None:
    """Windows in both directions, concurrent calls, and messages do not disturb each other."""
    async with opened(make_pair) as (one, two):
        windows = [(one.open_window(60_000, 20), two), (two.open_window(60_000, 20), one)]
        async with asyncio.TaskGroup() as group:
            for sender, receiver in ((one, two), (two, one)):
                group.create_task(send_all(sender, 0, 60, 30_000))
                group.create_task(receive_all(receiver, 0, 60, 30_000))
            for window, peer in windows:
                remote = await within(peer.attach_window(window.key), "attach_window")
                for part in range(20):
                    group.create_task(_write_and_read(remote, part))
        for window, _ in windows:
            for part in range(20):
                expect(window.buffer[3000 * part : 3000 * part + 3000] == pattern(3000, part + 9), f"part {part} is as it was written last")
                expect(window.flag(part) == 10, f"flag {part} is as it was set last")


async def _write_and_read(remote: RemoteWindow, part: int) -> None:
    for turn in range(10):
        data = pattern(3000, part + turn)
        await within(remote.write(3000 * part, data, part, turn + 1), "write")
        expect(await within(remote.read(3000 * part, 3000), "read") == data, "calls at once do not meet")


async def check_window_closed(make_pair: MakePair) -> None:
    """Calls on a closed window raise WindowError, pending waits included; the channel and its other windows keep working."""
    async with _windowed(make_pair, 1000, 2) as (one, two, window, remote):
        other = one.open_window(1000, 2)
        waiting = asyncio.ensure_future(window.wait_flag(0))
        await carry_one(two, one)
        await within(asyncio.gather(window.aclose(), window.aclose()), "aclose")
        await expect_error(WindowError, waiting, "closing a window wakes every call that waits for its flags")
        await expect_error(WindowError, window.wait_flag(0), "a closed window has no flags to wait for")
        for call in (remote.write(0, b"x"), remote.read(0, 1), remote.set_flag(0, 1), two.attach_window(window.key)):
            await expect_error(WindowError, call, "a closed window is closed")
        still_open = await within(two.attach_window(other.key), "attach_window")
        await within(still_open.write(0, b"still"), "write")
        expect(bytes(other.buffer[:5]) == b"still", "other windows keep working")
        await within(still_open.aclose(), "aclose")
        await expect_error(WindowError, still_open.write(0, b"x"), "a detached window cannot be written")
        await carry(one, two, 1)
        for _ in range(3 * MAX_WINDOWS):
            await one.open_window(10).aclose()
            await asyncio.sleep(0)  # lets the peer process the close in this loop
        many = [one.open_window(10) for _ in range(MAX_WINDOWS - 1)]
        await expect_error(WindowError, _open(one), f"{MAX_WINDOWS} windows are the most")
        expect(len(many) == MAX_WINDOWS - 1, "as many as the contract allows")


async def _open(channel: Channel) -> None:
    channel.open_window(10)


async def check_window_ends_with_the_channel(make_pair: MakePair) -> None:
    """Closing either end wakes waits for flags and fails every call; the owner's memory stays valid while it is referenced."""
    for closer in (0, 1):
        async with _windowed(make_pair, 1000, 2) as (one, two, window, remote):
            waiting = [asyncio.ensure_future(window.wait_flag(0)), asyncio.ensure_future(remote.wait_flag(1))]
            await within(remote.write(0, b"data"), "write")
            await carry_one(two, one)
            await within((one, two)[closer].aclose(), "aclose")
            kinds = (ClosedChannelError, BrokenChannelError)
            await expect_error(kinds[closer], waiting[0], "closing wakes waits for flags")
            await expect_error(kinds[1 - closer], waiting[1], "closing wakes waits for flags")
            await expect_error(kinds[closer], _open(one), "no windows on a channel that ended")
            await expect_error(kinds[1 - closer], two.attach_window(window.key), "no windows on a channel that ended")
            expect(bytes(window.buffer[:4]) == b"data", "the owner's memory is still there")


async def check_window_cancelled(make_pair: MakePair) -> None:
    """A cancelled call leaves the window and the channel usable, and a cancelled write sets no flag after its cancellation."""
    async with _windowed(make_pair, 1 << 20, 2) as (one, two, window, remote):
        data = bytearray(pattern(1 << 20))
        for turns in range(12):
            writing = await cancelled_after(remote.write(0, data, 0, turns + 1), turns)
            expect(writing.cancelled() or window.flag(0) == turns + 1, "a write that was not cancelled has set its flag")
            await within(remote.set_flag(1, turns + 1), "set_flag")
            expect(await within(window.wait_flag(1, turns), "wait_flag") == turns + 1, "flags work after a cancelled write")
            await cancelled_after(window.wait_flag(1, turns + 1), 1)
        await within(remote.write(0, data), "write")
        expect(window.buffer == data, "the window can still be written")
        await carry(one, two, 1)


WINDOW_CHECKS = checks_of(__name__)
