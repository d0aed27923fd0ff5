"""Each operator's time beside its roofline: the longer of reading every byte once and of computing, at the measured rates."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from msgspec import to_builtins
from msgspec.structs import asdict

from flowrt.bench.cases.case_options import OperatorOptions
from flowrt.bench.measure.benchmark import Results
from flowrt.bench.measure.limits import better_of, clock_for, measure_limits
from flowrt.bench.report.report import ReportSection, new_table, print_progress
from flowrt.costs.fit import fit_factors
from flowrt.costs.work import FiringLoad, MachineLimits, Work
from flowrt.graph.settings import ComputeCost

if TYPE_CHECKING:
    from flowrt.bench.cases.operator_cases import CasePart, OperatorCase

MIN_TRIES, MAX_TRIES = 5, 40
CASE_SECONDS = 0.4  # for one operator at one load
CACHE_BYTES = 128 << 20  # read between tries, so that weights come from memory, as they do in a model


@dataclass(frozen=True)
class FittedCost:
    """The modelled compute time of an operator (`emulate.compute` of a graph file), and its largest relative error over the measured
    calls."""

    cost: ComputeCost
    worst_error: float


@dataclass(frozen=True)
class OperatorTime:
    """Seconds of one call, in one layer, by limits.clock_for: the minimum of `num_tries`, because other load only adds; and the median."""

    operator: str
    rows: int
    seconds: float
    median_seconds: float
    num_tries: int
    num_bytes: float
    num_flops: float
    modelled: tuple[str, FiringLoad] | None = None  # as in OperatorCase

    def fraction(self, limits: MachineLimits, dtype: str) -> float:
        """Returns the share of the limit: 1 is as fast as the machine allows."""
        return limits.seconds(Work(self.num_bytes, self.num_flops), dtype) / self.seconds


async def measure(model: Path | None, options: OperatorOptions) -> Results:
    """A table, and the times as records. Measures in this process."""
    dtype = options.dtype
    times: list[OperatorTime] = []
    limits = measure_limits(options.threads, (dtype,))
    for each in operator_times(model, options):
        if not times or times[-1].rows != each.rows:
            print_progress(f"{each.rows} rows")
        times.append(each)
    limits = better_of(limits, measure_limits(options.threads, (dtype,)))  # other load may have started, or ended
    rates = f"{limits.read_bytes_per_second / 1e9:.1f} GB/s read, {limits.flops_per_second[dtype] / 1e9:.0f} GFLOP/s"
    text = f"{dtype}, {rates}, {limits.num_threads} thread{'s' if limits.num_threads > 1 else ''}, measured now"
    loads = list(dict.fromkeys(each.rows for each in times))
    cells = {(each.operator, each.rows): f"{1e6 * each.seconds:.0f} {100 * each.fraction(limits, dtype):2.0f}%" for each in times}
    rows = [(name, *(cells.get((name, load), "") for load in loads)) for name in dict.fromkeys(each.operator for each in times)]
    table = new_table(f"operators, {dtype}", "rows", *map(str, loads), rows=rows)
    record = [vars(each) | {"fraction": each.fraction(limits, dtype)} for each in times]
    yield ReportSection("times", record, [table, f"us of one call in one layer, and per cent of the limit: {text}"])
    costs = fitted_costs(times)
    yield ReportSection("costs", {name: to_builtins(fitted) for name, fitted in costs.items()}, compute_section(costs) if costs else ())
    yield ReportSection("limits", vars(limits))
    yield ReportSection("limits_text", text)


def fitted_costs(times: Iterable[OperatorTime]) -> dict[str, FittedCost]:
    """The modelled time of each operator that was measured at two loads or more."""
    by_operator: dict[str, dict[FiringLoad, float]] = {}
    for each in times:
        if each.modelled is not None:
            operator, load = each.modelled
            by_operator.setdefault(operator, {})[load] = each.seconds
    return {operator: fit_cost(seconds) for operator, seconds in by_operator.items() if len(seconds) > 1}


def fit_cost(seconds: Mapping[FiringLoad, float]) -> FittedCost:
    """The cost whose terms, none below 0, have the least squares of relative errors. All `seconds` are above 0."""
    terms = np.array([(1, *load[:3]) for load in seconds], dtype=float)  # scores are not charged
    cost = ComputeCost(*(float(f"{value:.3g}") for value in fit_factors(terms, np.array(list(seconds.values())))))
    return FittedCost(cost, max(abs(cost.seconds(*load) / took - 1) for load, took in seconds.items()))


def compute_section(costs: Mapping[str, FittedCost]) -> Sequence[str]:
    """The lines of `emulate:` in a graph file, each with the largest error of its operator."""
    lines = ["compute:"]
    for operator, fitted in costs.items():
        terms = ", ".join(f"{name}: {value:g}" for name, value in asdict(fitted.cost).items() if value)
        lines.append(f"  {operator}: {{{terms}}}  # within {100 * fitted.worst_error:.0f} % of each measured time")
    return lines


def operator_times(directory: Path | None, options: OperatorOptions) -> Iterator[OperatorTime]:
    """One by one, load by load. Sets torch's threads for this process."""
    import torch

    from flowrt.bench.cases.operator_cases import ModelOperators, TimedBlocks, cases_of
    from flowrt.bench.cases.random_weights import MODEL_LIKE_QWEN3, RandomCheckpoint
    from flowrt.operators.families.registry import read_model_config
    from flowrt.operators.weights import Checkpoint

    torch.set_num_threads(options.threads)
    checkpoint: Checkpoint
    if directory is None:
        config, checkpoint = replace(MODEL_LIKE_QWEN3, **options.sizes, dtype=options.dtype), RandomCheckpoint()
    else:
        config, checkpoint = read_model_config(directory, options.dtype), Checkpoint(directory)
    with torch.inference_mode():
        clock = clock_for(options.threads)
        model = ModelOperators(config, checkpoint, config.moe_layers[: options.layers], TimedBlocks(clock))
        scratch = torch.ones(CACHE_BYTES // 4)
        for rows in options.rows:
            for case in cases_of(model, rows, options.context):
                tries = time_tries(case, scratch.sum, clock, (MIN_TRIES, MAX_TRIES), CASE_SECONDS)
                measured: list[OperatorCase | CasePart] = [case, *(part for part in case.inside if part.name in tries[0])]
                for each in measured:
                    values = sorted(seconds[each.name] for seconds in tries)
                    modelled = case.modelled if each is case else None
                    yield OperatorTime(each.name, rows, values[0], values[len(values) // 2], len(values), *each.work, modelled)


def time_tries(
    case: OperatorCase, evict: Callable[[], object], clock: Callable[[], float], bounds: tuple[int, int], seconds: float
) -> list[dict[str, float]]:
    """As many tries as fit into `seconds`, within `bounds`. A first one, which makes what is made once, does not count."""
    time_case(case, evict, clock)
    tries, deadline = list[dict[str, float]](), time.perf_counter() + seconds
    while len(tries) < bounds[0] or (len(tries) < bounds[1] and time.perf_counter() < deadline):
        tries.append(time_case(case, evict, clock))
    return tries


def time_case(case: OperatorCase, evict: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> dict[str, float]:
    """Seconds per call, of the whole under the case's name, and of its parts where the operator reports them."""
    evict()
    if case.parts is not None:
        case.parts.clear()
    start = clock()
    for call in case.calls:
        call()
    seconds = clock() - start
    reported = {part.name: case.parts[part.key] for part in case.inside if part.key in case.parts} if case.parts else {}
    found = {case.name: seconds, **reported}
    if reported:
        rest = max(seconds - sum(reported.values()), 1e-9)
        found |= {part.name: rest for part in case.inside if part.key is None}
    return {name: total / len(case.calls) for name, total in found.items()}
