"""`flowrt simulate --trace`: the same course as without it, the layout of a real run, virtual and modelled times."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from simulation.graph_files import GRAPHS, load
from simulation.simulate_command import simulate
from traces.perfetto_reader import ReadTrace, check_flows, read_trace

from flowrt.reliability.scenario import Crash, Scenario
from flowrt.sampling_params import SamplingParams
from flowrt.simulation.case import Case, SimulatedRequest
from flowrt.simulation.cases import run_case
from flowrt.simulation.network_conditions import CALM
from flowrt.simulation.simulated_trace import SimulatedTrace
from flowrt.trace.perfetto_file import perfetto_bytes
from flowrt.trace.records import RecordKind
from flowrt.trace.summary import key_of, summarize
from flowrt.trace.timeline import timelines_of

NUM_TOKENS = 5
REQUESTS = tuple(
    SimulatedRequest((5 + number, 6, 7), SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True), after_seconds=0.1) for number in range(4)
)


def read(case: Case) -> ReadTrace:
    assert case.trace is not None
    return read_trace(perfetto_bytes(timelines_of(case.trace.traces(), case.graph)))


def test_a_traced_run_takes_the_same_course_and_a_restarted_server_has_tracks_of_its_own() -> None:
    crash = Scenario(faults=(Crash(process="experts.0", at_seconds=0.12),), expect="tokens")
    case = Case(load("2x3.yaml"), REQUESTS, crash, seed=2)
    traced = replace(case, trace=SimulatedTrace())
    assert run_case(traced).digest == run_case(case).digest
    trace = read(traced)
    processes = {process for process, _ in trace.tracks}
    assert sum(process.startswith("experts.0 ") for process in processes) == 2
    commits = [each for (process, _), slices in trace.tracks.items() if process.startswith("gateway") for each in slices]
    assert len(commits) == len(REQUESTS) * NUM_TOKENS
    flows = check_flows(trace).values()
    whole = [flow for flow in flows if [each.category for each in flow] == ["node", "send", "receive", "node", "send", "receive", "node"]]
    assert len(whole) > len(flows) / 2, "lost, hedged and redispatched parts have other flows"
    for flow in whole:
        assert {each.name.rpartition(".")[2] for each in (flow[0], flow[-1])} == {"dispatch", "combine"}


def test_nodes_and_messages_of_emulated_hardware_take_their_modelled_times() -> None:
    graph = load("emulated.yaml")
    case = Case(graph, REQUESTS, conditions=CALM, trace=SimulatedTrace())
    run_case(case)
    assert case.trace is not None
    traces = case.trace.traces()
    assert graph.emulation is not None
    costs = {node.name: graph.emulation.compute[node.operator] for node in graph.nodes.values() if node.operator in graph.emulation.compute}
    checked = set()
    for record in [each for trace in traces for each in trace.records if each.kind == RecordKind.NODE]:
        seconds = record.end_seconds - record.start_seconds
        if record.name in costs:
            assert seconds >= graph.emulation.dilation * costs[record.name].fixed_seconds * 0.999
            checked.add(graph.nodes[record.name].operator)
        else:
            assert seconds == pytest.approx(0.0, abs=1e-9)
    assert checked == {"attention", "experts"}
    summary = summarize(traces)
    assert {role.role for role in summary.roles} == {"attention", "experts"}
    assert all(role.exposed_seconds > 0 and role.waiting_seconds > 0 for role in summary.roles)
    read(case)


def test_a_server_receives_one_domain_while_it_computes_another_and_sends_to_a_third() -> None:
    """The streams of an expert server run at the same time (xDeepServe section 5.2)."""
    graph = load("emulated.yaml", "deploy.attention.groups=3", "deploy.attention.domains=3")
    case = Case(graph, REQUESTS * 3, conditions=CALM, trace=SimulatedTrace())
    run_case(case)
    assert case.trace is not None
    records = [each for trace in case.trace.traces() for each in trace.records]
    sent = {key_of(each): each.start_seconds for each in records if each.kind == RecordKind.SEND}
    received = {key_of(each): each.start_seconds for each in records if each.kind == RecordKind.RECEIVE}
    arrivals = [(key[1].source, at) for key, at in received.items() if key[0].endswith(" -> experts.0.rows")]
    on_the_way = [(key[1].source, sent[key], at) for key, at in received.items() if key[0].startswith("experts.0.results -> ")]
    found = set()
    for call in records:
        if call.kind == RecordKind.NODE and call.name == "experts.0":
            (computed,) = {tag.source for tag in call.tags}
            start, end = call.start_seconds, call.end_seconds
            came = {source for source, at in arrivals if start < at < end} - {computed}
            left = {source for source, began, ended in on_the_way if began < end and ended > start} - {computed}
            found |= {(one, computed, other) for one in came for other in left}
    assert 3 in {len(set(each)) for each in found}


def test_the_command_writes_the_trace_of_one_seed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "seed.pftrace"
    words = [str(GRAPHS / "2x3.yaml"), "--first", "3", "--trace", str(file)]
    assert simulate(words) == 2
    assert "add --seeds 1" in capsys.readouterr().err
    assert simulate([*words, "--seeds", "1"]) == 0
    assert read_trace(file.read_bytes()).tracks
    assert "slowest node: " in capsys.readouterr().err


def test_a_graph_of_user_operators_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert simulate([str(GRAPHS / "calls.yaml"), "--seeds", "1", "--trace", str(tmp_path / "seed.pftrace")]) == 2
    assert "only runs of a model are traced" in capsys.readouterr().err
