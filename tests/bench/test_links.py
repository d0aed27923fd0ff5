"""The links benchmark: what it asks of a profile, refusals, and one round between two processes, in which nothing comes early."""

from __future__ import annotations

import pytest

from flowrt.bench.link_peer import Flow, LinkPeer, Received, Setting
from flowrt.bench.links import Case, _figure, _round, cases, choose_dilation, measure
from flowrt.errors import UserError
from flowrt.transports.emulation.profiles import PROFILES, LinkProfile


def test_what_the_profile_says_of_each_case() -> None:
    link = LinkProfile("test", 1e-3, 1 << 20, 0.0)  # a second for a MiB
    said = {case.name: case.modelled_seconds for case in cases(link, 1.0)}
    assert said["latency, 1 MiB"] == pytest.approx(1.001)
    assert said["bandwidth, 1 flow"] == pytest.approx(8.001)
    assert said["bandwidth, 8 flows of one process to one"] == said["bandwidth, 8 processes to one"] == pytest.approx(64.001)
    assert said["latency, 64 B beside 8 flows of 1 MiB"] == pytest.approx(9 * 64 / (1 << 20) + 1e-3)


def test_a_round_is_read_in_the_profiles_time() -> None:
    received = [Received(0, 10.0, 12.0), Received(1, 11.0, 13.0), Received(1, 11.0, 15.0), Received(1, 12.0, 14.0)]
    flows = [[Flow(1, 1000), Flow(3, 500)]]
    assert Case("latency", flows, 1.0).measured_seconds(received, 2.0) == 1.0  # of flow 1: 2, 4 and 2 seconds
    bandwidth = Case("bandwidth", flows, 2.5, True)
    assert bandwidth.measured_seconds(received, 2.0) == 2.5
    figure = _figure(bandwidth, [2.5] * 6)
    assert (figure.ours.median, figure.ratio.median, figure.verdict) == (pytest.approx(1e-6), 1.0, "met")
    assert _figure(Case("latency", flows, 1.0), [1.1] * 6).verdict == "not met"


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (("ubb", None, 1, "auto"), "--profile 'ubb' is no link"),
        (("bandwidth_bytes_per_second=1e9", None, 1, "auto"), "takes no time for a message without bytes"),
        (("ub", None, 1, "nonsense"), "--transport nonsense: "),
        (("ub", None, 1, "inproc"), "stays within one process"),
    ],
)
async def test_what_cannot_be_measured_is_refused(options: tuple[str, float | None, int, str], reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        async for _ in measure(*options):
            pass


async def test_a_dilation_too_small_is_refused_with_the_smallest() -> None:
    with pytest.raises(UserError, match=r"1 is too small here; write \d+"):
        await choose_dilation(PROFILES["ub"], 1.0)


async def test_between_two_processes_nothing_comes_early() -> None:
    link = "latency_seconds=0.02,bandwidth_bytes_per_second=1e7,message_seconds=0.0"
    case = Case("two flows", [[Flow(3, 100_000), Flow(3, 100_000)]], 0.0)
    async with LinkPeer() as receiver, LinkPeer() as sender:
        received, lateness = await _round(Setting("zmq", link, 1.0), case, receiver, [sender])
        received_again, _ = await _round(Setting("zmq", link, 1.0), case, receiver, [sender])
    assert len(received) == len(received_again) == lateness.num == 6
    first = min(each.sent_seconds for each in received)
    assert max(each.received_seconds for each in received) - first >= 6 * 0.01 + 0.02
    assert all(each.received_seconds - each.sent_seconds >= 0.02 + 0.01 for each in received)
