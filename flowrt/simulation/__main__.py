"""`python -m flowrt.simulation GRAPH --seeds 1000`: the same requests under many seeds; the tokens must be the same under each.

Here: the command, and what it prints. Not here: the run itself (cluster.py). `make simulate` calls it. A seed that fails is printed with
the command that replays it alone; the exit code is then 1.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
from collections.abc import Sequence
from pathlib import Path

from flowrt.cluster.gateway import Parameters
from flowrt.errors import UserError
from flowrt.graph import Graph, ModelFacts, load_graph
from flowrt.simulation.cluster import Served, SimulatedRequest, serve
from flowrt.simulation.weather import NetworkConditions
from flowrt.simulation.world import Outcome, run
from operators.model_config import ModelError, read_model_config

REPORT_EVERY = 50
DEFAULT_GRAPH = "examples/quickstart.yaml"


def make_requests(graph: Graph, vocab_size: int, count: int, max_tokens: int) -> list[SimulatedRequest]:
    """`count` prompts of random ids and various lengths; the same ones for every seed."""
    chance = random.Random("prompts")
    longest = max(1, min(24, graph.limits.max_step_tokens))
    prompts = [tuple(chance.randrange(vocab_size) for _ in range(chance.randint(1, longest))) for _ in range(count)]
    return [SimulatedRequest(prompt, Parameters(max_tokens=max_tokens, ignore_eos=True)) for prompt in prompts]


def simulate(graph: Graph, requests: Sequence[SimulatedRequest], seed: int) -> Outcome[Served]:
    """One seed, under weather that the seed draws: a calm network or a rough one, with or without tiny queues."""
    chance = random.Random(f"conditions {seed}")
    conditions = NetworkConditions(
        most_delay_seconds=chance.choice((50e-6, 400e-6, 5e-3)),
        slow_one_in=chance.choice((0, 50, 5)),
        duplicate_one_in=chance.choice((0, 40, 4)),
        tiny_one_in=chance.choice((0, 0, 3)),
    )
    return run(seed, lambda world: serve(world, graph, requests), conditions=conditions)


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code: 0 when all seeds gave the first one's tokens, 1 when one did not, 2 for bad input."""
    parser = argparse.ArgumentParser(prog="python -m flowrt.simulation", description="Run a graph under many seeds of virtual time.")
    parser.add_argument("graph", nargs="?", default=DEFAULT_GRAPH, help="a graph file with a model (default: %(default)s)")
    parser.add_argument("--seeds", type=int, default=200, help="how many seeds (default: %(default)s)")
    parser.add_argument("--first", type=int, default=0, help="the first seed (default: %(default)s)")
    parser.add_argument("--requests", type=int, default=6, help="requests per run (default: %(default)s)")
    parser.add_argument("--max-tokens", type=int, default=8, help="tokens per request (default: %(default)s)")
    parser.add_argument("--digests", action="store_true", help="print each seed's digest and number of steps")
    given = parser.parse_args(arguments)
    os.environ["OMP_NUM_THREADS"] = "1"  # before the worker brings torch: its threads are no part of the seed
    try:
        graph = load_graph(Path(given.graph), facts_of=lambda path: ModelFacts.of(read_model_config(path)))
    except (UserError, ModelError) as error:
        print(error, file=sys.stderr)
        return 2
    if graph.model is None:
        print(f"{given.graph}: no model, so nothing to ask of it; give a graph file with model:", file=sys.stderr)
        return 2
    requests = make_requests(graph, read_model_config(Path(graph.model.path)).vocab_size, given.requests, given.max_tokens)
    return _all_seeds(graph, requests, given)


def _all_seeds(graph: Graph, requests: Sequence[SimulatedRequest], given: argparse.Namespace) -> int:
    expected: tuple[tuple[int, ...], ...] | None = None
    steps, failed = 0, []
    for number, seed in enumerate(range(given.first, given.first + given.seeds), 1):
        try:
            outcome = simulate(graph, requests, seed)
            expected = outcome.result.token_ids if expected is None else expected
            _check(outcome.result, expected)
            steps += outcome.num_steps
            if given.digests:
                print(seed, outcome.digest, outcome.num_steps, f"{outcome.virtual_seconds:.9f}", flush=True)
        except Exception as error:
            failed.append(seed)
            options = f"--first {seed} --seeds 1 --requests {given.requests} --max-tokens {given.max_tokens}"
            for leaf in _leaves(error):
                print(f"seed {seed}: {type(leaf).__name__}: {leaf}", file=sys.stderr)
            print(f"  again: python -m flowrt.simulation {given.graph} {options}", file=sys.stderr, flush=True)
        if number % REPORT_EVERY == 0 or number == given.seeds:
            print(f"{number} seeds, {len(failed)} failed, {steps} steps", flush=True)
    return 1 if failed else 0


def _leaves(error: BaseException) -> list[BaseException]:
    """The errors inside of groups of groups; of those that the same fault brought up several times, one."""
    if isinstance(error, BaseExceptionGroup):
        found = [leaf for inner in error.exceptions for leaf in _leaves(inner)]
        return list({(type(leaf), str(leaf)): leaf for leaf in found}.values())
    return [error]


def _check(served: Served, expected: tuple[tuple[int, ...], ...]) -> None:
    """Raise AssertionError unless every request finished, and with the tokens expected."""
    for index, reason in enumerate(served.finish_reasons):
        if reason not in ("length", "stop"):
            raise AssertionError(f"request {index} ended with {reason}: {served.errors[index]}")
    for index, (ours, theirs) in enumerate(zip(served.token_ids, expected, strict=True)):
        if ours != theirs:
            raise AssertionError(f"request {index} gave {ours}, under the first seed {theirs}")


if __name__ == "__main__":
    sys.exit(main())
