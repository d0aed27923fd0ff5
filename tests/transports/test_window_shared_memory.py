"""Windows in shared memory: one copy per write, copy threads, hostile control messages, and release of memory and descriptors."""

from __future__ import annotations

import asyncio
import fcntl
import os
import socket
from pathlib import Path

import pytest

from flowrt.transports.conformance.connection_checks import SMALL, pair_maker
from flowrt.transports.conformance.kit import check_numbered, numbered, opened, pattern
from flowrt.transports.contract import MAX_WINDOWS, Channel, Limits
from flowrt.transports.errors import BrokenChannelError, UnavailableError, WindowError
from flowrt.transports.registry import transport_class, unavailable_reason
from flowrt.transports.shared_memory import transport as shared_memory
from flowrt.transports.shared_memory import window as shared_window

if unavailable_reason("shm") is not None:
    pytest.skip(str(unavailable_reason("shm")), allow_module_level=True)

from flowrt.transports.channel.window_base import WindowKey
from flowrt.transports.shared_memory.transport import SharedMemoryChannel, sealed_memory
from flowrt.transports.shared_memory.window import SEALS, WindowSocket


def socket_of(channel: Channel) -> WindowSocket:
    assert isinstance(channel, SharedMemoryChannel)
    return channel._peer_watch


def mapped() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:flowrt")


def test_capabilities_name_the_transports_with_native_windows() -> None:
    assert transport_class("shm").capabilities.native_windows
    assert not transport_class("inproc").capabilities.native_windows


async def test_a_write_is_no_message(loop_kind: str) -> None:
    async with opened(pair_maker("shm")) as (one, two):
        window = one.open_window(100_000)
        remote = await two.attach_window(window.key)
        await remote.write(0, pattern(100_000), 0)
        assert await window.wait_flag(0) == 1
        assert window.buffer == pattern(100_000)
        for channel in (one, two):
            assert (channel.statistics().messages_sent, channel.statistics().messages_received) == (0, 0)


@pytest.mark.parametrize("copy_threads", [1, 3])
async def test_bulk_is_written_by_copy_threads(copy_threads: int, monkeypatch: pytest.MonkeyPatch, loop_kind: str) -> None:
    monkeypatch.setattr(shared_window, "MIN_BYTES", 1000)
    monkeypatch.setattr(shared_window, "threshold_bytes", lambda: 1000)
    threads = len(os.listdir("/proc/self/task"))
    async with opened(pair_maker("shm"), Limits(copy_threads=copy_threads)) as (one, two):
        window = one.open_window(1 << 20, 2)
        remote = await two.attach_window(window.key)
        async with asyncio.TaskGroup() as group:
            for part in range(8):
                group.create_task(remote.write(part << 17, pattern(1 << 17, part)))
        assert bytes(window.buffer) == b"".join(pattern(1 << 17, part) for part in range(8))
        assert len(os.listdir("/proc/self/task")) == threads + copy_threads
        for turns in range(6):
            data = bytearray(pattern(1 << 20, turns))
            writing = asyncio.ensure_future(remote.write(0, data, 1, turns + 1))
            for _ in range(turns):
                await asyncio.sleep(0)
            writing.cancel()
            await asyncio.wait([writing])
            data[:] = bytes(len(data))  # ours again
        await remote.write(1, pattern(5000, 9), 0, 7)
        assert await window.wait_flag(0) == 7
        assert window.buffer[1:5001] == pattern(5000, 9)
    assert len(os.listdir("/proc/self/task")) == threads


async def test_nothing_is_left(loop_kind: str) -> None:
    descriptors, mappings = len(os.listdir("/proc/self/fd")), mapped()
    one, two = await pair_maker("shm")(SMALL)
    windows = [one.open_window(10_000) for _ in range(10)]
    remotes = [await two.attach_window(window.key) for window in windows[:5]]
    kept = windows[0].buffer
    kept[:4] = b"kept"
    await windows[1].aclose()
    await one.aclose()
    await two.aclose()
    del one, two, windows, remotes
    assert len(os.listdir("/proc/self/fd")) == descriptors
    import gc

    gc.collect()
    assert mapped() == mappings + 1
    assert bytes(kept[:4]) == b"kept"
    del kept
    assert mapped() == mappings


async def test_no_memory_is_an_error_of_open(monkeypatch: pytest.MonkeyPatch) -> None:
    async with opened(pair_maker("shm")) as (one, two):
        with pytest.raises(UnavailableError, match="no memory"):
            one.open_window(1 << 50)
        for nbytes, flags in ((0, 1), (-1, 1), (10, -1), (10, 10_000)):
            with pytest.raises(WindowError):
                one.open_window(nbytes, flags)
        await one.send(numbered(1))
        check_numbered(await two.recv(), 1)


def _unsealed(nbytes: int) -> int:
    memfd = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    os.ftruncate(memfd, nbytes)
    return memfd


@pytest.mark.parametrize("wrong", ["unsealed", "size", "no descriptor", "no memfd", "flags", "kind", "nonsense", "twice", "too many"])
async def test_invalid_control_message_breaks_the_channel(wrong: str, loop_kind: str) -> None:
    async with opened(pair_maker("shm")) as (one, two):
        connection = socket_of(one)._socket
        key = WindowKey.new(4096, 1)
        null = os.open("/dev/null", os.O_RDONLY)
        good, unsealed = sealed_memory(8192), _unsealed(8192)
        assert fcntl.fcntl(good, fcntl.F_GET_SEALS) & SEALS == SEALS
        sent: dict[str, list[tuple[int, WindowKey, list[int]]]] = {
            "unsealed": [(1, key, [unsealed])],
            "size": [(1, WindowKey.new(5000, 1), [good])],
            "no descriptor": [(1, key, [])],
            "no memfd": [(1, key, [null])],
            "flags": [(1, WindowKey.new(4096, 1 << 20), [good])],
            "kind": [(9, key, [good])],
            "nonsense": [],
            "twice": [(1, key, [good])] * 2,
            "too many": [(1, WindowKey.new(4096, 1), [good]) for _ in range(MAX_WINDOWS + 1)],
        }
        descriptors = len(os.listdir("/proc/self/fd"))
        for kind, each, passed in sent[wrong]:
            socket.send_fds(connection, [shared_window._OFFER.pack(kind, *each)], passed)
        if wrong == "nonsense":
            connection.send(b"hello")
        with pytest.raises(BrokenChannelError, match="the peer"):
            async with asyncio.timeout(60):
                await two.recv()
        assert two.statistics().nonsense == 1
        await two.aclose()
        assert len(os.listdir("/proc/self/fd")) <= descriptors, "what was passed is closed"
        for descriptor in (null, good, unsealed):
            os.close(descriptor)


async def test_withdrawing_waits_for_a_full_line(monkeypatch: pytest.MonkeyPatch, loop_kind: str) -> None:
    async with opened(pair_maker("shm")) as (one, two):
        windows = [one.open_window(10) for _ in range(10)]
        sender = socket_of(one)
        full = True
        send = sender._send
        monkeypatch.setattr(sender, "_send", lambda *arguments: not full and send(*arguments))
        for window in windows:
            await window.aclose()
        with pytest.raises(UnavailableError):
            one.open_window(10)
        full = False
        async with asyncio.timeout(60):
            while sender._unsent or socket_of(two).offers:  # noqa: ASYNC110  (nothing reports it)
                await asyncio.sleep(0.001)
        assert (await two.attach_window(one.open_window(10).key)).nbytes == 10


async def test_a_lost_wake_up_for_a_flag_is_found_and_counted(monkeypatch: pytest.MonkeyPatch, loop_kind: str) -> None:
    monkeypatch.setattr(shared_memory, "RECHECK_SECONDS", 0.01)
    one, two = await pair_maker("shm")(SMALL)
    async with one, two:
        window = one.open_window(10)
        remote = await two.attach_window(window.key)
        assert isinstance(two, SharedMemoryChannel)
        elsewhere = os.eventfd(0, os.EFD_NONBLOCK)
        os.dup2(elsewhere, two._peer_wake, inheritable=False)  # a promise not kept
        os.close(elsewhere)
        waiting = asyncio.ensure_future(window.wait_flag(0))
        for _ in range(10):
            await asyncio.sleep(0)
        await remote.set_flag(0, 5)
        async with asyncio.timeout(60):
            assert await waiting == 5
        assert one.statistics().late_wakeups == 1
