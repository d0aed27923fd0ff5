"""Checks channels to another process that works, dies and stops; each check takes a scheme.

The other process runs this module: python -m flowrt.transports.conformance.process_checks ADDRESS "echo" | "hang" | "send five and hang"
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from flowrt.transports.conformance.connection_checks import KEY, SMALL, THERE, listen
from flowrt.transports.conformance.kit import (
    check_numbered,
    checks_of,
    expect,
    expect_error,
    fill,
    numbered,
    receive_all,
    send_all,
    until,
    until_waiting,
    within,
)
from flowrt.transports.contract import Channel
from flowrt.transports.errors import BrokenChannelError, EndOfChannel
from flowrt.transports.registry import get_transport
from flowrt.transports.wire.address import parse_address

_IDLE_LOOKS = 20  # consecutive polls that find all threads of a process asleep


async def behave(address: str, behaviour: str) -> None:
    """Connects to `address` and behaves as specified."""
    async with await get_transport(parse_address(address).scheme).connect(address, SMALL, KEY, THERE) as channel:
        if behaviour == "send five and hang":
            await send_all(channel, 0, 5, 30_000)
        if behaviour != "echo":
            await asyncio.Event().wait()
        with suppress(EndOfChannel):
            while True:
                await channel.send(await channel.recv())


@asynccontextmanager
async def other_process(scheme: str, behaviour: str) -> AsyncIterator[tuple[Channel, asyncio.subprocess.Process]]:
    """Starts a process with the given `behaviour` (see `behave`) and yields this end of the channel to it, and the process.

    The process has ended when the context exits.
    """
    async with await listen(scheme) as listener:
        peer = await asyncio.create_subprocess_exec(
            sys.executable,
            "-P",
            "-m",
            "flowrt.transports.conformance.process_checks",
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
        number = fill(channel, 1000)
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
        await within(sending, "send continues when the peer does")
        pause(peer)
        await within(channel.aclose(), "aclose with a stopped peer")
        peer.send_signal(signal.SIGCONT)


PROCESS_CHECKS = checks_of(__name__)

if __name__ == "__main__":
    asyncio.run(behave(*sys.argv[1:3]))
