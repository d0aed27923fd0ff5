"""A bare channel of any transport, without actors above it: its round trips, and the memory that both ends take."""

from __future__ import annotations

import asyncio
import os
import random
import secrets
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

from flowrt.bench.measure.memory import numbers_of
from flowrt.bench.peers.process import Served, start_peer
from flowrt.transports.contract import Channel, Identity, Limits
from flowrt.transports.errors import EndOfChannel, TransportError
from flowrt.transports.registry import get_transport
from flowrt.transports.wire.codec import tensor_bytes
from flowrt.transports.wire.message import Message, Tag, Tensor, TensorSpec

LIMITS = Limits(capacity_bytes=8 << 20)  # as links between workers have
_TAG = Tag("bench@0")
_MAX_FLOOD_BYTES = 64 << 10
_SAMPLED_EVERY = 64  # messages


class ChannelEcho:
    """A channel to a process that sends each message back."""

    def __init__(self, channel: Channel, pid: int) -> None:
        self._channel = channel
        self._pids = os.getpid(), pid

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
        channel, chance = self._channel, random.Random(seed)
        payload = memoryview(bytearray(_MAX_FLOOD_BYTES))
        before = list(map(_memory_of, self._pids))
        own_bytes, shared_bytes = [0, 0], [0, 0]  # growth of each end, at its peak
        for number in range(num_messages):
            size = int(2 ** chance.uniform(0, 16))
            kind = "last" if number == num_messages - 1 else "flood"
            await channel.send(Message(kind, _TAG, 0, None, (Tensor(TensorSpec("uint8", (size,)), payload[:size]),)))
            if number % _SAMPLED_EVERY == 0:
                for end, pid in enumerate(self._pids):
                    own, shared = (now - then for now, then in zip(_memory_of(pid), before[end], strict=True))
                    own_bytes[end], shared_bytes[end] = max(own_bytes[end], own), max(shared_bytes[end], shared)
        await channel.recv()
        return sum(own_bytes) + max(shared_bytes)


def _memory_of(pid: int) -> list[int]:
    """Private and shared bytes that a process has in memory."""
    return [kibibytes << 10 for kibibytes in numbers_of(pid, "status", ("RssAnon:", "RssShmem:"))]


@asynccontextmanager
async def channel_echo(scheme: str) -> AsyncIterator[ChannelEcho]:
    key = secrets.token_bytes(32)
    async with (
        start_peer(f"channel over {scheme}", __name__, scheme) as (peer, _),
        await get_transport(scheme).listen(f"{scheme}://", LIMITS, key, Identity("client")) as listener,
    ):
        channel, _ = await asyncio.gather(listener.accept(), peer.request(address=listener.address, key=key.hex()))
        async with channel:
            yield ChannelEcho(channel, peer.pid)


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
    """Each message; of a flood, which is read, only the last."""
    async with channel:
        with suppress(EndOfChannel, TransportError):
            while True:
                message = await channel.recv()
                if message.kind != "data":
                    bytes(tensor_bytes(message.tensors[0]))
                if message.kind != "flood":
                    await channel.send(message)
