"""A transport's bare channel as an echo: what the transport costs, without actors above it.

Here: ChannelEcho, the twin of peers.ZeroMQEcho over any scheme of `transports/`. Not here: the same way with actors, tags and credits
(hop.py). The child is this file, run as a module.
"""

from __future__ import annotations

import asyncio
import secrets
import subprocess
import sys
import time
from types import TracebackType
from typing import Any, Self

from flowrt.bench.peers import new_event_loop
from transports.contract import Channel, Identity, Limits
from transports.errors import EndOfChannel, TransportError
from transports.message import Message, Tag, Tensor, TensorSpec
from transports.registry import get_transport

LIMITS = Limits(capacity_bytes=8 << 20)  # as links between workers have
_TAG = Tag("bench@0")


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
                await channel.send(await channel.recv())
        except (EndOfChannel, TransportError):
            return


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(_answer(sys.argv[1], sys.argv[2], sys.stdin.buffer.read(32)))
