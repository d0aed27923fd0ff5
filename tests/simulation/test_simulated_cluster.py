"""Whole graphs of real workers in virtual time, under faults drawn from seeds: tokens are right or the failed process is named.

A seed gives the same digest in every process.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from checkpoints import make_checkpoint
from simulation.outcomes import errors, finish_reasons, token_ids

from flowrt.actors.control import Control, Listening, Start, Statistics, StatisticsRequest, Stop, as_message, from_message
from flowrt.actors.outputs import EndEvent, TokenEvent
from flowrt.graph.file import load_graph
from flowrt.graph.model import GATEWAY, Graph, to_json
from flowrt.graph.settings import JitterSettings
from flowrt.launcher.model_facts import facts_of
from flowrt.reliability.scenario import (
    Crash,
    Cut,
    Duplicate,
    Fault,
    Hang,
    Pause,
    Reset,
    RollBack,
    Scenario,
    Skew,
    Slow,
    SlowLink,
    Stall,
    TinyQueues,
)
from flowrt.sampling_params import SamplingParams
from flowrt.simulation.campaign import campaign
from flowrt.simulation.case import Case, SimulatedRequest
from flowrt.simulation.cases import draw, references_of, run_case
from flowrt.simulation.errors import DeadlockError, InvariantError
from flowrt.simulation.invariants import check
from flowrt.simulation.launchers import simulate
from flowrt.simulation.network_conditions import NetworkConditions
from flowrt.simulation.served import Served
from flowrt.simulation.transport import SimulatedChannel
from flowrt.simulation.waitables import OUTSIDE
from flowrt.simulation.world import World, run
from flowrt.system.process_backend import CONTROL_LIMITS
from flowrt.transports.contract import Identity

VOCABULARY = 64
REPOSITORY = Path(__file__).resolve().parents[2]
GRAPHS = Path(__file__).resolve().parent / "graphs"
GRAPH = """
flowrt: 1
model: {path: model, dtype: float64}
deploy:
  attention: {groups: 2, micro_batches: 2}
  experts: {servers: 3, replicas: 2}
limits: {max_num_seqs: 4, kv_pages: 64, page_size: 4, max_tokens: 16, max_num_batched_tokens: 24}
"""


@pytest.fixture(scope="module")
def graph_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With real weights."""
    folder = tmp_path_factory.mktemp("simulated")
    sizes = {"layers": 2, "hidden": 32, "heads": 2, "kv_heads": 1, "head_dim": 16, "width": 16, "experts": 6}
    make_checkpoint(folder / "model", **sizes, vocabulary=VOCABULARY, dtype="float64")
    (folder / "graph.yaml").write_text(GRAPH)
    return folder / "graph.yaml"


def load(graph_file: Path) -> Graph:
    return load_graph(graph_file, facts_of=facts_of)


def make_requests(count: int, max_tokens: int) -> tuple[SimulatedRequest, ...]:
    chance = random.Random("prompts")
    prompts = [tuple(chance.randrange(VOCABULARY) for _ in range(chance.randint(1, 24))) for _ in range(count)]
    return tuple(SimulatedRequest(prompt, SamplingParams(max_tokens=max_tokens, ignore_eos=True)) for prompt in prompts)


ROUGH = NetworkConditions(slow_one_in=5, duplicate_one_in=4, tiny_one_in=3, tick_seconds=1e-3)


def test_requests_cancelled_at_random_moments_leave_nothing_behind() -> None:
    """Some in `submit`, some in a queue, some between two tokens. `make cancel` cancels more than 10,000."""
    graphs = [load(path) for path in sorted(GRAPHS.glob("*.yaml"))]
    counts = campaign(draw(seed, graphs, num_cancelled=30) for seed in range(12))
    assert not counts.failures
    assert counts.branches["client left"] > 150


@pytest.mark.parametrize("seed", [0, 1])
def test_tokens_are_those_of_the_reference(graph_file: Path, seed: int) -> None:
    from reference_model import ReferenceModel

    graph = load(graph_file)
    requests = make_requests(4, 6)
    served = simulate(Case(graph, requests, seed=seed, conditions=ROUGH, exact=False)).result
    assert served.failure is None
    assert finish_reasons(served) == ("length",) * 4
    for request, tokens in zip(requests, token_ids(served), strict=True):
        truth = ReferenceModel(graph_file.parent / "model", "float64").generate(list(request.prompt_token_ids), 6, ignore_eos=True)
        assert list(tokens) == truth
    assert sum(statistics.num_steps for statistics in served.statistics.values()) >= 6


def test_faults_change_no_token_computed_with_weights(graph_file: Path) -> None:
    graphs = [load(graph_file)]
    kinds = set()
    for seed in range(4):
        case = draw(seed, graphs, exact=False)
        kinds |= {fault.kind for fault in case.scenario.faults}
        run_case(case)
    assert len(kinds) > 3


def test_a_warmed_up_graph_gives_the_same_tokens() -> None:
    graphs = [load(path) for path in sorted(GRAPHS.glob("*.yaml"))]
    warmed = [graph.replace(jitter=JitterSettings(warm_up=True)) for graph in graphs if graph.model is not None]
    counts = campaign(draw(seed, warmed) for seed in range(6))
    assert not counts.failures


SHAPES = {
    "4:1": ("{groups: 4, micro_batches: 1}", "{servers: 1, replicas: 1}", 8),
    "1:0": ("{groups: 1, micro_batches: 3}", "{servers: 0}", 9),
    "3:2": ("{groups: 3, micro_batches: 2}", "{servers: 2, replicas: 1}", 10),
    "2:3": ("{groups: 2, micro_batches: 2}", "{servers: 3, replicas: 3}", 12),
}


def test_every_shape_gives_the_same_tokens_with_hardly_any_pages(graph_file: Path) -> None:
    """So few pages that sequences are preempted and computed again."""
    expected = None
    requests = make_requests(6, 6)
    for number, (name, (attention, experts, kv_pages)) in enumerate(SHAPES.items()):
        file = graph_file.with_name(f"shape-{number}.yaml")
        text = GRAPH.replace("{groups: 2, micro_batches: 2}", attention).replace("{servers: 3, replicas: 2}", experts)
        file.write_text(text.replace("kv_pages: 64", f"kv_pages: {kv_pages}"))
        graph = load(file)
        served = simulate(Case(graph, requests, seed=number, conditions=ROUGH, exact=False)).result
        assert finish_reasons(served) == ("length",) * 6, (name, errors(served))
        expected = expected or token_ids(served)
        assert token_ids(served) == expected, name


HARMLESS = [
    Pause(process="attention.0", at_seconds=0.005, for_seconds=0.6),  # after a longer one the group is marked dead
    Pause(process="gateway", at_seconds=0.005, for_seconds=2),
    Stall(process="experts.1", at_seconds=0.005, for_seconds=2),
    Hang(process="experts.0", at_seconds=0.005, for_seconds=2),
    Slow(process="experts.0", factor=20, for_seconds=2),
    SlowLink(between=("attention.0", "experts.1"), factor=50, for_seconds=2),
    Cut(between=("attention.0", "experts.1"), at_seconds=0.005, for_seconds=2),
    Cut(between=("attention.0", "experts.1"), at_seconds=0.005, for_seconds=2, direction="there"),
    Cut(between=("gateway", "attention.1"), at_seconds=0.005, for_seconds=0.6, direction="back"),
    Duplicate(between=("attention.0", "experts.1"), for_seconds=2, one_in=1),
    Skew(process="attention.0", rate=3),
    TinyQueues(process="attention.0"),
    RollBack(process="attention.0", at_seconds=0.02),
]


@pytest.mark.parametrize("fault", HARMLESS, ids=lambda fault: f"{fault.kind}-{'-'.join(fault.processes)}")
def test_faults_that_heal_change_no_token(fault: Fault) -> None:
    graph = load(GRAPHS / "2x3.yaml")
    requests = make_requests(3, 6)
    case = Case(graph, requests, Scenario(faults=(fault,)), seed=5)
    outcome = simulate(case)
    assert outcome.num_faults[fault.kind] == 1
    assert outcome.result.failure is None
    assert token_ids(outcome.result) == tuple(reference[0] for reference in references_of(case))


@pytest.mark.parametrize(
    ("fault", "named", "why"),
    [
        (Crash(process="attention.0", at_seconds=0.02), {"attention.0"}, "was killed by SIGKILL"),
        (Reset(between=("gateway", "attention.1"), at_seconds=0.02), {"attention.1"}, "unexpectedly"),
    ],
)
def test_permanent_faults_end_every_request_with_an_error_that_names_the_process(fault: Fault, named: set[str], why: str) -> None:
    graph = load(GRAPHS / "2x3.yaml")
    graph = graph.replace(reliability=graph.reliability.replace(recovery="off"))
    requests = make_requests(3, 6)
    case = Case(graph, requests, Scenario(faults=(fault,)), seed=3)
    served = simulate(case).result
    assert served.failed in named
    assert why in (served.failure or "")
    assert {client.num_ends for client in served.clients} == {1}
    assert all(reason in ("length", "error") for reason in finish_reasons(served))
    references = references_of(case)
    check(case, served, references)
    with pytest.raises(InvariantError, match="I7"):  # the same outcome is wrong where no fault hit that process
        check(replace(case, scenario=Scenario()), served, references)
    with pytest.raises(InvariantError, match="I7"):
        check(replace(case, scenario=Scenario(faults=(fault,), expect="tokens")), served, references)


def test_lost_link_changes_no_token_or_ends_the_run_by_name() -> None:
    """Which of both is up to the links: they may have something to fall back on."""
    graph = load(GRAPHS / "2x3.yaml")
    requests = make_requests(3, 6)
    scenario = Scenario(faults=(Reset(between=("attention.0", "experts.1"), at_seconds=0.02),))
    for seed in range(4):
        assert run_case(Case(graph, requests, scenario, seed)).num_faults["reset"] == 1


def test_checks_find_wrong_outcomes() -> None:
    graph = load(GRAPHS / "2x3.yaml")
    requests = make_requests(2, 4)
    case = Case(graph, requests, seed=3)
    good = simulate(case).result
    references = references_of(case)

    def checked(served: Served) -> str:
        with pytest.raises(InvariantError) as caught:
            check(case, served, references)
        return caught.value.kind

    def changed(**fields: object) -> Served:
        """The first client's record with other fields."""
        return replace(good, clients=(replace(good.clients[0], **fields), *good.clients[1:]))  # type: ignore[arg-type]

    check(case, good, references)
    events = good.clients[0].events
    first, end = events[0], events[-1]
    assert isinstance(first, TokenEvent)
    assert checked(changed(events=[msgspec.structs.replace(first, token_ids=(first.token_id + 1,)), *events[1:]])) == "I1"
    assert checked(changed(events=[*events[:-2], end])) == "I1"
    assert checked(changed(events=[first, first, *events[2:]])) == "I1"
    assert checked(changed(events=[*events, end])) == "I5"
    assert checked(changed(events=[*events[:-1], EndEvent(0, "error")])) == "I1"
    assert checked(replace(good, failed="experts.0", failure="experts.0 died", failed_seconds=0.1)) == "I7"


def test_a_bad_request_fails_alone(graph_file: Path) -> None:
    graph = load(graph_file)
    good = SimulatedRequest((5, 6, 7), SamplingParams(max_tokens=4, ignore_eos=True))
    bad = SimulatedRequest((5, VOCABULARY + 1), SamplingParams(max_tokens=4))
    served = simulate(Case(graph, (good, bad, good), seed=3, exact=False)).result
    assert finish_reasons(served) == ("length", "error", "length")
    assert str(VOCABULARY + 1) in (errors(served)[1] or "")
    assert token_ids(served)[0] == token_ids(served)[2]


async def silent(control: object, seams: object) -> None:
    """A worker that never sends a message."""
    await asyncio.get_running_loop().create_future()


async def leaving(control: object, seams: object) -> None:
    """A worker that ends at once."""


def serve_with(graph: Graph, worker: str) -> Served:
    return simulate(Case(graph, make_requests(1, 1), exact=False, worker=f"{__name__}:{worker}")).result


def test_workers_that_never_load_end_the_start_by_name() -> None:
    graph = load(GRAPHS / "2x3.yaml")
    served = serve_with(graph, "silent")
    assert "while loading" in (served.failure or "")
    graph = graph.replace(reliability=graph.reliability.replace(recovery="off"))
    served = serve_with(graph, "leaving")
    assert "exited with status 0 unexpectedly" in (served.failure or "")
    assert served.clients == ()


def test_deadlock_error_names_the_waiting_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    from flowrt.dataflow.runner import Runner

    monkeypatch.setattr(Runner, "settle", lambda self: None)  # messages that come fire nothing
    graph = load(GRAPHS / "2x3.yaml")
    with pytest.raises(DeadlockError) as caught:
        simulate(Case(graph, make_requests(1, 2)))
    text = str(caught.value)
    assert "gateway: request-0 at attention.0" in text
    assert "attention.0: attention.0.combine at step 0, layer 0" in text
    assert "waits for parts" in text
    assert "attention.0: engine has 1 running" in text


def test_a_worker_that_loads_responds_to_a_request_for_statistics(graph_file: Path) -> None:
    graph = load(graph_file)

    async def lead(world: World) -> list[type[Control]]:
        node = world.next_node("attention.0")
        ours, theirs = SimulatedChannel.pair(
            world.network, (Identity(GATEWAY), OUTSIDE), (Identity("attention.0", "1"), node), CONTROL_LIMITS
        )
        process = world.start("attention.0", lambda seams: run_worker(theirs, seams))
        for control in (Start("attention.0", "1", to_json(graph), world.new_key()), StatisticsRequest()):
            await ours.send(as_message(control))
        received: list[type[Control]] = []
        while Listening not in received:
            received.append(type(from_message(await ours.recv())))
        await ours.send(as_message(Stop()))
        assert await process.exit == "exited with status 0"
        await ours.aclose()
        return received

    from flowrt.workers.process import run_worker

    assert Statistics in run(0, lead).result


FAILED_WITH_CANCELS = (3000175, 3000190, 3000373, 3000509, 3000981, 3001235, 3001570)


@pytest.mark.parametrize(
    ("seed", "num_cancelled"),
    [
        (2343, 0),
        (3507, 0),
        (882100414, 60),
        (882310034, 60),
        (962000620, 60),
        (2600007700, 60),
        (2600013688, 60),
        (2970004286, 60),
        *((seed, 100) for seed in FAILED_WITH_CANCELS),
    ],
)
def test_seeds_of_transfers_that_have_failed_pass(seed: int, num_cancelled: int) -> None:
    """Each showed a defect, or a wrong check; the history of docs/simulation.md has the causes."""
    assert campaign([draw(seed, [load(GRAPHS / "prefill.yaml")], num_cancelled=num_cancelled)]).failures == []
