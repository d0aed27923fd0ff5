"""The simulated network under many seeds: no message is lost, duplicated or reordered, whatever the delays; and how a channel ends."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from flowrt.simulation.network_conditions import NetworkConditions
from flowrt.simulation.transport import SimulatedChannel
from flowrt.simulation.world import World, run
from flowrt.transports.conformance import channel_checks as checks
from flowrt.transports.conformance import connection_checks
from flowrt.transports.conformance.kit import Check
from flowrt.transports.contract import Channel, Identity, Limits
from flowrt.transports.errors import AddressError, BrokenChannelError, ClosedChannelError, EndOfChannel, HandshakeError, LimitError
from flowrt.transports.wire.message import Message, Tag, Tensor, TensorSpec

SEEDS = range(25)
ROUGH = NetworkConditions(slow_one_in=5, duplicate_one_in=3, tiny_one_in=2)


class Number(msgspec.Struct, frozen=True):
    value: int


def message(value: int, size: int = 8) -> Message:
    data = bytes(index * 7 + value & 255 for index in range(size))
    return Message("data", Tag("source@1", step=value), 3, Number(value), (Tensor(TensorSpec("uint8", (size,)), data),))


async def connected(world: World, limits: Limits = Limits()) -> tuple[Channel, Channel]:
    """(connecting end at node "left", accepting end at node "right")."""
    key = world.new_key()
    transport = world.network.transport("shm")

    async def listening() -> Channel:
        async with await transport.listen("shm://", limits, key, Identity("right", "r1")) as listener:
            address.set_result(listener.address)
            return await listener.accept()

    async def connecting() -> Channel:
        return await transport.connect(await address, limits, key, Identity("left", "l1"))

    address = world.loop.create_future()
    async with asyncio.TaskGroup() as group:
        right = group.create_task(listening(), context=world.context("right"))
        left = group.create_task(connecting(), context=world.context("left"))
    return left.result(), right.result()


@pytest.mark.parametrize("seed", SEEDS)
def test_every_message_arrives_once_and_in_order_both_ways(seed: int) -> None:
    async def main(world: World) -> tuple[list[int], list[int], int]:
        left, right = await connected(world, Limits(capacity_messages=4))
        assert (left.peer, right.peer) == (Identity("right", "r1"), Identity("left", "l1"))

        async def send(channel: Channel) -> None:
            for value in range(60):
                await channel.send(message(value, size=value))

        async def receive(channel: Channel) -> list[int]:
            got = []
            for _ in range(60):
                received = await channel.recv()
                value = received.decode_header(Number).value
                assert received.tag == Tag("source@1", step=value)
                assert bytes(memoryview(received.tensors[0].data)) == bytes(memoryview(message(value, size=value).tensors[0].data))
                got.append(value)
            return got

        async with asyncio.TaskGroup() as group:
            group.create_task(send(left), context=world.context("left"))
            group.create_task(send(right), context=world.context("right"))
            at_right = group.create_task(receive(right), context=world.context("right"))
            at_left = group.create_task(receive(left), context=world.context("left"))
        assert left.statistics().sends_waited > 0
        num_dropped = left.statistics().messages_dropped + right.statistics().messages_dropped
        await left.aclose()
        await right.aclose()
        return at_left.result(), at_right.result(), num_dropped

    outcome = run(seed, main, conditions=ROUGH)
    assert outcome.result[:2] == (list(range(60)), list(range(60)))
    assert outcome.result[2] > 0
    assert run(seed, main, conditions=ROUGH).digest == outcome.digest


CALM = NetworkConditions(slow_one_in=0, duplicate_one_in=4)


@pytest.mark.parametrize("check", checks.CHANNEL_CHECKS, ids=lambda check: check.__name__)
def test_passes_the_channel_checks(check: Check) -> None:
    for seed in range(3):

        async def main(world: World) -> None:
            await check(lambda limits: connected(world, limits))

        run(seed, main, conditions=CALM)


@pytest.mark.parametrize("check", connection_checks.CONNECTION_CHECKS, ids=lambda check: check.__name__)
def test_passes_the_connection_checks(check: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(3):

        async def main(world: World) -> None:
            monkeypatch.setattr(connection_checks, "get_transport", world.network.transport)
            await check("shm")

        run(seed, main, conditions=CALM)


def test_digest_covers_messages() -> None:
    async def main(world: World, size: int) -> None:
        left, right = await connected(world)
        await left.send(message(size, 8))
        await right.recv()
        await left.aclose()
        await right.aclose()

    calm = NetworkConditions(bytes_per_second=float("inf"))
    digests = [run(7, lambda world, value=value: main(world, value), conditions=calm).digest for value in (1, 2, 1)]
    assert digests[0] == digests[2] != digests[1]


@pytest.mark.parametrize("seed", SEEDS)
def test_close_arrives_after_sent_messages(seed: int) -> None:
    async def main(world: World) -> int:
        left, right = await connected(world)
        for value in range(5):
            await left.send(message(value))
        await left.aclose()
        await left.aclose()
        for value in range(5):
            assert (await right.recv()).decode_header(Number).value == value
        with pytest.raises(EndOfChannel):
            await right.recv()
        with pytest.raises(BrokenChannelError):
            await right.send(message(0))
        with pytest.raises(ClosedChannelError):
            await left.recv()
        await right.aclose()
        return 5

    assert run(seed, main, conditions=NetworkConditions(slow_one_in=5, duplicate_one_in=3)).result == 5


@pytest.mark.parametrize("seed", SEEDS)
def test_power_cut_breaks_the_channel_after_sent_messages(seed: int) -> None:
    async def main(world: World) -> int:
        left, right = await connected(world)
        for value in range(3):
            await left.send(message(value))
        assert isinstance(left, SimulatedChannel)
        left.sever()
        for value in range(3):
            assert (await right.recv()).decode_header(Number).value == value
        with pytest.raises(BrokenChannelError):
            await right.recv()
        await left.aclose()
        await right.aclose()
        return 3

    assert run(seed, main).result == 3


def test_a_full_channel_makes_the_sender_wait_and_a_waiting_call_wakes_at_the_close() -> None:
    async def main(world: World) -> list[str]:
        left, right = await connected(world, Limits(capacity_messages=2))
        assert left.send_nowait(message(0))
        assert left.send_nowait(message(1))
        assert not left.send_nowait(message(2))
        received = []

        async def wait(call: str) -> None:
            with pytest.raises(ClosedChannelError):
                await (left.send(message(2)) if call == "send" else left.recv())
            received.append(call)

        async with asyncio.TaskGroup() as group:
            group.create_task(wait("send"))
            group.create_task(wait("recv"))
            await asyncio.sleep(1)
            assert received == []
            await left.aclose()
        await right.aclose()
        return sorted(received)

    assert run(0, main).result == ["recv", "send"]


def test_unknown_peers_and_oversize_messages_are_refused() -> None:
    async def main(world: World) -> int:
        transport = world.network.transport("zmq")
        async with await transport.listen("zmq://there", Limits(), world.new_key(), Identity("right")) as listener:
            with pytest.raises(HandshakeError):
                await transport.connect("zmq://there", Limits(), world.new_key(), Identity("stranger"))
            with pytest.raises(AddressError):
                await transport.listen("zmq://there", Limits(), world.new_key(), Identity("twice"))
            with pytest.raises(AddressError):
                await transport.connect("zmq://elsewhere", Limits(), world.new_key(), Identity("left"))
            rejected = listener.rejected
        left, right = await connected(world, Limits(max_message_bytes=100))
        with pytest.raises(LimitError):
            await left.send(message(0, size=101))
        await left.send(message(0, size=100))
        assert (await right.recv()).payload_bytes == 100
        await left.aclose()
        await right.aclose()
        return rejected

    assert run(0, main).result == 1
