"""Measures a run on several hosts: its start, its throughput against one host, and the kill of a process on another host. Run by hand:

python tests/hosts/network.py --hosts 3 python tests/hosts/figures.py --starts 10 --pairs 20 --kills 50

With `--engine local` it needs no network.py: this machine plays the hosts, on its loopback.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
from served_models import NEW_TOKENS, Served, make_served

import flowrt
from flowrt.api.opening import read_graph
from flowrt.api.running_graph import RunningGraph
from flowrt.bench.report.figures import median_interval, nearest_rank
from flowrt.chaos.measure import clients_of
from flowrt.chaos.observer import InjectedFault, RunObserver
from flowrt.chaos.orders import WORKER
from flowrt.graph.model import FIRST_HOST, Graph
from flowrt.processes.leftover import marked_processes
from flowrt.seams import Seams

PARAMS = flowrt.SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True)
BACK_SECONDS, PAUSE_SECONDS, NUM_ROUNDS = 180.0, 0.2, 4


def graph_of(served: Served, folder: Path, hosts: dict[str, Any] | None) -> Graph:
    """Two groups and three expert servers, six processes with the monitor, over zmq; over ucx where the hosts trust a network."""
    links = {"attention-experts": {"transport": "ucx" if hosts is not None and hosts.get("trusted") else "zmq"}}
    deploy = {"attention": {"groups": 2}, "experts": {"servers": 3, "replicas": 2}, "links": links}
    top = {"hosts": hosts} if hosts is not None else {}
    return read_graph(served.write(folder, deploy, numerics="strict", reliability={"restarts": 1000}, **top))


async def tokens_per_second(running: RunningGraph, served: Served) -> float:
    """Of all prompts at a time, several rounds; their tokens must be the expected ones."""
    began, count = time.perf_counter(), 0
    for _ in range(NUM_ROUNDS):
        found = await asyncio.gather(*(running.complete(prompt, PARAMS) for prompt in served.prompts))
        assert [list(each.token_ids) for each in found] == served.expected, "wrong tokens"
        count += sum(len(each.token_ids) for each in found)
    return count / (time.perf_counter() - began)


async def measure_starts(graph: Graph, count: int) -> list[float]:
    """Seconds from the call to a run that is ready."""
    found = []
    for _ in range(count):
        began = time.perf_counter()
        async with RunningGraph(graph, Seams()):
            found.append(time.perf_counter() - began)
    return found


async def measure_pairs(several: Graph, one: Graph, served: Served, count: int) -> list[float]:
    """Throughput on several hosts over that on one, in turn; both are up all the time."""
    found = []
    async with RunningGraph(several, Seams()) as there, RunningGraph(one, Seams()) as here:
        for running in (there, here):
            await tokens_per_second(running, served)
        for number in range(count):
            order = (there, here) if number % 2 else (here, there)
            speeds = {running: await tokens_per_second(running, served) for running in order}
            found.append(speeds[there] / speeds[here])
            print(f"pair {number + 1}/{count}: {found[-1]:.3f}", file=sys.stderr, flush=True)
    return found


@asynccontextmanager
async def load(running: RunningGraph, served: Served) -> AsyncIterator[None]:
    """Serve all prompts again and again meanwhile."""
    is_over = False

    async def repeat() -> None:
        while not is_over:
            await tokens_per_second(running, served)

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(repeat())
        try:
            yield
        finally:
            is_over = True


async def measure_kills(graph: Graph, served: Served, count: int, chance: random.Random) -> list[float]:
    """Seconds from the kill of an expert server on another host until no group uses it, by the monotonic clock that all hosts share."""
    observer = RunObserver(Seams().clock, clients_of(graph))

    def on_line(process: str, line: str) -> None:
        if not observer.take_line(process.rpartition(" ")[2], line):
            print(f"[{process}] {line}", file=sys.stderr)

    victims = [name for name in graph.process_names() if name.startswith("experts") and graph.host_of(name) != FIRST_HOST]
    running = RunningGraph(graph, Seams(), on_event=observer.on_event, on_line=on_line)
    running.launcher.worker = WORKER
    async with running, load(running, served):
        run_id = running.launcher.run_id
        for number in range(count):
            await asyncio.sleep(PAUSE_SECONDS)
            name = chance.choice(victims)
            pids = [marked.pid for marked in marked_processes() if marked.run_id.startswith(f"{run_id}.{graph.host_of(name)}")]
            pid = next(pid for pid in pids if psutil.Process(pid).name() == f"fr:{name}")
            incarnation = running.launcher.incarnations[name]
            fault = InjectedFault(f"kill {name}", "crash", name, time.monotonic(), pid, incarnation)
            os.kill(pid, signal.SIGKILL)
            observer.injected_faults.append(fault)
            assert await observer.wait_until(lambda fault=fault: observer.has_returned(fault), BACK_SECONDS), f"{name} is not back"
            print(f"kill {number + 1}/{count}: {observer.left_seconds(fault):.4f} s", file=sys.stderr, flush=True)
    return [observer.left_seconds(fault) for fault in observer.injected_faults]


def summary(values: list[float]) -> dict[str, float]:
    return {"count": len(values), "median": statistics.median(values), "p99": nearest_rank(values, 0.99), "max": max(values)}


async def main(options: argparse.Namespace) -> int:
    """Print the figures as JSON."""
    count = int(os.environ.get("FLOWRT_TEST_HOSTS", "3"))
    result: dict[str, Any] = {"load": os.getloadavg()[0]}
    with tempfile.TemporaryDirectory() as name:
        folder, served = Path(name), make_served(Path(name) / "model", seed=3)
        hosts = {"engine": options.engine, "count": count, "trusted": options.trusted}
        several, one = graph_of(served, folder, hosts), graph_of(served, folder, None)
        if options.starts:
            result["start_seconds"] = summary(await measure_starts(several, options.starts))
        if options.pairs:
            ratios = await measure_pairs(several, one, served, options.pairs)
            result["throughput_ratio"] = {**summary(ratios), "interval": median_interval(ratios)}
        if options.kills:
            result["kill_to_no_client_seconds"] = summary(await measure_kills(several, served, options.kills, random.Random(options.seed)))
    print(json.dumps(result, indent=1))
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--engine", default="ray", choices=("ray", "local"))
    parser.add_argument("--trusted", nargs="*", default=[], help="networks of the hosts in which ucx carries messages, unencrypted")
    for name in ("starts", "pairs", "kills", "seed"):
        parser.add_argument(f"--{name}", type=int, default=0)
    sys.exit(asyncio.run(main(parser.parse_args())))
