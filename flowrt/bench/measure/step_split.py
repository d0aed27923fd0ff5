"""Where the time of a decode step goes, by process, from counters before and after one run; and what a step must read at least."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path

from flowrt.actors.control import Statistics
from flowrt.bench.measure.decoding import Prompts
from flowrt.bench.measure.graph_side import GraphSide
from flowrt.bench.measure.memory import checkpoint_elements, served_model
from flowrt.graph.builtin import SOURCE
from flowrt.graph.model import Graph
from flowrt.operators.families.registry import read_model_config
from flowrt.transports.wire.message import DTYPE_BYTES

_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100


@dataclass(frozen=True)
class StepSplit:
    """Seconds of one process per step of its graph.

    `operators`: from the start of each firing to its end, with the hand-over to the compute thread. `inline`: the part of it in the
    loop's thread. `loop_cpu`, `other_cpu`: processor time of the loop's thread and of the others. `queued`: ready, without a core.
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
        return {field.name: getattr(self, field.name) for field in fields(self)} | {"python": self.python, "waiting": self.waiting}


@dataclass(frozen=True)
class ThreadTimes:
    """Seconds since a process began: processor time of its first thread and of its others, and time queued for a core."""

    first: float = 0.0
    others: float = 0.0
    queued: float = 0.0


@dataclass(frozen=True)
class _Snapshot:
    seconds: float
    statistics: Mapping[str, Statistics]
    threads: Mapping[int, ThreadTimes]


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
        before, after = begin.threads.get(pid, ThreadTimes()), end.threads.get(pid, ThreadTimes())
        operators, inline = (
            sum(getattr(end.statistics[name], key) - getattr(begin.statistics[name], key) for name in workers)
            for key in ("compute_seconds", "inline_seconds")
        )
        totals = (
            end.seconds - begin.seconds,
            operators,
            inline,
            after.first - before.first,
            after.others - before.others,
            after.queued - before.queued,
        )
        splits.append(StepSplit(", ".join(workers), *(total / num_steps for total in totals)))
    return splits


def thread_times(pid: int) -> ThreadTimes:
    """Zeros where the system does not report them. Without scheduler statistics times are in ticks, and `queued` is 0."""
    first = others = queued = 0.0
    try:
        threads = list(Path(f"/proc/{pid}/task").iterdir())
    except OSError:
        return ThreadTimes()
    for thread in threads:
        try:
            cpu, waited = _times_of(thread)
        except OSError:  # it has just ended
            continue
        queued += waited
        if thread.name == str(pid):
            first += cpu
        else:
            others += cpu
    return ThreadTimes(first, others, queued)


def _times_of(thread: Path) -> tuple[float, float]:
    """(processor time, time queued for a core) of one thread."""
    try:
        run, waited, _ = (thread / "schedstat").read_text().split()
        return int(run) / 1e9, int(waited) / 1e9
    except FileNotFoundError:
        words = (thread / "stat").read_text().rpartition(")")[2].split()
        return (int(words[11]) + int(words[12])) / _TICKS_PER_SECOND, 0.0


async def _snapshot(side: GraphSide) -> _Snapshot:
    statistics = await side.graph.statistics()
    pids = set(side.graph.pids.values())
    return _Snapshot(time.perf_counter(), statistics, {pid: thread_times(pid) for pid in pids})


def min_bytes_per_step(graph: Graph, batch: int, context: int) -> float:
    """What a decode step of `batch` sequences must read: weights but for the embedding's table, the experts that some row is routed to
    (uniformly and independently), keys and values of `context` tokens each."""
    model = served_model(graph)
    config = read_model_config(Path(model.path), model.dtype)
    num_expert_elements, num_other_elements = checkpoint_elements(Path(model.path))
    touched = 1 - (1 - config.num_experts_per_token / config.num_experts) ** batch if config.num_experts and config.moe_layers else 0.0
    table = 0 if config.tie_word_embeddings else config.vocab_size * config.hidden_size
    weights = num_other_elements - table + touched * num_expert_elements
    kept = batch * context * config.num_layers * config.kv_width
    return (weights + kept) * DTYPE_BYTES[config.dtype]
