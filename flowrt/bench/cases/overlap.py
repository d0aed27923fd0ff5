"""The ping-pong pipeline: what a second and a third micro-batch gain, beside the equations (MegaScale-Infer section 4.1, Fig. 4).

One group and one expert server compute for the same time per micro-batch. All micro-batches have one sequence each, so their size does
not change with their number. No step waits for the last one to end, so a step takes L periods of the pipeline, and the equation, which
fills and empties the pipeline in each step, exceeds it by up to (m - 1) T_f.

A second comparison has a batch of fixed size, and lets the group choose the number of micro-batches by the load (xDeepServe section 4.1).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence

from flowrt.bench.cases.patterns import Comparison, Runs, Variant, measure, one_link, one_row
from flowrt.bench.measure.benchmark import Result
from flowrt.bench.report.figures import Figure, Target
from flowrt.costs.ping_pong import PingPong

Compute = Mapping[str, Mapping[str, float]]  # `emulate.compute`
COMPUTE_SECONDS = 100e-6  # T_f
EXCHANGE_SHARES = (0.1, 0.28, 0.38)  # T_c / T_f
THIRD_TARGETS = {0.1: 1.08, 0.28: 1.22, 0.38: 1.30}
SECOND_TARGET, DEVIATION_TARGET, EXPOSED_TARGET = 1.8, 0.05, 0.1
NUM_LAYERS = 16
NEW_TOKENS, PROCESS_NEW_TOKENS = 8, 4
MICRO_BATCHES = (1, 2, 3)
VIRTUAL_MICRO_BATCHES = (*MICRO_BATCHES, 4)
BATCH = 12  # of the dynamic number
DYNAMIC_TARGET = 0.95
DYNAMIC_LAYERS, DYNAMIC_TOKENS = 4, 250
ROWS_COST: Compute = {"attention": {"row_seconds": 25e-6}, "experts": {"row_seconds": 12.5e-6}}  # each expert gets a row of each token
CALLS_COST: Compute = {"attention": {"fixed_seconds": 100e-6}, "experts": {"fixed_seconds": 20e-6}}


def measure_overlap(virtual: bool, dilation: float) -> AsyncIterator[Result]:
    """Between processes without the comparison of a dynamic number, whose groups take hundreds of steps to choose."""
    numbers, new_tokens = (VIRTUAL_MICRO_BATCHES, NEW_TOKENS) if virtual else (MICRO_BATCHES, PROCESS_NEW_TOKENS)
    fixed = [_comparison(share, numbers, new_tokens) for share in EXCHANGE_SHARES]
    dynamic = [_dynamic("computing by rows", ROWS_COST), _dynamic("computing by calls", CALLS_COST)]
    return measure([*fixed, *dynamic] if virtual else fixed, virtual, dilation)


def _comparison(share: float, numbers: Sequence[int], new_tokens: int) -> Comparison:
    times = PingPong(COMPUTE_SECONDS, COMPUTE_SECONDS, share * COMPUTE_SECONDS)
    variants = [_variant(times, micro_batches) for micro_batches in numbers]
    return Comparison(variants, lambda runs: _figures(times, share, numbers, runs), NUM_LAYERS, new_tokens=new_tokens)


def _variant(times: PingPong, micro_batches: int) -> Variant:
    keys = {
        "deploy": {
            "attention": {"groups": 1, "micro_batches": micro_batches},
            "experts": {"servers": 1},
            "links": one_link(times.exchange_seconds),
        },
        "emulate": one_row(times.attention_seconds, times.experts_seconds),
        "limits": {"max_num_seqs": micro_batches},
    }
    exchange = times.exchange_seconds / times.compute_seconds
    return Variant(f"{_micro_batches(micro_batches)}, exchange {exchange:g} of computing", keys, micro_batches)


def _micro_batches(number: int) -> str:
    return f"{number} micro-batch{'es' * (number > 1)}"


def _dynamic(name: str, compute: Compute) -> Comparison:
    def variant(micro_batches: int, is_dynamic: bool) -> Variant:
        keys = {
            "deploy": {
                "attention": {"groups": 1, "micro_batches": micro_batches},
                "experts": {"servers": 1},
                "links": one_link(EXCHANGE_SHARES[-1] * COMPUTE_SECONDS),
            },
            "emulate": {"compute": compute},
            "limits": {"max_num_seqs": BATCH, "dynamic_micro_batches": is_dynamic},
        }
        return Variant(f"{name}, {'up to ' * is_dynamic}{_micro_batches(micro_batches)}", keys, BATCH)

    def figures(runs: Runs) -> Sequence[Figure]:
        *fixed, dynamic = ([run.tokens_per_second for run in each] for each in runs)
        best = max(range(len(fixed)), key=lambda number: sum(fixed[number]))
        label, target = f"{name}: a dynamic number", Target(DYNAMIC_TARGET, at_most=False)
        return [Figure.paired(label, "tokens/s", dynamic, f"the best, {_micro_batches(MICRO_BATCHES[best])}", fixed[best], target)]

    variants = [*(variant(number, is_dynamic=False) for number in MICRO_BATCHES), variant(MICRO_BATCHES[-1], is_dynamic=True)]
    return Comparison(variants, figures, DYNAMIC_LAYERS, new_tokens=DYNAMIC_TOKENS)


def _figures(times: PingPong, share: float, numbers: Sequence[int], runs: Runs) -> Sequence[Figure]:
    speeds = {number: [run.tokens_per_second for run in each] for number, each in zip(numbers, runs, strict=True)}
    label = f"exchange {share:g}"

    def gain(number: int, of: int, target: Target | None = None) -> Figure:
        curve = {"curve": f"T_c = {share:g} T_f", "x": number} if of == 1 else {}
        name = f"{label}: {_micro_batches(number)}"
        return Figure.paired(name, "tokens/s", speeds[number], _micro_batches(of), speeds[of], target, share=share, **curve)

    figures = [gain(2, 1, Target(SECOND_TARGET, at_most=False)), gain(3, 2, Target(THIRD_TARGETS[share], at_most=False))]
    figures += [gain(number, 1) for number in numbers if number > 2]
    for micro_batches, each in zip(numbers, runs, strict=True):
        expected = times.step_seconds(micro_batches, NUM_LAYERS)
        away = [abs(run.mean_step_seconds / expected - 1) for run in each]
        name = f"{label}: {_micro_batches(micro_batches)}, off the equation"
        figures.append(Figure.alone(name, "", away, Target(DEVIATION_TARGET), share=share))
    exposed = [(1 - run.busy_share("experts")) * run.mean_step_seconds / NUM_LAYERS / times.exchange_seconds for run in runs[2]]
    figures.append(Figure.alone(f"{label}: 3 micro-batches, exposed exchange", "of T_c", exposed, Target(EXPOSED_TARGET), share=share))
    return figures
