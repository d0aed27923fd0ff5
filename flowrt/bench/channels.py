"""A transport's bare channel, without actors above it: what it costs, and what memory it takes.

Here: ChannelEcho, the twin of peers.ZeroMQEcho over any scheme of `transports/`, and its stream that is never read fast enough. Not
here: the same way with actors, tags and credits (hop.py, transports.py). The child is this file, run as a module.
"""

from __future__ import annotations

import asyncio
import random
import secrets
import subprocess
import sys
import time
from types import TracebackType
from typing import Any, Self

import msgspec

from flowrt.bench.peers import new_event_loop
from flowrt.transports.contract import Channel, Identity, Limits
from flowrt.transports.errors import EndOfChannel, TransportError
from flowrt.transports.registry import get_transport
from flowrt.transports.wire.message import Message, Tag, Tensor, TensorSpec

LIMITS = Limits(capacity_bytes=8 << 20)  # as links between workers have
_TAG = Tag("bench@0")
_LARGEST_FLOODED_BYTES = 64 << 10


class Grown(msgspec.Struct, frozen=True):
    """Memory a process has taken since a stream began, at its peak: its own, and what it shares."""

    own_bytes: int
    shared_bytes: int


class ChannelEcho:
    """A channel to a child process that sends each message back."""

    def __init__(self, scheme: str) -> None:
        self._scheme = scheme
        self._child: subprocess.Popen[bytes] | None = None
        self._channel: Channel | None = None

    async def __aenter__(self) -> Self:
        key = secrets.token_bytes(32)
        listener = await get_transport(self._scheme).listen(f"{self._scheme}://", LIMITS, key, Identity("asker"))
        async with listener:
            self._child = _start_child(self._scheme, listener.address, key)
            self._channel = await listener.accept()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._channel is not None:
            await self._channel.aclose()
        if self._child is not None:
            assert self._child.stdin is not None
            self._child.stdin.close()
            self._child.kill()
            self._child.wait()

    async def round_trip_seconds(self, num_rounds: int, payload: Any) -> float:
        """Seconds until `payload`, any buffer, is back; the mean of `num_rounds` one after the other."""
        channel = self._channel
        assert channel is not None
        tensor = Tensor(TensorSpec("uint8", (memoryview(payload).nbytes,)), payload)
        start = time.perf_counter()
        for _ in range(num_rounds):
            await channel.send(Message("data", _TAG, 0, None, (tensor,)))
            await channel.recv()
        return (time.perf_counter() - start) / num_rounds

    async def flood(self, num_messages: int, seed: int) -> int:
        """Send `num_messages` of up to 64 KiB as fast as the channel takes them; the child reads every one. Returns the memory that
        both ends together took meanwhile and had not before, in bytes, at its peak; what they share counts once."""
        channel = self._channel
        assert channel is not None
        chance = random.Random(seed)
        payload = memoryview(bytearray(_LARGEST_FLOODED_BYTES))
        memory = _Memory()
        await channel.send(Message("flood", _TAG, 0, memory.grown()))
        for number in range(num_messages):
            size = int(2 ** chance.uniform(0, 16))
            kind = "last" if number == num_messages - 1 else "flood"
            await channel.send(Message(kind, _TAG, 0, None, (Tensor(TensorSpec("uint8", (size,)), payload[:size]),)))
            memory.look(number)
        there, here = (await channel.recv()).decode_header(Grown), memory.grown()
        return here.own_bytes + there.own_bytes + max(here.shared_bytes, there.shared_bytes)


class _Memory:
    """How much a process has grown since this was made, at its peak."""

    def __init__(self) -> None:
        self._own, self._shared = self._now()
        self._most_own = self._most_shared = 0

    def look(self, number: int) -> None:
        """Once per message; looks now and then."""
        if number % 64 == 0:
            own, shared = self._now()
            self._most_own = max(self._most_own, own - self._own)
            self._most_shared = max(self._most_shared, shared - self._shared)

    def grown(self) -> Grown:
        return Grown(self._most_own, self._most_shared)

    @staticmethod
    def _now() -> tuple[int, int]:
        with open("/proc/self/status") as file:
            lines = dict(line.split(":", 1) for line in file)
        own, shared = (int(lines[key].split()[0]) << 10 for key in ("RssAnon", "RssShmem"))
        return own, shared


def _start_child(scheme: str, address: str, key: bytes) -> subprocess.Popen[bytes]:
    child = subprocess.Popen([sys.executable, "-m", "flowrt.bench.channels", scheme, address], stdin=subprocess.PIPE)
    assert child.stdin is not None
    child.stdin.write(key)
    child.stdin.flush()
    return child


async def _answer(scheme: str, address: str, key: bytes) -> None:
    async with await get_transport(scheme).connect(address, LIMITS, key, Identity("answerer")) as channel:
        try:
            while True:
                message = await channel.recv()
                await channel.send(message if message.kind == "data" else Message("grown", header=await _drink(channel)))
        except (EndOfChannel, TransportError):
            return


async def _drink(channel: Channel) -> Grown:
    """Take messages until the last, reading each."""
    memory = _Memory()
    number = 0
    while (message := await channel.recv()).kind != "last":
        bytes(message.tensors[0].data)  # type: ignore[call-overload]  # any buffer will do
        memory.look(number)
        number += 1
    return memory.grown()


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(_answer(sys.argv[1], sys.argv[2], sys.stdin.buffer.read(32)))
