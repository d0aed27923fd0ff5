"""The processes of peers and of emulated links: facts, requests, failures, and what ends with a peer. No time is asserted from above."""

from __future__ import annotations

import os
import select
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from checkpoints import load_truth, make_checkpoint, truth_greedy

from flowrt.bench.cases.decode import TRANSFORMERS, VLLM, ProcessSide, TransformersSide
from flowrt.bench.cases.links import LinkCase, cases_of, choose_dilation, figure_of, link_process, measure, measure_round
from flowrt.bench.measure.decoding import prompts_of
from flowrt.bench.peers.channels import channel_echo
from flowrt.bench.peers.echo import Echo, queue_echo_seconds, zeromq_echo
from flowrt.bench.peers.gloo import gloo_group
from flowrt.bench.peers.links import FlowArrival, LinkFlow, LinkSetting
from flowrt.bench.peers.packages import installed_packages, package_echo
from flowrt.bench.peers.process import start_peer
from flowrt.costs.links import PROFILES, LinkProfile
from flowrt.errors import UserError

PEER = """
import subprocess, sys
from contextlib import contextmanager

@contextmanager
def open_peer(word):
    print("output of a library")
    child = subprocess.Popen(["sleep", "1000"], stdin=subprocess.DEVNULL)

    def respond(number):
        if number == 13:
            sys.exit("the last line of the peer\\n  +---------------")
        return {"double": 2 * number}

    yield {"word": word, "child": child.pid, "has_packages": "site-packages" in " ".join(sys.path)}, respond
    print("closed", file=sys.stderr, flush=True)
"""


@pytest.fixture
def peer_file(tmp_path: Path) -> str:
    (tmp_path / "peer.py").write_text(PEER)
    return str(tmp_path / "peer.py")


async def test_a_peer_runs_in_an_interpreter_without_flowrt(peer_file: str, tmp_path: Path) -> None:
    """As vLLM's interpreter is: the child's side needs the standard library alone."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')
    python.chmod(0o755)
    async with start_peer("a peer", peer_file, "hello", python=str(python)) as (peer, facts):
        assert (facts["word"], facts["has_packages"]) == ("hello", False)
        assert [await peer.request(number=number) for number in (1, 2)] == [{"double": 2}, {"double": 4}]


@pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")
async def test_vllm_gives_the_tokens_of_transformers(tmp_path: Path) -> None:
    model, prompts = make_checkpoint(tmp_path / "model", seed=5, tokenizer=False), prompts_of(2, 9, 512)
    async with start_peer("vllm", VLLM, model, "float32", 1, 64, python=sys.executable) as (peer, facts):
        assert facts["vocab_size"] == 512
        response = await peer.request(prompts=prompts, new_tokens=8)
    assert response["tokens"] == [truth_greedy(load_truth(model), prompt, 8) for prompt in prompts]


async def test_a_peer_that_ends_is_reported_with_its_last_line(peer_file: str) -> None:
    async with start_peer("a peer", peer_file, "hello") as (peer, _):
        with pytest.raises(UserError, match="a peer ended by itself: the last line of the peer"):
            await peer.request(number=13)


async def test_a_peer_that_cannot_start_is_reported(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be started"):
        async with start_peer("none", "peer.py", python=str(tmp_path / "no-such-python")):
            pass
    with pytest.raises(UserError, match="a peer ended by itself: ModuleNotFoundError: No module named 'no_such_peer'"):
        async with start_peer("a peer", "no_such_peer"):
            pass


@pytest.mark.parametrize("number", [1, 13], ids=["it is ended", "it ends by itself"])
async def test_the_processes_of_a_peer_end_with_it(peer_file: str, number: int) -> None:
    async with start_peer("a peer", peer_file, "hello") as (peer, facts):
        child = os.pidfd_open(facts["child"])
        if number == 13:
            with pytest.raises(UserError, match="ended by itself"):
                await peer.request(number=number)
        else:
            assert not has_ended(child, 0.0)
    assert has_ended(child, 20.0)
    os.close(child)


def has_ended(pidfd: int, timeout_seconds: float) -> bool:
    return bool(select.select([pidfd], [], [], timeout_seconds)[0])


async def test_transformers_decodes_as_a_peer(tmp_path: Path) -> None:
    """The decode peers share one protocol: a run through it has tokens, times and margins of every sequence."""
    model = make_checkpoint(tmp_path / "model", seed=5, tokenizer=False)
    async with start_peer("transformers", TRANSFORMERS, model, "float32", 1, "eager", "no_such_implementation") as (peer, facts):
        assert facts["implementations"] == ["eager"]
        assert facts["vocab_size"] == 512
        assert facts["expert_bytes"] > 0
        side = TransformersSide(peer, facts, 8)
        run = await side.run(prompts_of(2, 8, 512), 5, margins=True)
        repeated = await ProcessSide.run(side, prompts_of(2, 8, 512), 5)
    assert (side.label("prefill"), side.label("decode")) == ("eager", "eager")
    assert [len(tokens) for tokens in run.tokens] == [5, 5]
    assert run.margins is not None
    assert [len(margins) for margins in run.margins] == [5, 5]
    assert (repeated.tokens, repeated.margins) == (run.tokens, None)
    assert run.decode_tokens == 8
    assert min(run.prefill_seconds, run.decode_seconds) > 0


async def check_echo(echo: Echo) -> None:
    assert await echo.round_trip_seconds(3, b"\x01" * 100) > 0


async def test_echoes_return_what_they_are_sent() -> None:
    assert await queue_echo_seconds(10, object()) > 0
    async with zeromq_echo() as echo:
        await check_echo(echo)
    async with zeromq_echo(reads=True) as echo:
        await check_echo(echo)


async def test_a_bare_channel_echoes_and_its_memory_is_measured() -> None:
    async with channel_echo("zmq") as echo:
        await check_echo(echo)
        assert await echo.flood(200, 0) >= 0
        await check_echo(echo)


@pytest.mark.parametrize("package", installed_packages()[0])
async def test_installed_packages_echo(package: str) -> None:
    async with package_echo(package) as echo:
        await check_echo(echo)


async def test_gloo_makes_rounds_of_each_kind_and_ends() -> None:
    async with gloo_group(1, 1) as gloo:
        for method in ("all_to_all", "isend", "rows", "echo"):
            times = await gloo.round_seconds(method, 3, 1 << 10)
            assert len(times) == 3
            assert min(times) > 0
        await check_echo(gloo)


async def test_gloo_makes_rounds_in_which_one_receiver_gets_more() -> None:
    async with gloo_group(2, 3) as gloo:
        for method in ("all_to_all", "isend"):
            receivers = await gloo.receiver_seconds(method, 2, 1 << 10, 10)
            assert [len(each) for each in receivers] == [2, 2, 2]
            assert min(map(min, receivers)) > 0


# --- emulated links ----------------------------------------------------------------------------------------------------------


def test_modelled_times_follow_the_profile() -> None:
    link = LinkProfile("test", 1e-3, 1 << 20, 0.0)  # a second for a MiB
    modelled_seconds = {case.name: case.modelled_seconds for case in cases_of(link, 1.0)}
    assert modelled_seconds["latency, 1 MiB"] == pytest.approx(1.001)
    assert modelled_seconds["bandwidth, 1 flow"] == pytest.approx(8.001)
    shared = (modelled_seconds[f"bandwidth, {senders} to one"] for senders in ("8 flows of one process", "8 processes"))
    assert list(shared) == [pytest.approx(64.001)] * 2
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
