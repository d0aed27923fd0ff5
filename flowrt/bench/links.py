"""Emulated links against their own profiles, between processes: `flowrt bench links`.

Here: the cases, what the profile says of each, and the figures. Not here: the processes that send and receive (link_peer.py), the
emulation itself (transports/emulation/channel.py). Latencies are one way, from `send` to `recv` in the other process, on the
clock that both share; every figure is in the profile's own time, that is divided by the dilation.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from statistics import median

from flowrt.bench.link_peer import Flow, LinkPeer, Received, Setting
from flowrt.bench.pairs import Target
from flowrt.bench.report import Figure
from flowrt.emulation import MAX_LATE_SHARE, Lateness, check_dilation, smallest_dilation
from flowrt.errors import UserError
from flowrt.launcher.transport_choice import AUTO, BETWEEN
from flowrt.observe import duration_text
from flowrt.timer import measure_lateness, new_timer
from flowrt.transports.emulation.profiles import LinkProfile, profile_of
from flowrt.transports.errors import AddressError
from flowrt.transports.registry import transport_class, unavailable_reason

NUM_FLOWS = 8
BULK_BYTES, SMALL_BYTES = 1 << 20, 64
WITHIN = 0.05
REAL_BYTES_PER_SECOND = 0.12e9  # what this machine is asked to move, whatever the link: its copies must not be felt
LEAD_SECONDS = 0.2  # from the order to begin to the beginning


@dataclass(frozen=True)
class Case:
    """Who sends what: `senders` has the flows of each sending process; the last flow of all is the one that is looked at."""

    name: str
    senders: Sequence[Sequence[Flow]]
    modelled_seconds: float  # of what `measure` gives
    is_bandwidth: bool = False

    def measured_seconds(self, received: Sequence[Received], dilation: float) -> float:
        """Of one round: from the first send to the last arrival of all flows, or the median latency of the flow looked at."""
        if self.is_bandwidth:
            first = min(each.sent_seconds for each in received)
            return (max(each.received_seconds for each in received) - first) / dilation
        looked_at = max(each.flow for each in received)
        return median(each.received_seconds - each.sent_seconds for each in received if each.flow == looked_at) / dilation

    @property
    def num_bytes(self) -> int:
        return sum(flow.num_messages * flow.num_bytes for flows in self.senders for flow in flows)


def cases(profile: LinkProfile, dilation: float) -> list[Case]:
    """All cases; pauses are in real seconds."""
    small, bulk = profile.seconds(SMALL_BYTES), profile.seconds(BULK_BYTES)
    busy = profile.busy_seconds(BULK_BYTES)
    stream = Flow(8, BULK_BYTES)
    background = Flow(16, BULK_BYTES)
    many = NUM_FLOWS * stream.num_messages * busy + profile.latency_seconds
    beside = (NUM_FLOWS + 1) * profile.busy_seconds(SMALL_BYTES) + profile.latency_seconds
    num_small = max(2, int(background.num_messages * NUM_FLOWS * busy / (3 * beside)))
    return [
        Case("latency, 64 B", [[Flow(12, SMALL_BYTES, 2 * small * dilation)]], small),
        Case("latency, 1 MiB", [[Flow(6, BULK_BYTES, 2 * bulk * dilation)]], bulk),
        Case("bandwidth, 1 flow", [[stream]], stream.num_messages * busy + profile.latency_seconds, True),
        Case(f"bandwidth, {NUM_FLOWS} flows of one process to one", [[stream] * NUM_FLOWS], many, True),
        Case(f"bandwidth, {NUM_FLOWS} processes to one", [[stream]] * NUM_FLOWS, many, True),
        Case(
            f"latency, 64 B beside {NUM_FLOWS} flows of 1 MiB",
            [[background] * NUM_FLOWS + [Flow(min(20, num_small), SMALL_BYTES, 2 * beside * dilation)]],
            beside,
        ),
    ]


async def choose_dilation(profile: LinkProfile, asked: float | None) -> float:
    """`asked` if this machine allows it, else one that it allows. Raises UserError, naming the smallest."""
    timer = new_timer()
    try:
        lateness = await measure_lateness(timer)
    finally:
        timer.close()
    times = {f"a message on link {profile.name}": profile.seconds(0)}
    if asked is not None:
        check_dilation(asked, times, lateness[0])
        return asked
    smallest, _ = smallest_dilation(times, lateness[len(lateness) // 2])
    return float(round(max(1.5 * smallest, profile.bandwidth_bytes_per_second / REAL_BYTES_PER_SECOND)))


async def measure(link: str, dilation: float | None, num_rounds: int, transport: str) -> AsyncIterator[Figure | str]:
    """The figures one by one, each with the profile's own number as its peer; a text says what must be known besides."""
    try:
        profile = profile_of(link)
    except ValueError as error:
        raise UserError(f"--profile {error}") from None
    if profile.seconds(0) <= 0:
        raise UserError(f"--profile {link}: takes no time for a message without bytes; give it latency_seconds or message_seconds above 0")
    transport = _transport_below(transport)
    dilation = await choose_dilation(profile, dilation)
    bulk_text = duration_text(dilation * profile.seconds(BULK_BYTES))
    yield f"{link} at dilation {dilation:g} over {transport}; a message of 1 MiB takes {bulk_text} here"
    setting = Setting(transport, link, dilation)
    num, num_late = 0, 0
    async with AsyncExitStack() as stack:
        receiver = await stack.enter_async_context(LinkPeer())
        senders = [await stack.enter_async_context(LinkPeer()) for _ in range(NUM_FLOWS)]
        for case in cases(profile, dilation):
            measured = []
            for _ in range(num_rounds):
                received, lateness = await _round(setting, case, receiver, senders)
                measured.append(case.measured_seconds(received, dilation))
                num, num_late = num + lateness.num, num_late + lateness.num_late
            yield _figure(case, measured)
    if num_late > MAX_LATE_SHARE * num:
        yield f"VOID: {num_late} of {num} messages came later than modelled: this machine is too busy, or raise --dilation"
    else:
        yield f"{num_late} of {num} messages came later than modelled, at most one in a hundred may"


def _transport_below(asked: str) -> str:
    """The transport asked for, or what `auto` takes between processes. Raises UserError."""
    try:
        names = [asked] if asked != AUTO else list(BETWEEN)
        reasons = {name: unavailable_reason(name) for name in names}
        for name, reason in reasons.items():
            if reason is None and not transport_class(name).capabilities.between_processes:
                reasons[name] = "it stays within one process"
    except AddressError as error:
        raise UserError(f"--transport {asked}: {error}") from None
    works = [name for name, reason in reasons.items() if reason is None]
    if not works:
        raise UserError(f"--transport {asked}: " + "; ".join(f"{name}: {reason}" for name, reason in reasons.items()))
    return works[0]


async def _round(setting: Setting, case: Case, receiver: LinkPeer, senders: Sequence[LinkPeer]) -> tuple[list[Received], Lateness]:
    flows = [flow for flows in case.senders for flow in flows]
    address = await receiver.listen(setting, flows)
    begin = time.monotonic() + LEAD_SECONDS
    number, sending = 0, []
    async with asyncio.TaskGroup() as group:
        for sender, own in zip(senders, case.senders, strict=False):
            sending.append(group.create_task(sender.send(setting, address, own, number, begin)))
            number += len(own)
        received = group.create_task(receiver.received())
    return received.result()


def _figure(case: Case, measured: Sequence[float]) -> Figure:
    wanted = [case.modelled_seconds] * len(measured)
    if case.is_bandwidth:
        ours, theirs = ([case.num_bytes / seconds / 1e9 for seconds in each] for each in (measured, wanted))
        return Figure.paired(case.name, "GB/s", ours, "profile", theirs, Target(1 - WITHIN, at_most=False))
    ours, theirs = ([1e6 * seconds for seconds in each] for each in (measured, wanted))
    return Figure.paired(case.name, "us", ours, "profile", theirs, Target(1 + WITHIN))
