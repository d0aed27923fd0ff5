"""A process that sends or receives over emulated links, and how to talk to it.

Here: LinkPeer, the parent's side, and the process itself (`python -m flowrt.bench.link_peer`). Not here: what is measured (links.py). A
line of JSON on standard input is an order, a line on standard output its answer. The process has one NIC, however many flows.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Self, TypeVar

import msgspec

from flowrt.bench.peers import new_event_loop
from flowrt.emulation import Lateness
from flowrt.timer import Timer, new_timer
from flowrt.transports.contract import Channel, Identity, Limits
from flowrt.transports.emulation.channel import EmulatedChannel
from flowrt.transports.emulation.nic import Nic
from flowrt.transports.emulation.profiles import profile_of
from flowrt.transports.registry import get_transport
from flowrt.transports.wire.message import Message, Tensor, TensorSpec

S = TypeVar("S", bound=msgspec.Struct)

LIMITS = Limits(max_message_bytes=1 << 24, capacity_bytes=8 << 20)
KEY = bytes(32)  # the channels stay on this machine, and carry nothing


class Setting(msgspec.Struct, frozen=True):
    """The transport below, the link above it, and the dilation."""

    transport: str
    link: str
    dilation: float


class Flow(msgspec.Struct, frozen=True):
    """What one channel sends: messages one after the other, `pause_seconds` after each has been handed over."""

    num_messages: int
    num_bytes: int
    pause_seconds: float = 0.0


class Received(msgspec.Struct, frozen=True):
    """One message: which flow, when its `send` was called, when `recv` gave it. Seconds of the machine's monotonic clock."""

    flow: int
    sent_seconds: float
    received_seconds: float


class _Listen(msgspec.Struct, tag=True, frozen=True):
    setting: Setting
    flows: list[Flow]


class _Send(msgspec.Struct, tag=True, frozen=True):
    setting: Setting
    address: str
    flows: list[Flow]
    first: int  # the number of the first flow
    begin_seconds: float


class _Address(msgspec.Struct, frozen=True):
    address: str


class _Outcome(msgspec.Struct, frozen=True):
    received: list[Received]
    num: int
    num_late: int


class _Sent(msgspec.Struct, frozen=True):
    """Header of a message, and the answer to an order to send."""

    flow: int
    seconds: float


class LinkPeer:
    """The process, for as long as the block."""

    def __init__(self) -> None:
        self._process: asyncio.subprocess.Process | None = None

    async def __aenter__(self) -> Self:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "flowrt.bench.link_peer",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=environment,
            limit=1 << 24,
        )
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        process = self._process
        assert process is not None
        assert process.stdin is not None
        process.stdin.close()  # its end-of-file is the process's end, also if we die
        if error is not None and process.returncode is None:
            process.kill()
        await process.wait()

    async def listen(self, setting: Setting, flows: Sequence[Flow]) -> str:
        """Wait for as many channels as `flows`, and for all their messages. The address to send to."""
        answer = await self._ask(_Listen(setting, list(flows)), _Address)
        return answer.address

    async def received(self) -> tuple[list[Received], Lateness]:
        """What came, once all has, and how much of it was late."""
        outcome = await self._answer(_Outcome)
        return outcome.received, Lateness(outcome.num, outcome.num_late)

    async def send(self, setting: Setting, address: str, flows: Sequence[Flow], first: int, begin_seconds: float) -> None:
        """Send the flows, numbered from `first`, each over a channel of its own, from `begin_seconds` on."""
        await self._ask(_Send(setting, address, list(flows), first, begin_seconds), _Sent)

    async def _ask(self, order: msgspec.Struct, answer: type[S]) -> S:
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(msgspec.json.encode(order) + b"\n")
        await self._process.stdin.drain()
        return await self._answer(answer)

    async def _answer(self, answer: type[S]) -> S:
        assert self._process is not None
        assert self._process.stdout is not None
        line = await self._process.stdout.readline()
        if not line:
            raise RuntimeError("a process of the benchmark ended before its time")
        return msgspec.json.decode(line, type=answer)


# The process.


async def _obey() -> None:
    reader = asyncio.StreamReader(limit=1 << 24)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    timer = new_timer()
    while line := await reader.readline():
        order = msgspec.json.decode(line, type=_Listen | _Send)
        if isinstance(order, _Listen):
            await _receive_all(order, timer)
        else:
            await _send_all(order, timer)
    timer.close()


def _say(answer: msgspec.Struct) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(answer) + b"\n")
    sys.stdout.buffer.flush()


async def _receive_all(order: _Listen, timer: Timer) -> None:
    setting, lateness = order.setting, Lateness()
    nic = Nic(profile_of(setting.link), timer, setting.dilation, lateness.note)
    received: list[Received] = []

    async def receive(channel: Channel) -> None:
        flow, num = Flow(1, 0), 0
        while num < flow.num_messages:
            message = await channel.recv()
            now, sent = timer.now(), message.decode_header(_Sent)
            flow, num = order.flows[sent.flow], num + 1
            received.append(Received(sent.flow, sent.seconds, now))

    async with AsyncExitStack() as stack:
        transport = get_transport(setting.transport)
        listener = await stack.enter_async_context(await transport.listen(f"{setting.transport}://", LIMITS, KEY, Identity("receiver")))
        _say(_Address(listener.address))
        async with asyncio.TaskGroup() as group:
            for _ in order.flows:
                channel = await stack.enter_async_context(EmulatedChannel(await listener.accept(), nic, LIMITS))
                group.create_task(receive(channel))
    nic.close()
    _say(_Outcome(received, lateness.num, lateness.num_late))


async def _send_all(order: _Send, timer: Timer) -> None:
    setting = order.setting
    nic = Nic(profile_of(setting.link), timer, setting.dilation)

    async def send(channel: Channel, number: int, flow: Flow) -> None:
        tensor = Tensor(TensorSpec("uint8", (flow.num_bytes,)), bytes(flow.num_bytes))
        await timer.wait_until(order.begin_seconds)
        for _ in range(flow.num_messages):
            await channel.send(Message("data", header=_Sent(number, timer.now()), tensors=(tensor,)))
            if flow.pause_seconds:
                await timer.wait_until(timer.now() + flow.pause_seconds)

    async with AsyncExitStack() as stack:
        transport = get_transport(setting.transport)
        channels = []
        for _ in order.flows:
            below = await transport.connect(order.address, LIMITS, KEY, Identity("sender"))
            channels.append(await stack.enter_async_context(EmulatedChannel(below, nic, LIMITS)))
        async with asyncio.TaskGroup() as group:
            for index, (channel, flow) in enumerate(zip(channels, order.flows, strict=True)):
                group.create_task(send(channel, order.first + index, flow))
    nic.close()
    _say(_Sent(order.first, timer.now()))


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(_obey())
