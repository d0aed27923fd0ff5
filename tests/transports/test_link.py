"""The emulated link: exact in virtual time, a normal channel in real time, reports of late frames, and complete cleanup."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from functools import partial
from typing import TypeVar

import pytest

from flowrt.costs.links import PROFILES, LinkProfile
from flowrt.simulation.world import World, run
from flowrt.timer import LoopTimer, new_timer
from flowrt.transports.conformance import channel_checks as checks
from flowrt.transports.conformance import connection_checks as checks_meeting
from flowrt.transports.conformance import kit
from flowrt.transports.conformance.kit import Check
from flowrt.transports.contract import Channel, Identity, Limits
from flowrt.transports.emulation.channel import PASSED, EmulatedChannel, Passed
from flowrt.transports.emulation.nic import Nic
from flowrt.transports.errors import BrokenChannelError, EndOfChannel
from flowrt.transports.inproc import InprocChannel
from flowrt.transports.registry import unavailable_reason
from flowrt.transports.wire.message import Message, Tensor, TensorSpec

T = TypeVar("T")
LINK = LinkProfile("test", latency_seconds=1.0, bandwidth_bytes_per_second=1000.0, message_seconds=0.5)
LIMITS = Limits(capacity_messages=64)


def message(number: int, num_bytes: int = 0) -> Message:
    tensors = (Tensor(TensorSpec("uint8", (num_bytes,)), bytes(num_bytes)),) if num_bytes else ()
    return Message("data", edge=number, tensors=tensors)


class Hosts:
    """Processes, each with one NIC, in virtual time; `late` collects what their NICs note."""

    def __init__(self, profile: LinkProfile = LINK, dilation: float = 1.0) -> None:
        self.timer = LoopTimer()
        self.notes: list[tuple[float, float]] = []
        self._nics: dict[str, Nic] = {}
        self._new = lambda: Nic(profile, self.timer, dilation, lambda modelled, late: self.notes.append((modelled, late)))

    def nic(self, name: str) -> Nic:
        return self._nics.setdefault(name, self._new())

    def pair(
        self, one: str, two: str, limits: Limits = LIMITS, has_priority: Callable[[Message], bool] = lambda message: False
    ) -> tuple[EmulatedChannel, EmulatedChannel]:
        a, b = InprocChannel.pair(limits, Identity(one), Identity(two))
        return EmulatedChannel(a, self.nic(one), limits, has_priority), EmulatedChannel(b, self.nic(two), limits, has_priority)

    async def arrivals(self, channel: Channel, count: int) -> list[tuple[int, float]]:
        found = []
        for _ in range(count):
            got = await channel.recv()
            found.append((got.edge, round(self.timer.now() - self.start, 6)))
        return found

    def begin(self) -> None:
        self.start = self.timer.now()


def in_virtual_time(main: Callable[[AsyncExitStack], Awaitable[T]]) -> T:
    async def inside(world: World) -> T:
        async with AsyncExitStack() as stack:
            return await main(stack)

    return run(0, inside).result


async def opened(stack: AsyncExitStack, pair: tuple[EmulatedChannel, EmulatedChannel]) -> tuple[EmulatedChannel, EmulatedChannel]:
    for channel in pair:
        stack.push_async_callback(channel.aclose)
    return pair


def test_small_messages_overtake_bulk_at_both_nics() -> None:
    async def main(stack: AsyncExitStack) -> list[tuple[int, float]]:
        hosts = Hosts()
        a, b = await opened(stack, hosts.pair("a", "b", has_priority=lambda message: message.edge >= 10))
        hosts.begin()
        for number in (1, 2):
            stack.push_async_callback(asyncio.gather, asyncio.ensure_future(a.send(message(number, 4000))))
        await asyncio.sleep(1.0)
        assert a.send_nowait(message(10))  # beside bulk that is served, and bulk that waits
        assert a.send_nowait(message(11))
        return await hosts.arrivals(b, 4)

    # Both take half a second, one after another. Bulk takes 4.5 s, and waits for one second at each NIC, at the same time.
    assert in_virtual_time(main) == [(10, 2.5), (11, 3.0), (1, 6.5), (2, 11.0)]


def test_one_message_takes_its_cost_its_bytes_and_the_latency() -> None:
    async def main(stack: AsyncExitStack) -> list[tuple[int, float]]:
        hosts = Hosts(dilation=10.0)
        one, two = await opened(stack, hosts.pair("one", "two"))
        hosts.begin()
        await one.send(message(7, 2000))
        found = await hosts.arrivals(two, 1)
        assert hosts.notes == [(pytest.approx(35.0), 0.0)]
        return found

    assert in_virtual_time(main) == [(7, 35.0)]  # 10 x (0.5 + 2 + 1)


def test_messages_of_a_channel_follow_each_other_without_a_gap() -> None:
    async def main(stack: AsyncExitStack) -> list[tuple[int, float]]:
        hosts = Hosts()
        one, two = await opened(stack, hosts.pair("one", "two"))
        hosts.begin()
        async with asyncio.TaskGroup() as group:
            group.create_task(_send(one, [message(number, 1500) for number in range(4)]))
            return await hosts.arrivals(two, 4)

    assert in_virtual_time(main) == [(0, 3.0), (1, 5.0), (2, 7.0), (3, 9.0)]


async def _send(channel: Channel, messages: list[Message]) -> None:
    for each in messages:
        await channel.send(each)


def test_eight_flows_out_of_one_nic_share_it() -> None:
    async def main(stack: AsyncExitStack) -> set[float]:
        hosts = Hosts()
        pairs = [await opened(stack, hosts.pair("one", f"two{number}")) for number in range(8)]
        hosts.begin()
        async with asyncio.TaskGroup() as group:
            for one, _ in pairs:
                group.create_task(_send(one, [message(0, 1500)] * 3))
            got = [group.create_task(hosts.arrivals(two, 3)) for _, two in pairs]
        assert len(hosts.notes) == 24
        return {time for task in got for _, time in task.result()}

    assert in_virtual_time(main) == {17.0, 33.0, 49.0}  # 8 x 2 each, and the latency once


def test_eight_nics_into_one_share_the_receivers() -> None:
    """Neither end is paced: the senders run at full speed, and the receiver's NIC limits them to its own speed."""

    async def main(stack: AsyncExitStack) -> list[float]:
        hosts = Hosts()
        pairs = [await opened(stack, hosts.pair(f"one{number}", "two")) for number in range(8)]
        hosts.begin()
        async with asyncio.TaskGroup() as group:
            for one, _ in pairs:
                group.create_task(_send(one, [message(0, 1500)] * 3))
            got = [group.create_task(hosts.arrivals(two, 3)) for _, two in pairs]
        return sorted(time for task in got for _, time in task.result())

    assert in_virtual_time(main) == [17.0] * 8 + [33.0] * 8 + [49.0] * 8


def test_a_small_message_pays_its_share_and_not_the_bulk() -> None:
    async def main(stack: AsyncExitStack) -> list[tuple[int, float]]:
        hosts = Hosts()
        bulk, _ = await opened(stack, hosts.pair("one", "two"))
        small, other = await opened(stack, hosts.pair("one", "three"))
        hosts.begin()
        await bulk.send(message(0, 100_000))
        await small.send(message(1))
        return await hosts.arrivals(other, 1)

    assert in_virtual_time(main) == [(1, 2.0)]  # 0.5 at half the speed, and the latency


def test_the_two_directions_of_a_nic_are_two() -> None:
    async def main(stack: AsyncExitStack) -> list[tuple[int, float]]:
        hosts = Hosts()
        one, two = await opened(stack, hosts.pair("one", "two"))
        hosts.begin()
        await one.send(message(0, 9500))
        await two.send(message(1, 9500))
        return await hosts.arrivals(one, 1) + await hosts.arrivals(two, 1)

    assert in_virtual_time(main) == [(1, 11.0), (0, 11.0)]


def test_cancelled_send_loses_no_message() -> None:
    async def main(stack: AsyncExitStack) -> list[tuple[int, float]]:
        hosts = Hosts()
        one, two = await opened(stack, hosts.pair("one", "two"))
        hosts.begin()
        await one.send(message(0, 1500))
        waiting = asyncio.ensure_future(one.send(message(1, 1500)))
        await asyncio.sleep(1.0)
        waiting.cancel()
        await asyncio.wait([waiting])
        assert waiting.cancelled()
        await one.send(message(2, 1500))
        return await hosts.arrivals(two, 2)

    assert in_virtual_time(main) == [(0, 3.0), (2, 5.0)]


def test_what_was_sent_before_the_end_comes_in_its_time_and_then_the_end() -> None:
    async def main(stack: AsyncExitStack) -> list[tuple[int, float]]:
        hosts = Hosts()
        one, two = await opened(stack, hosts.pair("one", "two"))
        hosts.begin()
        await one.send(message(0, 1500))
        await one.aclose()
        found = await hosts.arrivals(two, 1)
        with pytest.raises(EndOfChannel):
            await two.recv()
        return found

    assert in_virtual_time(main) == [(0, 3.0)]


def test_a_receiver_that_does_not_read_stops_the_sender() -> None:
    async def main(stack: AsyncExitStack) -> int:
        hosts = Hosts()
        limits = Limits(capacity_messages=3)
        one, two = await opened(stack, hosts.pair("one", "two", limits))
        sending = asyncio.ensure_future(_send(one, [message(number) for number in range(50)]))
        await asyncio.sleep(1000.0)
        sent = one.statistics().messages_sent
        hosts.begin()
        assert [number for number, _ in await hosts.arrivals(two, 50)] == list(range(50))
        await sending
        return sent

    assert in_virtual_time(main) <= 2 * 3 + 2


def test_late_frame_is_reported() -> None:
    """The channel below takes longer than the link: what is given out late is noted with how much."""

    async def main(stack: AsyncExitStack) -> list[tuple[float, float]]:
        hosts = Hosts(LinkProfile("short", 1e-3, 1e9, 0.0))
        below, above = InprocChannel.pair(LIMITS, Identity("one"), Identity("two"))
        two = EmulatedChannel(above, hosts.nic("two"), LIMITS)
        stack.push_async_callback(two.aclose)
        stack.push_async_callback(below.aclose)
        aside, back = InprocChannel.pair(LIMITS, Identity("two"), Identity("one"))
        one = EmulatedChannel(aside, hosts.nic("one"), LIMITS)
        stack.push_async_callback(one.aclose)
        stack.push_async_callback(back.aclose)
        await one.send(message(0))
        await asyncio.sleep(0.25)  # on the way
        for _ in range(2):
            await below.send(await back.recv())
        await two.recv()
        return hosts.notes

    assert in_virtual_time(main) == [(pytest.approx(1e-3), pytest.approx(0.249))]


async def test_nonsense_breaks_the_channel_and_nothing_more() -> None:
    timer = new_timer()
    nic = Nic(LINK, timer)
    below, above = InprocChannel.pair(LIMITS, Identity("one"), Identity("two"))
    two = EmulatedChannel(above, nic, LIMITS)
    await below.send(Message("data", header=b"\x01"))
    with pytest.raises(BrokenChannelError, match="none of an emulated link"):
        await two.recv()
    await two.aclose()
    await below.aclose()
    nic.close()
    timer.close()


def test_receivers_beside_one_that_gets_ten_times_as_much_are_not_slowed() -> None:
    """Many to many, as between groups and servers: a channel for each pair, and a NIC for each process (MegaScale-Infer section 5)."""

    async def others_seconds(stack: AsyncExitStack, factor: int) -> float:
        hosts = Hosts(PROFILES["roce-200g"])
        pairs = [[await opened(stack, hosts.pair(f"s{sender}", f"r{number}")) for number in range(4)] for sender in range(4)]
        hosts.begin()
        async with asyncio.TaskGroup() as group:
            for channels in pairs:
                for number, (one, _) in enumerate(channels):
                    group.create_task(_send(one, [message(0, (1 if number else factor) << 18)]))
            for channels in pairs:
                group.create_task(hosts.arrivals(channels[0][1], 1))
            received = [group.create_task(hosts.arrivals(two, 1)) for channels in pairs for _, two in channels[1:]]
        return max(seconds for each in received for _, seconds in each.result())

    even, uneven = (in_virtual_time(partial(others_seconds, factor=factor)) for factor in (1, 10))
    assert even > 4 * (1 << 18) / PROFILES["roce-200g"].bandwidth_bytes_per_second
    assert uneven <= 1.2 * even


def test_notices_about_unknown_messages_change_nothing() -> None:
    async def main(stack: AsyncExitStack) -> None:
        hosts = Hosts()
        below, above = InprocChannel.pair(LIMITS, Identity("one"), Identity("two"))
        two = EmulatedChannel(above, hosts.nic("two"), LIMITS)
        stack.push_async_callback(two.aclose)
        await below.send(Message(PASSED, header=Passed(99, 0.0)))
        await below.aclose()
        with pytest.raises(EndOfChannel):
            await two.recv()

    in_virtual_time(main)


FAST = LinkProfile("fast", latency_seconds=20e-6, bandwidth_bytes_per_second=50e9, message_seconds=1e-6)
BY_MESSAGE = LinkProfile("by message", latency_seconds=20e-6, bandwidth_bytes_per_second=50e9, message_seconds=1.0)
BY_BYTES = LinkProfile("by bytes", latency_seconds=20e-6, bandwidth_bytes_per_second=1e3, message_seconds=1e-6)
# These fill a channel and take it for full until the other end reads. A link is full only while it carries a message: it must be slow,
# and for the first check carry an empty message back before it has carried one with bytes.
FULL = {
    "check_bounds": BY_BYTES,
    "check_queue_of_senders": BY_MESSAGE,
    "check_close_under_pending_calls": BY_MESSAGE,
}
CHECKS = checks.CHANNEL_CHECKS


@pytest.mark.parametrize("check", [check for check in CHECKS if check.__name__ not in FULL], ids=lambda check: check.__name__)
@pytest.mark.parametrize("scheme", ["inproc", "shm"])
async def test_passes_the_channel_checks(scheme: str, check: Check, loop_kind: str) -> None:
    if (reason := unavailable_reason(scheme)) is not None:
        pytest.skip(reason)
    timer, nics = new_timer(), []

    async def make_pair(limits: Limits) -> tuple[Channel, Channel]:
        one, two = await checks_meeting.pair_maker(scheme)(limits)
        nics.extend(Nic(FAST, timer) for _ in range(2))
        return EmulatedChannel(one, nics[-2], limits), EmulatedChannel(two, nics[-1], limits)

    try:
        await check(make_pair)
    finally:
        for nic in nics:
            nic.close()
        timer.close()


@pytest.mark.parametrize("check", [check for check in CHECKS if check.__name__ in FULL], ids=lambda check: check.__name__)
def test_passes_the_channel_checks_when_full(check: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kit, "PATIENCE_SECONDS", 1e6)  # of virtual time

    async def main(stack: AsyncExitStack) -> None:
        async def make_pair(limits: Limits) -> tuple[Channel, Channel]:
            return Hosts(FULL[check.__name__]).pair("one", "two", limits)

        await check(make_pair)

    in_virtual_time(main)
