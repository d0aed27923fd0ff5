"""Emulated links between processes beside their own profiles: latency, bandwidth, and flows that share a NIC.

Latencies are one way, from the call of `send` to the return of `recv` in the other process, on the clock that both share. Every figure is
in the time of the profile: divided by the dilation.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager, closing
from dataclasses import dataclass
from statistics import median
from typing import Any

import msgspec

from flowrt.bench.measure.benchmark import Results, Trial, open_all
from flowrt.bench.peers.links import FlowArrival, LinkFlow, LinkSetting
from flowrt.bench.peers.process import Peer, start_peer
from flowrt.bench.report.figures import Figure, Target
from flowrt.costs.links import LinkProfile, profile_of
from flowrt.emulation import MAX_LATE_SHARE, Lateness, check_dilation, smallest_dilation
from flowrt.errors import UserError
from flowrt.graph.notation import parse_link
from flowrt.launcher.transport_choice import AUTO, BETWEEN
from flowrt.observe import duration_text
from flowrt.timer import measure_lateness, new_timer
from flowrt.transports.errors import AddressError
from flowrt.transports.registry import transport_class, unavailable_reason

NUM_FLOWS = 8
BULK_BYTES, SMALL_BYTES = 1 << 20, 64
WITHIN = 0.05
REAL_BYTES_PER_SECOND = 0.12e9  # that this machine moves, whatever the link: its own copies must not count
LEAD_SECONDS = 0.2  # from the request to send to the first message


@dataclass(frozen=True)
class LinkCase:
    """`senders`: the flows of each sending process. A latency is that of the last flow of all."""

    name: str
    senders: Sequence[Sequence[LinkFlow]]
    modelled_seconds: float
    is_bandwidth: bool = False

    def measured_seconds(self, received: Sequence[FlowArrival], dilation: float) -> float:
        """Returns the seconds from the first send to the last arrival of all flows, or the median latency of the last flow."""
        if self.is_bandwidth:
            first = min(each.sent_seconds for each in received)
            return (max(each.received_seconds for each in received) - first) / dilation
        last_flow = max(each.flow for each in received)
        return median(each.received_seconds - each.sent_seconds for each in received if each.flow == last_flow) / dilation

    @property
    def num_bytes(self) -> int:
        return sum(flow.num_messages * flow.num_bytes for flows in self.senders for flow in flows)


def cases_of(profile: LinkProfile, dilation: float) -> list[LinkCase]:
    """Pauses are in real seconds."""
    small, bulk = profile.seconds(SMALL_BYTES), profile.seconds(BULK_BYTES)
    busy = profile.busy_seconds(BULK_BYTES)
    stream = LinkFlow(8, BULK_BYTES)
    background = LinkFlow(16, BULK_BYTES)
    many = NUM_FLOWS * stream.num_messages * busy + profile.latency_seconds
    beside = (NUM_FLOWS + 1) * profile.busy_seconds(SMALL_BYTES) + profile.latency_seconds
    num_small = max(2, int(background.num_messages * NUM_FLOWS * busy / (3 * beside)))
    return [
        LinkCase("latency, 64 B", [[LinkFlow(12, SMALL_BYTES, 2 * small * dilation)]], small),
        LinkCase("latency, 1 MiB", [[LinkFlow(6, BULK_BYTES, 2 * bulk * dilation)]], bulk),
        LinkCase("bandwidth, 1 flow", [[stream]], stream.num_messages * busy + profile.latency_seconds, True),
        LinkCase(f"bandwidth, {NUM_FLOWS} flows of one process to one", [[stream] * NUM_FLOWS], many, True),
        LinkCase(f"bandwidth, {NUM_FLOWS} processes to one", [[stream]] * NUM_FLOWS, many, True),
        LinkCase(
            f"latency, 64 B beside {NUM_FLOWS} flows of 1 MiB",
            [[background] * NUM_FLOWS + [LinkFlow(min(20, num_small), SMALL_BYTES, 2 * beside * dilation)]],
            beside,
        ),
    ]


async def choose_dilation(profile: LinkProfile, wanted: float | None) -> float:
    """`wanted`, or one that this machine allows. Raises UserError with the smallest when `wanted` is too small."""
    with closing(new_timer()) as timer:
        lateness = await measure_lateness(timer)
    times = {f"a message on link {profile.name}": profile.seconds(0)}
    if wanted is not None:
        check_dilation(wanted, times, lateness[0])
        return wanted
    smallest, _ = smallest_dilation(times, lateness[len(lateness) // 2])
    return float(round(max(1.5 * smallest, profile.bandwidth_bytes_per_second / REAL_BYTES_PER_SECOND)))


async def measure(link: str, dilation: float | None, transport: str) -> Results:
    """Each figure has the number of the profile as its peer. The last note counts the late messages."""
    try:
        link = parse_link(link)
    except ValueError as error:
        raise UserError(f"--profile {error}") from None
    profile = profile_of(link)
    if profile.seconds(0) <= 0:
        raise UserError(f"--profile {link}: an empty message takes no time; give it latency_seconds or message_seconds above 0")
    transport = _transport_below(transport)
    dilation = await choose_dilation(profile, dilation)
    bulk_text = duration_text(dilation * profile.seconds(BULK_BYTES))
    yield f"{link} at dilation {dilation:g} over {transport}; a message of 1 MiB takes {bulk_text} here"
    setting, total = LinkSetting(transport, link, dilation), Lateness()
    async with open_all(link_process() for _ in range(1 + NUM_FLOWS)) as opened:
        receiver, *senders = (peer for peer, _ in opened)
        for case in cases_of(profile, dilation):

            async def measured(case: LinkCase = case) -> float:
                arrivals, lateness = await measure_round(setting, case, receiver, senders)
                total.num, total.num_late = total.num + lateness.num, total.num_late + lateness.num_late
                return case.measured_seconds(arrivals, setting.dilation)

            yield Trial([measured], lambda values, case=case: [figure_of(case, values[0])])  # type: ignore[misc]  # case is bound now
    if total.num_late > MAX_LATE_SHARE * total.num:
        yield f"VOID: {total.num_late} of {total.num} messages came later than modelled: this machine is too busy, or raise --dilation"
    else:
        yield f"{total.num_late} of {total.num} messages came later than modelled, at most one in a hundred may"


def _transport_below(wanted: str) -> str:
    """The given transport, or the one that `auto` takes between processes. Raises UserError."""
    reasons = []
    for name in BETWEEN if wanted == AUTO else (wanted,):
        try:
            if (reason := unavailable_reason(name)) is None:
                if transport_class(name).capabilities.between_processes:
                    return name
                reason = "it stays within one process"
        except AddressError as error:
            reason = str(error)
        reasons.append(f"{name}: {reason}")
    raise UserError(f"--transport {wanted}: " + "; ".join(reasons))


def link_process() -> AbstractAsyncContextManager[tuple[Peer, dict[str, Any]]]:
    return start_peer("a process of the benchmark", "flowrt.bench.peers.links")


async def measure_round(
    setting: LinkSetting, case: LinkCase, receiver: Peer, senders: Sequence[Peer]
) -> tuple[list[FlowArrival], Lateness]:
    """Every message, once all have arrived, and how many were late."""
    listening = await receiver.request(action="listen", setting=setting, flows=[flow for flows in case.senders for flow in flows])
    shared = {"action": "send", "setting": setting, "begin_seconds": time.monotonic() + LEAD_SECONDS, **listening}
    first = 0
    async with asyncio.TaskGroup() as group:
        for sender, flows in zip(senders, case.senders, strict=False):
            group.create_task(sender.request(**shared, flows=flows, first=first))
            first += len(flows)
        response = await receiver.request(action="receive")
    return msgspec.convert(response["arrivals"], list[FlowArrival]), Lateness(response["num"], response["num_late"])


def figure_of(case: LinkCase, measured: Sequence[float]) -> Figure:
    def shown(seconds: float) -> float:
        return case.num_bytes / seconds / 1e9 if case.is_bandwidth else 1e6 * seconds

    unit, target = ("GB/s", Target(1 - WITHIN, at_most=False)) if case.is_bandwidth else ("us", Target(1 + WITHIN))
    return Figure.paired(case.name, unit, list(map(shown, measured)), "profile", [shown(case.modelled_seconds)] * len(measured), target)
