"""The emulated link: exact in virtual time, a normal channel in real time, reports of late frames, and complete cleanup."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack

import pytest
from virtual_time import in_virtual_time

from flowrt.costs.links import PROFILES, LinkProfile
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

LINK = LinkProfile("test", latency_seconds=1.0, bandwidth_bytes_per_second=1000.0, message_seconds=0.5)
LIMITS = Limits(capacity_messages=64)


def message(number: int, num_bytes: int = 0) -> Message:
    tensors = (Tensor(TensorSpec("uint8", (num_bytes,)), bytes(num_bytes)),) if num_bytes else ()
    return Message("data", edge=number, tensors=tensors)


class Hosts(AsyncExitStack):
    """Processes, each with one NIC, in virtual time; `notes` collects what their NICs note. Closes their channels at its end."""

    def __init__(self, profile: LinkProfile = LINK, dilation: float = 1.0) -> None:
        super().__init__()
        self.timer = LoopTimer()
        self.start = self.timer.now()
        self.notes: list[tuple[float, float]] = []
        self._nics: dict[str, Nic] = {}
        self._new = lambda: Nic(profile, self.timer, dilation, lambda modelled, late: self.notes.append((modelled, late)))

    def nic(self, name: str) -> Nic:
        return self._nics.setdefault(name, self._new())

    def pair(
        self, one: str, two: str, limits: Limits = LIMITS, has_priority: Callable[[Message], bool] = lambda message: False
    ) -> tuple[EmulatedChannel, EmulatedChannel]:
        a, b = InprocChannel.pair(limits, Identity(one), Identity(two))
        return self.emulated(a, one, limits, has_priority), self.emulated(b, two, limits, has_priority)

    def emulated(
        self, channel: Channel, name: str, limits: Limits = LIMITS, has_priority: Callable[[Message], bool] = lambda message: False
    ) -> EmulatedChannel:
        emulated = EmulatedChannel(channel, self.nic(name), limits, has_priority)
        self.push_async_callback(emulated.aclose)
        return emulated

    async def arrivals(self, channel: Channel, count: int) -> list[tuple[int, float]]:
        found = []
        for _ in range(count):
            got = await channel.recv()
            found.append((got.edge, round(self.timer.now() - self.start, 6)))
        return found


@in_virtual_time
async def test_small_messages_overtake_bulk_at_both_nics() -> None:
    async with Hosts() as hosts:
        a, b = hosts.pair("a", "b", has_priority=lambda message: message.edge >= 10)
        for number in (1, 2):
            hosts.push_async_callback(asyncio.gather, asyncio.ensure_future(a.send(message(number, 4000))))
        await asyncio.sleep(1.0)
        assert a.send_nowait(message(10))  # beside bulk that is served, and bulk that waits
        assert a.send_nowait(message(11))
        # Both take half a second, one after another. Bulk takes 4.5 s, and waits for one second at each NIC, at the same time.
        assert await hosts.arrivals(b, 4) == [(10, 2.5), (11, 3.0), (1, 6.5), (2, 11.0)]


@in_virtual_time
async def test_one_message_takes_its_cost_its_bytes_and_the_latency() -> None:
    async with Hosts(dilation=10.0) as hosts:
        one, two = hosts.pair("one", "two")
        await one.send(message(7, 2000))
        assert await hosts.arrivals(two, 1) == [(7, 35.0)]  # 10 x (0.5 + 2 + 1)
        assert hosts.notes == [(pytest.approx(35.0), 0.0)]


@in_virtual_time
async def test_messages_of_a_channel_follow_each_other_without_a_gap() -> None:
    async with Hosts() as hosts, asyncio.TaskGroup() as group:
        one, two = hosts.pair("one", "two")
        group.create_task(_send(one, [message(number, 1500) for number in range(4)]))
        assert await hosts.arrivals(two, 4) == [(0, 3.0), (1, 5.0), (2, 7.0), (3, 9.0)]


async def _send(channel: Channel, messages: list[Message]) -> None:
    for each in messages:
        await channel.send(each)


@in_virtual_time
@pytest.mark.parametrize("is_out", [True, False])
async def test_eight_flows_out_of_one_nic_or_into_one_share_it(is_out: bool) -> None:
    """Neither end is paced: where the senders run at full speed, the receiver's NIC limits them to its own speed."""
    async with Hosts() as hosts:
        pairs = [hosts.pair(*(("one", f"two{number}") if is_out else (f"one{number}", "two"))) for number in range(8)]
        async with asyncio.TaskGroup() as group:
            for one, _ in pairs:
                group.create_task(_send(one, [message(0, 1500)] * 3))
            got = [group.create_task(hosts.arrivals(two, 3)) for _, two in pairs]
        assert len(hosts.notes) == 24
        times = sorted(time for task in got for _, time in task.result())
        assert times == [17.0] * 8 + [33.0] * 8 + [49.0] * 8  # 8 x 2 each, and the latency once


@in_virtual_time
async def test_a_small_message_pays_its_share_and_not_the_bulk() -> None:
    async with Hosts() as hosts:
        (bulk, _), (small, other) = hosts.pair("one", "two"), hosts.pair("one", "three")
        await bulk.send(message(0, 100_000))
        await small.send(message(1))
        assert await hosts.arrivals(other, 1) == [(1, 2.0)]  # 0.5 at half the speed, and the latency


@in_virtual_time
async def test_the_two_directions_of_a_nic_are_two() -> None:
    async with Hosts() as hosts:
        one, two = hosts.pair("one", "two")
        await one.send(message(0, 9500))
        await two.send(message(1, 9500))
        assert await hosts.arrivals(one, 1) + await hosts.arrivals(two, 1) == [(1, 11.0), (0, 11.0)]


@in_virtual_time
async def test_cancelled_send_loses_no_message() -> None:
    async with Hosts() as hosts:
        one, two = hosts.pair("one", "two")
        await one.send(message(0, 1500))
        waiting = asyncio.ensure_future(one.send(message(1, 1500)))
        await asyncio.sleep(1.0)
        waiting.cancel()
        await asyncio.wait([waiting])
        assert waiting.cancelled()
        await one.send(message(2, 1500))
        assert await hosts.arrivals(two, 2) == [(0, 3.0), (2, 5.0)]


@in_virtual_time
async def test_what_was_sent_before_the_end_comes_in_its_time_and_then_the_end() -> None:
    async with Hosts() as hosts:
        one, two = hosts.pair("one", "two")
        await one.send(message(0, 1500))
        await one.aclose()
        assert await hosts.arrivals(two, 1) == [(0, 3.0)]
        with pytest.raises(EndOfChannel):
            await two.recv()


@in_virtual_time
async def test_a_receiver_that_does_not_read_stops_the_sender() -> None:
    async with Hosts() as hosts:
        one, two = hosts.pair("one", "two", Limits(capacity_messages=3))
        sending = asyncio.ensure_future(_send(one, [message(number) for number in range(50)]))
        await asyncio.sleep(1000.0)
        assert one.statistics().messages_sent <= 2 * 3 + 2
        assert [number for number, _ in await hosts.arrivals(two, 50)] == list(range(50))
        await sending


@in_virtual_time
async def test_late_frame_is_reported() -> None:
    """The channel below takes longer than the link: what is given out late is noted with how much."""
    async with Hosts(LinkProfile("short", 1e-3, 1e9, 0.0)) as hosts:
        below, above = InprocChannel.pair(LIMITS, Identity("one"), Identity("two"))
        aside, back = InprocChannel.pair(LIMITS, Identity("two"), Identity("one"))
        two, one = hosts.emulated(above, "two"), hosts.emulated(aside, "one")
        for channel in (below, back):
            hosts.push_async_callback(channel.aclose)
        await one.send(message(0))
        await asyncio.sleep(0.25)  # on the way
        for _ in range(2):
            await below.send(await back.recv())
        await two.recv()
        assert hosts.notes == [(pytest.approx(1e-3), pytest.approx(0.249))]


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


@in_virtual_time
async def test_receivers_beside_one_that_gets_ten_times_as_much_are_not_slowed() -> None:
    """Many to many, as between groups and servers: a channel for each pair, and a NIC for each process (MegaScale-Infer section 5)."""

    async def others_seconds(factor: int) -> float:
        async with Hosts(PROFILES["roce-200g"]) as hosts:
            pairs = [[hosts.pair(f"s{sender}", f"r{number}") for number in range(4)] for sender in range(4)]
            async with asyncio.TaskGroup() as group:
                for channels in pairs:
                    for number, (one, _) in enumerate(channels):
                        group.create_task(_send(one, [message(0, (1 if number else factor) << 18)]))
                for channels in pairs:
                    group.create_task(hosts.arrivals(channels[0][1], 1))
                received = [group.create_task(hosts.arrivals(two, 1)) for channels in pairs for _, two in channels[1:]]
            return max(seconds for each in received for _, seconds in each.result())

    even, uneven = await others_seconds(1), await others_seconds(10)
    assert even > 4 * (1 << 18) / PROFILES["roce-200g"].bandwidth_bytes_per_second
    assert uneven <= 1.2 * even


@in_virtual_time
async def test_notices_about_unknown_messages_change_nothing() -> None:
    async with Hosts() as hosts:
        below, above = InprocChannel.pair(LIMITS, Identity("one"), Identity("two"))
        two = hosts.emulated(above, "two")
        await below.send(Message(PASSED, header=Passed(99, 0.0)))
        await below.aclose()
        with pytest.raises(EndOfChannel):
            await two.recv()


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
@in_virtual_time
async def test_passes_the_channel_checks_when_full(check: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kit, "PATIENCE_SECONDS", 1e6)  # of virtual time

    async def make_pair(limits: Limits) -> tuple[Channel, Channel]:
        return Hosts(FULL[check.__name__]).pair("one", "two", limits)

    await check(make_pair)
