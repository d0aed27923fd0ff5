"""A bare channel of any transport, without actors above it: its round trips, and the memory that both ends take."""

from __future__ import annotations

import asyncio
import random
import secrets
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import msgspec

from flowrt.bench.peers.process import Served, start_peer
from flowrt.transports.contract import Channel, Identity, Limits
from flowrt.transports.errors import EndOfChannel, TransportError
from flowrt.transports.registry import get_transport
from flowrt.transports.wire.message import Message, Tag, Tensor, TensorSpec

LIMITS = Limits(capacity_bytes=8 << 20)  # as links between workers have
_TAG = Tag("bench@0")
_MAX_FLOOD_BYTES = 64 << 10


class MemoryGrowth(msgspec.Struct, frozen=True):
    """Memory that a process has taken since a stream began, at its peak."""

    own_bytes: int
    shared_bytes: int


class ChannelEcho:
    """A channel to a process that sends each message back."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    async def round_trip_seconds(self, num_rounds: int, payload: Any) -> float:
        channel = self._channel
        tensor = Tensor(TensorSpec("uint8", (memoryview(payload).nbytes,)), payload)
        start = time.perf_counter()
        for _ in range(num_rounds):
            await channel.send(Message("data", _TAG, 0, None, (tensor,)))
            await channel.recv()
        return (time.perf_counter() - start) / num_rounds

    async def flood(self, num_messages: int, seed: int) -> int:
        """Sends `num_messages` of up to 64 KiB as fast as the channel takes them; the peer reads every one. Returns the bytes that both
        ends took meanwhile and had not before, at their peak; shared pages count once."""
        channel = self._channel
        chance = random.Random(seed)
        payload = memoryview(bytearray(_MAX_FLOOD_BYTES))
        memory = _MemoryPeak()
        await channel.send(Message("flood", _TAG, 0, memory.growth()))
        for number in range(num_messages):
            size = int(2 ** chance.uniform(0, 16))
            kind = "last" if number == num_messages - 1 else "flood"
            await channel.send(Message(kind, _TAG, 0, None, (Tensor(TensorSpec("uint8", (size,)), payload[:size]),)))
            memory.sample(number)
        there, here = (await channel.recv()).decode_header(MemoryGrowth), memory.growth()
        return here.own_bytes + there.own_bytes + max(here.shared_bytes, there.shared_bytes)


class _MemoryPeak:
    """How much this process has grown since this was made."""

    def __init__(self) -> None:
        self._start = self._peak = self._now()

    def sample(self, number: int) -> None:
        """Once per message; every 64th is a sample."""
        if number % 64 == 0:
            self._peak = max(self._peak[0], (now := self._now())[0]), max(self._peak[1], now[1])

    def growth(self) -> MemoryGrowth:
        return MemoryGrowth(self._peak[0] - self._start[0], self._peak[1] - self._start[1])

    @staticmethod
    def _now() -> tuple[int, int]:
        with open("/proc/self/status") as file:
            lines = dict(line.split(":", 1) for line in file)
        own, shared = (int(lines[key].split()[0]) << 10 for key in ("RssAnon", "RssShmem"))
        return own, shared


@asynccontextmanager
async def channel_echo(scheme: str) -> AsyncIterator[ChannelEcho]:
    key = secrets.token_bytes(32)
    async with (
        start_peer(f"channel over {scheme}", __name__, scheme) as (peer, _),
        await get_transport(scheme).listen(f"{scheme}://", LIMITS, key, Identity("client")) as listener,
    ):
        channel, _ = await asyncio.gather(listener.accept(), peer.ask(address=listener.address, key=key.hex()))
        async with channel:
            yield ChannelEcho(channel)


@asynccontextmanager
async def open_peer(scheme: str) -> AsyncIterator[Served]:
    async with asyncio.TaskGroup() as group:
        echoes = []

        async def connect(address: str, key: str) -> dict[str, Any]:
            channel = await get_transport(scheme).connect(address, LIMITS, bytes.fromhex(key), Identity("server"))
            echoes.append(group.create_task(_send_back(channel)))
            return {}

        yield {}, connect
        for echo in echoes:
            echo.cancel()


async def _send_back(channel: Channel) -> None:
    """Each message; after a flood, the memory that reading it took."""
    async with channel:
        with suppress(EndOfChannel, TransportError):
            while True:
                message = await channel.recv()
                if message.kind != "data":
                    memory, number = _MemoryPeak(), 0
                    while (flooded := await channel.recv()).kind != "last":
                        bytes(flooded.tensors[0].data)  # type: ignore[call-overload]  # any buffer will do
                        memory.sample(number)
                        number += 1
                    message = Message("grown", header=memory.growth())
                await channel.send(message)
