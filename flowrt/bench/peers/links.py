"""A process that sends or receives over emulated links; it has one NIC, however many flows.

Requests: "listen" accepts as many channels as `flows` and responds with the address to send to; "receive" responds with every arrival and
the counts of messages and late messages; "send" sends the flows, numbered from `first`, each over a channel of its own, from
`begin_seconds` on.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, closing
from typing import Any

import msgspec

from flowrt.bench.peers.process import Served
from flowrt.costs.links import profile_of
from flowrt.emulation import Lateness
from flowrt.timer import Timer, new_timer
from flowrt.transports.contract import Channel, Identity, Limits
from flowrt.transports.emulation.channel import EmulatedChannel
from flowrt.transports.emulation.nic import Nic
from flowrt.transports.registry import get_transport
from flowrt.transports.wire.message import Message, Tensor, TensorSpec

LIMITS = Limits(max_message_bytes=1 << 24, capacity_bytes=8 << 20)
KEY = bytes(32)  # the channels stay on this machine and carry zeros


class LinkSetting(msgspec.Struct, frozen=True):
    """The transport below, the link above it, and the dilation."""

    transport: str
    link: str
    dilation: float


class LinkFlow(msgspec.Struct, frozen=True):
    """What one channel sends: messages in sequence, `pause_seconds` after each has been sent."""

    num_messages: int
    num_bytes: int
    pause_seconds: float = 0.0


class FlowArrival(msgspec.Struct, frozen=True):
    """One message: its flow, when its `send` was called, when `recv` returned it. Seconds of the machine's monotonic clock."""

    flow: int
    sent_seconds: float
    received_seconds: float


class _Sent(msgspec.Struct, frozen=True):
    """Header of a message."""

    flow: int
    seconds: float


@asynccontextmanager
async def open_peer() -> AsyncIterator[Served]:
    async with asyncio.TaskGroup() as group:
        with closing(new_timer()) as timer:
            received: asyncio.Task[dict[str, Any]] | None = None

            async def respond(action: str, **request: Any) -> dict[str, Any]:
                nonlocal received
                if action == "receive" and received is not None:
                    return await received
                setting = msgspec.convert(request.pop("setting"), LinkSetting)
                flows = msgspec.convert(request.pop("flows"), list[LinkFlow])
                if action == "send":
                    await _send_all(timer, setting, flows, **request)
                    return {}
                address: asyncio.Future[str] = asyncio.get_running_loop().create_future()
                received = group.create_task(_receive_all(timer, setting, flows, address))
                return {"address": await address}

            yield {}, respond
            if received is not None:
                received.cancel()


async def _receive_all(timer: Timer, setting: LinkSetting, flows: Sequence[LinkFlow], address: asyncio.Future[str]) -> dict[str, Any]:
    lateness = Lateness()
    nic = Nic(profile_of(setting.link), timer, setting.dilation, lateness.note)
    arrivals: list[FlowArrival] = []

    async def receive(channel: Channel) -> None:
        flow, num = LinkFlow(1, 0), 0
        while num < flow.num_messages:
            message = await channel.recv()
            now, sent = timer.now(), message.decode_header(_Sent)
            flow, num = flows[sent.flow], num + 1
            arrivals.append(FlowArrival(sent.flow, sent.seconds, now))

    async with AsyncExitStack() as stack:
        transport = get_transport(setting.transport)
        listener = await stack.enter_async_context(await transport.listen(f"{setting.transport}://", LIMITS, KEY, Identity("receiver")))
        address.set_result(listener.address)
        async with asyncio.TaskGroup() as group:
            for _ in flows:
                channel = await stack.enter_async_context(EmulatedChannel(await listener.accept(), nic, LIMITS))
                group.create_task(receive(channel))
    nic.close()
    return {"arrivals": msgspec.to_builtins(arrivals), "num": lateness.num, "num_late": lateness.num_late}


async def _send_all(timer: Timer, setting: LinkSetting, flows: Sequence[LinkFlow], address: str, first: int, begin_seconds: float) -> None:
    nic = Nic(profile_of(setting.link), timer, setting.dilation)

    async def send(channel: Channel, number: int, flow: LinkFlow) -> None:
        tensor = Tensor(TensorSpec("uint8", (flow.num_bytes,)), bytes(flow.num_bytes))
        await timer.wait_until(begin_seconds)
        for _ in range(flow.num_messages):
            await channel.send(Message("data", header=_Sent(number, timer.now()), tensors=(tensor,)))
            if flow.pause_seconds:
                await timer.wait_until(timer.now() + flow.pause_seconds)

    async with AsyncExitStack() as stack:
        transport = get_transport(setting.transport)
        channels = []
        for _ in flows:
            below = await transport.connect(address, LIMITS, KEY, Identity("sender"))
            channels.append(await stack.enter_async_context(EmulatedChannel(below, nic, LIMITS)))
        async with asyncio.TaskGroup() as group:
            for number, (channel, flow) in enumerate(zip(channels, flows, strict=True), first):
                group.create_task(send(channel, number, flow))
    nic.close()
