"""Where the time of a decode step goes, by process, from counters before and after one run; and what a step must read at least."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from flowrt.actors.control import Statistics
from flowrt.bench.measure.decoding import Prompts
from flowrt.bench.measure.graph_side import GraphSide
from flowrt.bench.measure.memory import checkpoint_elements, served_model
from flowrt.graph.builtin import SOURCE
from flowrt.graph.model import Graph
from flowrt.operators.families.registry import read_model_config
from flowrt.process_status import ProcessTimes, process_times
from flowrt.transports.wire.message import DTYPE_BYTES

NOT_REPORTED = ProcessTimes(0.0, 0.0, 0.0)


@dataclass(frozen=True)
class StepSplit:
    """Seconds of one process per step of its graph.

    `operators`: from the start of each firing to its end, with the transfer to the compute thread. `inline`: the part of it in the
    loop's thread. `loop_cpu`, `other_cpu`: processor time of the loop's thread and of the others. `queued`: the loop's
    thread was ready, without a core.
    """

    process: str
    step: float
    operators: float
    inline: float
    loop_cpu: float
    other_cpu: float
    queued: float

    @property
    def python(self) -> float:
        """The event loop without operators: matching, credits, encoding, sending."""
        return max(0.0, self.loop_cpu - self.inline)

    @property
    def waiting(self) -> float:
        """Waiting for other processes, or for a core."""
        return max(0.0, self.step - self.operators - self.python)

    def as_json(self) -> dict[str, str | float]:
        return {**vars(self), "python": self.python, "waiting": self.waiting}


@dataclass(frozen=True)
class _Snapshot:
    seconds: float
    statistics: Mapping[str, Statistics]
    times: Mapping[int, ProcessTimes]


async def split_of(side: GraphSide, prompts: Prompts, new_tokens: int) -> list[StepSplit]:
    """The split of one more run. A process that several workers share is one row."""
    begin: list[_Snapshot] = []

    async def on_prefilled() -> None:
        begin.append(await _snapshot(side))

    await side.run(prompts, new_tokens, on_prefilled=on_prefilled)
    return splits_between(begin[0], await _snapshot(side), side.graph.pids, side.graph.graph)


def splits_between(begin: _Snapshot, end: _Snapshot, pids: Mapping[str, int], graph: Graph) -> list[StepSplit]:
    """The differences of two snapshots, per step; empty when no step lies between."""
    sources = [node.process for node in graph.nodes.values() if node.operator == SOURCE]
    steps = [end.statistics[name].num_steps - begin.statistics[name].num_steps for name in dict.fromkeys(sources)]
    num_steps = max(steps, default=0)
    if num_steps < 1:
        return []
    names: dict[int, list[str]] = {}
    for name, pid in pids.items():
        if name in end.statistics:  # the monitor has no statistics
            names.setdefault(pid, []).append(name)
    splits = []
    for pid, workers in names.items():
        before, after = (snapshot.times.get(pid, NOT_REPORTED) for snapshot in (begin, end))
        operators, inline = (
            sum(getattr(end.statistics[name], key) - getattr(begin.statistics[name], key) for name in workers)
            for key in ("compute_seconds", "inline_seconds")
        )
        totals = (
            end.seconds - begin.seconds,
            operators,
            inline,
            loop_cpu := after.loop_cpu_seconds - before.loop_cpu_seconds,
            max(0.0, after.cpu_seconds - before.cpu_seconds - loop_cpu),
            after.queued_seconds - before.queued_seconds,
        )
        splits.append(StepSplit(", ".join(workers), *(total / num_steps for total in totals)))
    return splits


async def _snapshot(side: GraphSide) -> _Snapshot:
    statistics = await side.graph.statistics()
    times = {pid: process_times(pid) or NOT_REPORTED for pid in set(side.graph.pids.values())}
    return _Snapshot(time.perf_counter(), statistics, times)


def min_bytes_per_step(graph: Graph, batch: int, context: int) -> float:
    """What a decode step of `batch` sequences must read: weights but for the embedding's table, the experts that some row is routed to
    (uniformly and independently), keys and values of `context` tokens each."""
    model = served_model(graph)
    config = read_model_config(Path(model.path), model.dtype)
    num_expert_elements, num_other_elements = checkpoint_elements(Path(model.path))
    touched = 1 - (1 - config.num_experts_per_token / config.num_experts) ** batch if config.num_experts and config.moe_layers else 0.0
    table = 0 if config.tie_word_embeddings else config.vocab_size * config.hidden_size
    weights = num_other_elements - table + touched * num_expert_elements
    kv_elements = batch * context * config.num_layers * config.kv_width
    return (weights + kv_elements) * DTYPE_BYTES[config.dtype]
