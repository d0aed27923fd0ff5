"""Each operator's time against the least that this machine allows: `flowrt bench operators`.

Here: Options, OperatorTime, `measure`. Not here: what is called (operator_cases.py), the machine's limits (limits.py), tables
(operators_command.py). The least time is the longer of reading every byte once at the measured bandwidth and computing at the measured
rate (the roofline). Everything happens in this process.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from flowrt.bench.limits import MachineLimits, clock_of
from flowrt.errors import UserError

if TYPE_CHECKING:
    from flowrt.bench.operator_cases import Case

MIN_TRIES, MAX_TRIES = 5, 40
CASE_SECONDS = 0.4  # for one operator at one load
CACHE_BYTES = 128 << 20  # read between tries, so that weights come from memory, as they do in a model


@dataclass(frozen=True, kw_only=True)
class Options:
    """`model` None: random weights of the given sizes (random_weights.model_like_qwen3); else the first `layers` of that checkpoint."""

    model: Path | None = None
    sizes: dict[str, int]
    dtype: str = "float32"
    rows: Sequence[int] = (1, 4, 8, 32, 128, 512)
    context: int = 64
    layers: int = 4
    num_threads: int = 1

    def check(self) -> None:
        """Raises UserError for numbers that measure nothing."""
        numbers = [("--context", self.context), ("--layers", self.layers), ("--threads", self.num_threads)]
        numbers += [("--rows", each) for each in self.rows] + [(f"--{name}", each) for name, each in self.sizes.items()]
        for name, value in numbers:
            if value < 1:
                raise UserError(f"{name} is {value}, it must be at least 1")
        if self.sizes.get("top-k", 1) > self.sizes.get("experts", 32):
            raise UserError(f"--top-k is {self.sizes['top-k']}, it must be at most --experts")
        if self.sizes.get("heads", 16) % self.sizes.get("kv-heads", 4):
            raise UserError(f"--kv-heads is {self.sizes.get('kv-heads', 4)}, it must divide --heads")


@dataclass(frozen=True)
class OperatorTime:
    """Seconds of one call, in one layer, by limits.clock_of: the least of `num_tries`, because other load can only add; and the median."""

    operator: str
    rows: int
    seconds: float
    median_seconds: float
    num_tries: int
    num_bytes: float
    num_flops: float

    def fraction(self, limits: MachineLimits, dtype: str) -> float:
        """Of the limit: 1 is as fast as the machine allows."""
        return limits.seconds(self.num_bytes, self.num_flops, dtype) / self.seconds


def measure(options: Options) -> Iterator[OperatorTime]:
    """One by one, load by load. Sets torch's threads for this process."""
    import torch

    from flowrt.bench.operator_cases import Model, Timed, cases_of
    from flowrt.bench.random_weights import CountingCheckpoint, RandomCheckpoint, model_like_qwen3
    from flowrt.operators.families.registry import read_model_config

    options.check()
    torch.set_num_threads(options.num_threads)
    checkpoint: CountingCheckpoint
    if options.model is None:
        names = {name.replace("-", "_"): value for name, value in options.sizes.items()}
        config, checkpoint = model_like_qwen3(**names, layers=options.layers, dtype=options.dtype), RandomCheckpoint()
    else:
        config, checkpoint = read_model_config(options.model, options.dtype), CountingCheckpoint(options.model)
    with torch.inference_mode():
        clock = clock_of(options.num_threads)
        model = Model(config, checkpoint, config.moe_layers[: options.layers], Timed(clock))
        scratch = torch.ones(CACHE_BYTES // 4)
        for rows in options.rows:
            for case in cases_of(model, rows, options.context):
                _try(case, scratch.sum, clock)  # the first makes what is made once
                tries: list[dict[str, float]] = []
                deadline = time.perf_counter() + CASE_SECONDS
                while len(tries) < MIN_TRIES or (len(tries) < MAX_TRIES and time.perf_counter() < deadline):
                    tries.append(_try(case, scratch.sum, clock))
                for name, num_bytes, num_flops in [(case.name, case.num_bytes, case.num_flops), *_inside(case, tries)]:
                    values = sorted(each[name] for each in tries)
                    yield OperatorTime(name, rows, values[0], values[len(values) // 2], len(values), num_bytes, num_flops)


def _inside(case: Case, tries: Sequence[dict[str, float]]) -> list[tuple[str, float, float]]:
    return [(part.name, part.num_bytes, part.num_flops) for part in case.inside if part.name in tries[0]]


def _try(case: Case, evict: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> dict[str, float]:
    """Seconds per call, of the whole under the case's name, and of its parts where the operator tells them apart."""
    evict()
    if case.parts is not None:
        case.parts.clear()
    start = clock()
    for call in case.calls:
        call()
    seconds = clock() - start
    found = {case.name: seconds / len(case.calls)}
    told = (
        {part.name: case.parts[part.key] for part in case.inside if part.key is not None and part.key in case.parts} if case.parts else {}
    )
    if told:
        left = max(seconds - sum(told.values()), 1e-9)
        for part in case.inside:
            if part.key is None or part.name in told:
                found[part.name] = told.get(part.name, left) / len(case.calls)
    return found
