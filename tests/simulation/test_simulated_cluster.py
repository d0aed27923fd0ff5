"""The main promise of virtual time: a 2x3 graph of the real workers gives the same tokens under every seed, and the same digest for a
seed in every process."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest
from checkpoints import make_checkpoint

from flowrt.cluster.gateway import Parameters
from flowrt.graph import Graph, ModelFacts, load_graph
from flowrt.simulation.__main__ import make_requests, simulate
from flowrt.simulation.cluster import SimulatedRequest, WorkerFailedError, serve
from flowrt.simulation.errors import DeadlockError
from flowrt.simulation.world import World, run
from operators.model_config import read_model_config

NUM_SEEDS = 50
VOCABULARY = 64
REPOSITORY = Path(__file__).resolve().parents[2]
GRAPH = """
flowrt: 1
model: {path: model, dtype: float64}
deploy:
  attention: {groups: 2, micro_batches: 2}
  experts: {servers: 3, copies: 2}
limits: {max_batch: 4, kv_pages: 64, page_tokens: 4, max_tokens: 16, max_step_tokens: 24}
"""


@pytest.fixture(scope="module")
def graph_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("simulated")
    sizes = {"layers": 2, "hidden": 32, "heads": 2, "kv_heads": 1, "head_dim": 16, "width": 16, "experts": 6}
    make_checkpoint(folder / "model", **sizes, vocabulary=VOCABULARY, dtype="float64")
    (folder / "graph.yaml").write_text(GRAPH)
    return folder / "graph.yaml"


def load(graph_file: Path) -> Graph:
    return load_graph(graph_file, facts_of=lambda path: ModelFacts.of(read_model_config(path)))


@pytest.mark.timeout(300)
def test_fifty_seeds_give_the_same_tokens_and_the_same_digests_in_two_processes(graph_file: Path) -> None:
    """Each process compares the tokens of its seeds itself and exits with 1 when they differ; both run at once."""
    command = [sys.executable, "-m", "flowrt.simulation", str(graph_file), "--seeds", str(NUM_SEEDS), "--digests"]
    command += ["--requests", "3", "--max-tokens", "4"]
    running = [
        subprocess.Popen(
            command,
            cwd=REPOSITORY,
            env={**os.environ, "PYTHONHASHSEED": hash_seed, "PADDING": "x" * padding},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for hash_seed, padding in (("0", 0), ("12345", 999))
    ]
    outputs = [process.communicate() for process in running]
    for process, (printed, complaints) in zip(running, outputs, strict=True):
        assert process.returncode == 0, printed + complaints
    first, second = (printed.splitlines() for printed, _ in outputs)
    assert first == second
    digests = [line.split()[1] for line in first[:NUM_SEEDS]]
    assert len(set(digests)) == NUM_SEEDS


@pytest.mark.parametrize("seed", [0, 1])
def test_tokens_are_those_of_the_reference(graph_file: Path, seed: int) -> None:
    from operators.reference import reference_generate

    graph = load(graph_file)
    requests = make_requests(graph, VOCABULARY, 4, 6)
    served = run(seed, lambda world: serve(world, graph, requests)).result
    assert served.finish_reasons == ("length",) * 4
    for request, token_ids in zip(requests, served.token_ids, strict=True):
        truth = reference_generate(graph_file.parent / "model", list(request.prompt_token_ids), 6, dtype="float64", ignore_eos=True)
        assert list(token_ids) == truth
    assert sum(statistics.num_steps for statistics in served.statistics.values()) >= 6


SHAPES = {
    "4:1": ("{groups: 4, micro_batches: 1}", "{servers: 1, copies: 1}", 8),
    "1:0": ("{groups: 1, micro_batches: 3}", "{servers: 0}", 9),
    "3:2": ("{groups: 3, micro_batches: 2}", "{servers: 2, copies: 1}", 10),
    "2:3": ("{groups: 2, micro_batches: 2}", "{servers: 3, copies: 3}", 12),
}


def test_every_shape_gives_the_same_tokens_with_hardly_any_pages(graph_file: Path) -> None:
    """So few pages that sequences are preempted and computed again; under rough conditions as `simulate` draws them."""
    expected = None
    for number, (name, (attention, experts, kv_pages)) in enumerate(SHAPES.items()):
        file = graph_file.with_name(f"shape-{number}.yaml")
        text = GRAPH.replace("{groups: 2, micro_batches: 2}", attention).replace("{servers: 3, copies: 2}", experts)
        file.write_text(text.replace("kv_pages: 64", f"kv_pages: {kv_pages}"))
        graph = load(file)
        requests = make_requests(graph, VOCABULARY, 6, 6)
        for seed in range(3):
            served = simulate(graph, requests, seed).result
            assert served.finish_reasons == ("length",) * 6, (name, seed, served.errors)
            expected = expected or served.token_ids
            assert served.token_ids == expected, (name, seed)


def test_a_bad_request_fails_alone(graph_file: Path) -> None:
    graph = load(graph_file)
    good = SimulatedRequest((5, 6, 7), Parameters(max_tokens=4, ignore_eos=True))
    bad = SimulatedRequest((5, VOCABULARY + 1), Parameters(max_tokens=4))
    served = run(3, lambda world: serve(world, graph, [good, bad, good])).result
    assert served.finish_reasons == ("length", "error", "length")
    assert str(VOCABULARY + 1) in (served.errors[1] or "")
    assert served.token_ids[0] == served.token_ids[2]


async def silent(control: object, seams: object) -> None:
    """A worker that never says a word."""
    await asyncio.get_running_loop().create_future()


async def leaving(control: object, seams: object) -> None:
    """A worker that ends at once."""


def test_a_silent_worker_is_a_deadlock_and_a_leaving_one_an_error(graph_file: Path) -> None:
    graph = load(graph_file)
    requests = make_requests(graph, VOCABULARY, 1, 1)

    async def main(world: World, worker: object) -> object:
        return await serve(world, graph, requests, worker=worker)

    with pytest.raises(DeadlockError, match=r"experts\.2"):
        run(0, lambda world: main(world, silent))
    with pytest.raises(ExceptionGroup) as caught:
        run(0, lambda world: main(world, leaving))
    assert caught.group_contains(WorkerFailedError, match="without being told")


def test_the_command_says_what_is_wrong_with_its_input(tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text("flowrt: 1\nnonsense: 2\n")
    command = [sys.executable, "-m", "flowrt.simulation", str(tmp_path / "bad.yaml")]
    outcome = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert outcome.returncode == 2
    assert "nonsense" in outcome.stderr
    assert len(outcome.stderr.strip().splitlines()) == 1
