"""DP domains: what several domains gain when attention is slower than the experts, and what a stopped one costs the others (xDeepServe
section 5.2, Fig. 19).

Each domain is one group. A micro-batch has one sequence, so all batches have the same size.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from functools import partial
from typing import Any

from flowrt.bench.cases.patterns import Comparison, Runs, Variant, measure, one_link, one_row
from flowrt.bench.measure.benchmark import Result
from flowrt.bench.report.figures import Figure, Target

EXPERTS_SECONDS, EXCHANGE_SECONDS = 100e-6, 10e-6
SLOWER = 3  # attention, than the experts
DOMAINS, MICRO_BATCHES = 3, 2
NUMBERS = (1, 2, 3, 4)  # of domains, in virtual time
BUSY_TARGET, STOPPED_TARGET = 0.9, 1.05
NUM_LAYERS = 8
NEW_TOKENS, PROCESS_NEW_TOKENS = 8, 4


def measure_domains(virtual: bool, dilation: float) -> AsyncIterator[Result]:
    numbers, new_tokens = (NUMBERS, NEW_TOKENS) if virtual else ((1, DOMAINS), PROCESS_NEW_TOKENS)
    no_turns = Variant(f"{DOMAINS} groups without turns", _keys(DOMAINS, 1), DOMAINS * MICRO_BATCHES)
    variants = [*(_variant(number, f"domains: {number}") for number in numbers), no_turns]
    gain = Comparison(variants, partial(_gain, numbers), NUM_LAYERS, new_tokens=new_tokens)
    variants = [_variant(DOMAINS, "undisturbed"), _variant(DOMAINS, "one domain stopped", "attention.0")]
    stopped = Comparison(variants, _stopped, NUM_LAYERS, new_tokens=new_tokens)
    return measure([gain, stopped], virtual, dilation)


def _variant(domains: int, name: str, stopped: str = "") -> Variant:
    return Variant(name, _keys(domains, domains), domains * MICRO_BATCHES, stopped)


def _keys(groups: int, domains: int) -> dict[str, Any]:
    return {
        "deploy": {
            "attention": {"groups": groups, "domains": domains, "micro_batches": MICRO_BATCHES},
            "experts": {"servers": 1},
            "links": one_link(EXCHANGE_SECONDS),
        },
        "emulate": one_row(SLOWER * EXPERTS_SECONDS, EXPERTS_SECONDS),
        "limits": {"max_num_seqs": MICRO_BATCHES},
        "reliability": {"dead_seconds": 3600},  # the stopped group is not fenced while the others are measured
    }


def _gain(numbers: Sequence[int], runs: Runs) -> Sequence[Figure]:
    *each_number, no_turns = [[run.tokens_per_second for run in each] for each in runs]
    speeds = dict(zip(numbers, each_number, strict=True))
    busy = {number: [run.busy_share("experts") for run in each] for number, each in zip(numbers, runs, strict=False)}
    curve = f"attention {SLOWER} x as slow"
    return [
        *(
            Figure.paired(f"{number} domains, decode", "tokens/s", speeds[number], "1 domain", speeds[1], curve=curve, x=number)
            for number in numbers[1:]
        ),
        Figure.alone(f"{DOMAINS} domains, experts busy", "", busy[DOMAINS], Target(BUSY_TARGET, at_most=False)),
        Figure.alone("1 domain, experts busy", "", busy[1]),
        Figure.paired(f"{DOMAINS} groups in turns", "tokens/s", speeds[DOMAINS], "without turns", no_turns),
    ]


def _stopped(runs: Runs) -> Sequence[Figure]:
    undisturbed, others = ([run.mean_step_seconds * 1e6 for run in each] for each in runs)
    return [Figure.paired("step of the others, one domain stopped", "us", others, "undisturbed", undisturbed, Target(STOPPED_TARGET))]
