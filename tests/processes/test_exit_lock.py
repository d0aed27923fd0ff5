"""The exit lock: it notifies of a death before the pidfd does, never of a living process, and leaves no thread."""

from __future__ import annotations

import asyncio
import errno
import faulthandler
import os
import select
import signal
import sys
import threading
from collections.abc import Callable

import pytest

from flowrt.processes.exit_lock import ExitLock, hold
from flowrt.system.process_status import exit_status

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="robust mutexes in a memfd are Linux's")

MEMORY = 64 << 20


def fork(then: Callable[[int], None], fd: int) -> int:
    """A child that calls `then(fd)`, reports it, and sleeps."""
    ready, ready_writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            faulthandler.disable()  # it is killed on purpose: the traceback is noise
            then(fd)
            os.write(ready_writer, b"x")
            signal.pause()
        finally:
            os._exit(1)
    os.close(ready_writer)
    os.read(ready, 1)
    os.close(ready)
    return pid


def hold_with_memory(fd: int) -> None:
    hold(fd)
    memory = bytearray(MEMORY)
    for at in range(0, MEMORY, 4096):
        memory[at] = 1


def waiting_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("exit lock of")]


async def death_of_one(end: Callable[[int], None], then: Callable[[int], None] = hold) -> tuple[bool, int | None]:
    """When the exit lock notified of the death: whether the pidfd was still unready, and the exit status as far as it was known."""
    pid = -1
    pidfd = -1
    loop = asyncio.get_running_loop()
    seen: asyncio.Future[tuple[bool, int | None]] = loop.create_future()
    lock = ExitLock("child", lambda: seen.set_result((not select.select([pidfd], [], [], 0)[0], exit_status(pid))))
    try:
        pid = fork(then, lock.fd)
        pidfd = os.pidfd_open(pid)
        lock.given_away()
        await death_of_another()
        assert not seen.done()  # it lives
        end(pid)
        async with asyncio.timeout(30):
            return await seen
    finally:
        reap(pid)
        os.close(pidfd)
        lock.close()
        assert not waiting_threads()


async def death_of_another() -> None:
    """Whole: from the fork to the notice."""
    notified = asyncio.Event()
    lock = ExitLock("another", notified.set)
    pid = fork(hold, lock.fd)
    lock.given_away()
    kill(pid)
    async with asyncio.timeout(30):
        await notified.wait()
    reap(pid)
    lock.close()


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def reap(pid: int) -> None:
    os.waitpid(pid, 0)


async def test_death_is_notified_before_the_memory_is_released() -> None:
    for _ in range(20):  # a thread that finds no processor in time may come second
        was_first, status = await death_of_one(kill, hold_with_memory)
        assert status == -signal.SIGKILL
        if was_first:
            return
    pytest.fail("the pidfd was first twenty times")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGABRT])
async def test_every_death_is_notified(number: int) -> None:
    assert (await death_of_one(lambda pid: os.kill(pid, number)))[1] == -number


def test_a_living_process_has_no_exit_status() -> None:
    assert exit_status(os.getpid()) is None
    assert exit_status(2**22 + 1) is None


@pytest.mark.parametrize("then", [os.close, hold], ids=["before it locks", "known"])
async def test_death_before_it_locks_or_that_is_known_is_not_notified(then: Callable[[int], None]) -> None:
    notified: list[None] = []
    lock = ExitLock("child", lambda: notified.append(None))
    pid = fork(then, lock.fd)
    lock.given_away()
    kill(pid)
    reap(pid)
    assert waiting_threads() or then is hold
    for _ in range(2):
        lock.close()
    assert not waiting_threads()
    await asyncio.sleep(0)  # what its thread has left for the loop would run in this turn
    assert not notified


async def test_an_end_that_is_known_before_the_wait_begins_starts_no_thread() -> None:
    lock = ExitLock("child", lambda: None)
    lock.close()
    lock.given_away()
    assert not waiting_threads()


async def test_without_descriptors_there_is_no_notification_and_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str, flags: int) -> int:
        raise OSError(errno.EMFILE, "too many open files")

    monkeypatch.setattr(os, "memfd_create", refuse)
    lock = ExitLock("child", lambda: None)
    assert lock.fd == -1
    lock.given_away()
    lock.close()
    assert not waiting_threads()


async def test_a_system_without_such_locks_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flowrt.processes.exit_lock._library", lambda: None)
    lock = ExitLock("child", lambda: None)
    assert lock.fd == -1
    lock.given_away()
    lock.close()
