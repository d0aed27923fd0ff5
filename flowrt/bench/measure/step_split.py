"""Where the time of a decode step goes, by process, from counters before and after one run; and what a step must read at least."""

from __future__ import annotations

import time
from pathlib import Path
from typing import NamedTuple

from flowrt.bench.measure.decoding import GraphSide, Prompts
from flowrt.bench.measure.memory import served_model
from flowrt.graph.model import Graph
from flowrt.kinds.weights import weight_bytes
from flowrt.operators.families.family import parts_to_read
from flowrt.operators.families.registry import read_model_config
from flowrt.operators.model_config import EXPERT_PARTS, LIBRARY_EXPERT
from flowrt.system.process_status import ProcessTimes, process_times


class StepSplit(NamedTuple):
    """Seconds of one process per step of its graph; or totals since its start.

    `step`: wall time. `operators`: from the start of each firing to its end, with the transfer to the compute thread. `inline`: the part
    of it in the loop's thread. `loop_cpu`, `other_cpu`: processor time of the loop's thread and of the others. `queued`: the loop's
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
        return {**self._asdict(), "python": self.python, "waiting": self.waiting}


async def split_of(side: GraphSide, prompts: Prompts, new_tokens: int) -> list[StepSplit]:
    """The split of one more run. A process that several workers share is one row."""
    begin: dict[str, tuple[StepSplit, int]] = {}

    async def on_prefilled() -> None:
        begin.update(await _totals_of(side))

    await side.run(prompts, new_tokens, on_prefilled=on_prefilled)
    end = await _totals_of(side)
    both = {name: (begin[name], end[name]) for name in begin if name in end}
    num_steps = max((after - before for (_, before), (_, after) in both.values()), default=0)
    if num_steps < 1:
        return []
    return [
        StepSplit(name, *((after - before) / num_steps for before, after in zip(first[1:], last[1:], strict=True)))
        for name, ((first, _), (last, _)) in both.items()
    ]


async def _totals_of(side: GraphSide) -> dict[str, tuple[StepSplit, int]]:
    """The totals of each process, which is named by its workers, and its steps."""
    statistics, now = await side.graph.statistics(), time.perf_counter()
    workers: dict[int, list[str]] = {}
    for name, pid in side.graph.pids.items():
        if name in statistics:  # the monitor has no statistics
            workers.setdefault(pid, []).append(name)
    totals = {}
    for pid, names in workers.items():
        times, process = process_times(pid) or ProcessTimes(0.0, 0.0, 0.0), ", ".join(names)
        operators, inline = (sum(getattr(statistics[name], key) for name in names) for key in ("compute_seconds", "inline_seconds"))
        other_cpu = times.cpu_seconds - times.loop_cpu_seconds
        total = StepSplit(process, now, operators, inline, times.loop_cpu_seconds, other_cpu, times.queued_seconds)
        totals[process] = total, max(statistics[name].num_steps for name in names)
    return totals


def min_bytes_per_step(graph: Graph, batch: int, context: int) -> float:
    """What a decode step of `batch` sequences must read: weights but for the embedding's table, the experts that some row is routed to
    (uniformly and independently), keys and values of `context` tokens each, recurrent states."""
    model = served_model(graph)
    config = read_model_config(Path(model.path), model.dtype, model.implementation, **model.kept)
    touched = 1 - (1 - config.num_experts_per_token / config.num_experts) ** batch if config.num_experts and config.moe_layers else 0.0
    shares = dict.fromkeys((*EXPERT_PARTS, LIBRARY_EXPERT), touched * config.num_experts)
    shares["embedding"] = float(config.tie_word_embeddings)
    read = parts_to_read(config).items()
    weights = sum(shares.get(part, 1) * len(list(layers)) * weight_bytes(config, (part,)) for part, layers in read)
    states = batch * len(config.recurrent_layers) * config.state_bytes
    return weights + batch * context * config.kv_bytes + states
