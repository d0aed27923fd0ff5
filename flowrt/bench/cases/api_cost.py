"""What HTTP costs: streams of a graph's front ends beside the Python API of the same running graph, in turns.

The client of the streams is a process of its own, `flowrt bench serve`. It takes processor time from the graph; how much is stated.
"""

from __future__ import annotations

import json
import tempfile
import time
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flowrt.api import RunningGraph
from flowrt.bench.cases.case_options import DecodeOptions
from flowrt.bench.cases.decode import prompts_for, read_served_graph
from flowrt.bench.measure.benchmark import Results, Trial
from flowrt.bench.measure.decoding import GraphSide
from flowrt.bench.peers.process import start_flowrt
from flowrt.bench.report.figures import Figure, Target
from flowrt.errors import UserError
from flowrt.graph.model import FRONT_END
from flowrt.seams import Seams
from flowrt.serving.front_end_settings import ServeOptions
from flowrt.serving.listener import open_tcp_listener
from flowrt.system.process_status import process_times

SPEED_TARGET = Target(0.97, at_most=False)  # of the Python API's tokens per second
CPU_TARGET = Target(20)  # milliseconds per 100 tokens: 2 % of a core at 100 tokens per second


@dataclass(frozen=True)
class ApiRun:
    """Processor times are seconds per 100 tokens."""

    tokens_per_second: float
    launcher_cpu: float
    front_end_cpu: float = 0.0
    client_cpu: float = 0.0


async def measure(graph_file: Path, model: Path | None, options: DecodeOptions) -> Results:
    """Raises UserError for a graph that cannot be measured, and when a request fails."""
    graph = read_served_graph(graph_file, model, options, options.overrides)
    prompts, num_tokens = prompts_for(graph, options), options.batch[0] * options.new_tokens
    with closing(open_tcp_listener("127.0.0.1", 0)) as listener:
        serving = ServeOptions(listener=listener, model_name="model", version="")
        async with RunningGraph(graph, Seams(), serving=serving) as running:
            calls, streams = GraphSide(running), _Streams(running, listener.url, options)

            async def run_calls() -> ApiRun:
                cpu = time.process_time()
                run = await calls.run(prompts, options.new_tokens)
                return ApiRun(run.speed("throughput", 0), (time.process_time() - cpu) * 100 / num_tokens)

            yield Trial([streams.run, run_calls], _figures)


class _Streams:
    def __init__(self, running: RunningGraph, url: str, options: DecodeOptions) -> None:
        (self._batch,) = options.batch
        self._options, self._num_runs = options, 0
        self._front_ends = [pid for name, pid in running.pids.items() if name.startswith(f"{FRONT_END}.")]
        self._arguments = ["bench", "serve", "--base-url", url, "--num-prompts", str(self._batch), "--temperature", "0", "--save-result"]
        self._arguments += ["--random-input-len", str(options.prompt_tokens), "--random-output-len", str(options.new_tokens)]

    async def run(self) -> ApiRun:
        self._num_runs += 1
        with tempfile.TemporaryDirectory(prefix="flowrt-bench-") as folder:
            arguments = [*self._arguments, "--seed", str(self._num_runs), "--result-dir", folder, "--result-filename", "run.json"]
            launcher, front_ends = time.process_time(), self._front_end_seconds()
            child = await start_flowrt(*arguments, stdout=DEVNULL, stderr=PIPE)
            _, errors = await child.communicate()
            launcher, front_ends = time.process_time() - launcher, self._front_end_seconds() - front_ends
            if child.returncode != 0:
                raise UserError(f"flowrt bench serve ended with exit code {child.returncode}: {errors.decode(errors='replace')[-500:]}")
            result: dict[str, Any] = json.loads((Path(folder) / "run.json").read_text(encoding="utf-8"))
        if (num_tokens := result["total_output_tokens"]) != self._batch * self._options.new_tokens:
            raise UserError(f"{result['failed']} of {self._batch} streams failed, {num_tokens} tokens came")
        client = result["client_cpu_seconds"]
        return ApiRun(result["output_throughput"], *(each * 100 / num_tokens for each in (launcher, front_ends, client)))

    def _front_end_seconds(self) -> float:
        return sum(times.cpu_seconds for pid in self._front_ends if (times := process_times(pid)) is not None)


def _figures(values: Sequence[Sequence[ApiRun]]) -> list[Figure]:
    streams, calls = values

    def cpu(name: str, seconds: list[float], target: Target | None = None) -> Figure:
        return Figure.alone(f"processor time per 100 tokens, {name}", "ms", [each * 1e3 for each in seconds], target)

    speeds = [[run.tokens_per_second for run in side] for side in values]
    return [
        Figure.paired("HTTP streams", "tokens/s", speeds[0], "the Python API", speeds[1], SPEED_TARGET),
        cpu("front ends", [run.front_end_cpu for run in streams], CPU_TARGET),
        cpu("launcher with HTTP", [run.launcher_cpu for run in streams]),
        cpu("launcher and caller of the Python API", [run.launcher_cpu for run in calls]),
        cpu("client of HTTP, not counted", [run.client_cpu for run in streams]),
    ]
