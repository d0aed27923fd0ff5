"""The links benchmark: the modelled times of its cases, refusals, and one round between two processes. No time is asserted from above."""

from __future__ import annotations

import pytest

from flowrt.bench.cases.links import LinkCase, cases_of, choose_dilation, figure_of, link_process, measure, measure_round
from flowrt.bench.peers.links import FlowArrival, LinkFlow, LinkSetting
from flowrt.costs.links import PROFILES, LinkProfile
from flowrt.errors import UserError


def test_modelled_times_follow_the_profile() -> None:
    link = LinkProfile("test", 1e-3, 1 << 20, 0.0)  # a second for a MiB
    modelled_seconds = {case.name: case.modelled_seconds for case in cases_of(link, 1.0)}
    assert modelled_seconds["latency, 1 MiB"] == pytest.approx(1.001)
    assert modelled_seconds["bandwidth, 1 flow"] == pytest.approx(8.001)
    assert (
        modelled_seconds["bandwidth, 8 flows of one process to one"]
        == modelled_seconds["bandwidth, 8 processes to one"]
        == pytest.approx(64.001)
    )
    assert modelled_seconds["latency, 64 B beside 8 flows of 1 MiB"] == pytest.approx(9 * 64 / (1 << 20) + 1e-3)


def test_measured_times_are_divided_by_the_dilation() -> None:
    received = [FlowArrival(0, 10.0, 12.0), FlowArrival(1, 11.0, 13.0), FlowArrival(1, 11.0, 15.0), FlowArrival(1, 12.0, 14.0)]
    flows = [[LinkFlow(1, 1000), LinkFlow(3, 500)]]
    assert LinkCase("latency", flows, 1.0).measured_seconds(received, 2.0) == 1.0  # of flow 1: 2, 4 and 2 seconds
    bandwidth = LinkCase("bandwidth", flows, 2.5, True)
    assert bandwidth.measured_seconds(received, 2.0) == 2.5
    figure = figure_of(bandwidth, [2.5] * 6)
    assert (figure.ours.median, figure.ratio.median, figure.verdict) == (pytest.approx(1e-6), 1.0, "met")
    assert figure_of(LinkCase("latency", flows, 1.0), [1.1] * 6).verdict == "not met"


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (("ubb", None, "auto"), "--profile unknown link 'ubb'"),
        (("bandwidth_bytes_per_second=1e9", None, "auto"), "an empty message takes no time"),
        (("ub", None, "nonsense"), "--transport nonsense: "),
        (("ub", None, "inproc"), "stays within one process"),
    ],
)
async def test_bad_options_are_refused(options: tuple[str, float | None, str], reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        async for _ in measure(*options):
            pass


async def test_too_small_a_dilation_is_refused_with_the_smallest() -> None:
    with pytest.raises(UserError, match=r"1 is too small here; write \d+"):
        await choose_dilation(PROFILES["ub"], 1.0)


async def test_no_message_between_two_processes_arrives_early() -> None:
    link = "latency_seconds=0.02,bandwidth_bytes_per_second=1e7,message_seconds=0.0"
    case = LinkCase("two flows", [[LinkFlow(3, 100_000), LinkFlow(3, 100_000)]], 0.0)
    async with link_process() as (receiver, _), link_process() as (sender, _):
        received, lateness = await measure_round(LinkSetting("zmq", link, 1.0), case, receiver, [sender])
        received_later, _ = await measure_round(LinkSetting("zmq", link, 1.0), case, receiver, [sender])
    assert len(received) == len(received_later) == lateness.num == 6
    first = min(each.sent_seconds for each in received)
    assert max(each.received_seconds for each in received) - first >= 6 * 0.01 + 0.02
    assert all(each.received_seconds - each.sent_seconds >= 0.02 + 0.01 for each in received)
