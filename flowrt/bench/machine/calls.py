"""A process that measures operators with random weights, and what its cores and the memory bus reach, while equal processes do the same.

Requests: "limits" responds with MachineLimits; "operators" with MeasuredCall of the built-in operators.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from statistics import median
from typing import Any

import msgspec

from flowrt.bench.cases.operators import time_tries
from flowrt.bench.machine.constants import MeasuredCall
from flowrt.bench.measure.limits import clock_for, measure_limits
from flowrt.operators.model_config import ModelConfig

# Widths of a model whose experts are small, and of one whose experts are large.
SIZES: tuple[Mapping[str, Any], ...] = (
    {"hidden_size": 512, "expert_width": 512, "num_heads": 8, "num_kv_heads": 4, "num_experts": 16, "vocab_size": 8192},
    {"hidden_size": 1024, "expert_width": 1024, "num_heads": 16, "num_kv_heads": 4, "num_experts": 8, "vocab_size": 16384},
)
TINY: Mapping[str, Any] = {"hidden_size": 64, "expert_width": 32, "num_heads": 2, "num_kv_heads": 2, "num_experts": 4, "vocab_size": 128}
ROWS, CONTEXTS = (1, 4, 16, 64, 256), {1: (64, 1024), 4: (64, 1024), 16: (64, 512)}
NUM_LAYERS = 2  # each call has weights of another layer than the one before
MIN_TRIES, MAX_TRIES, CASE_SECONDS = 1, 4, 0.015
ROUNDS = 5  # through all calls, a few tries each: load of other programs on the machine lasts for seconds, so it spoils one or two of them
EVICTED_BYTES = 64 << 20  # read between calls, as weights of other layers are in a model


def config_of(sizes: int, dtype: str, is_tiny: bool = False) -> ModelConfig:
    from flowrt.bench.cases.random_weights import MODEL_LIKE_QWEN3

    layers: dict[str, Any] = {"num_layers": NUM_LAYERS, "moe_layers": tuple(range(NUM_LAYERS))}
    return replace(MODEL_LIKE_QWEN3, **((TINY,) if is_tiny else SIZES)[sizes], **layers, dtype=dtype)


@contextmanager
def open_peer(threads: str, is_tiny: str) -> Iterator[tuple[dict[str, Any], Callable[..., dict[str, Any]]]]:
    num_threads, tiny = int(threads), is_tiny == "True"

    def respond(action: str, dtypes: list[str]) -> dict[str, Any]:
        if action == "limits":
            return asdict(measure_limits(num_threads, tuple(dtypes)))
        return {"times": msgspec.to_builtins([each for dtype in dtypes for each in _call_times(num_threads, dtype, tiny)])}

    yield {}, respond


def _call_times(num_threads: int, dtype: str, is_tiny: bool) -> Iterator[MeasuredCall]:
    import torch

    from flowrt.bench.cases.operator_cases import ModelOperators, OperatorCase, TimedBlocks, cases_of
    from flowrt.bench.cases.random_weights import RandomCheckpoint

    torch.set_num_threads(num_threads)
    clock = clock_for(num_threads)
    evicted = torch.ones((1 << 20 if is_tiny else EVICTED_BYTES) // 4)
    cases = list[tuple[ModelConfig, OperatorCase]]()
    with torch.inference_mode():
        for number in range(1 if is_tiny else len(SIZES)):
            config = config_of(number, dtype, is_tiny)
            model = ModelOperators(config, RandomCheckpoint(), config.moe_layers, TimedBlocks(clock))
            for rows in ROWS[:2] if is_tiny else ROWS:
                cases += [(config, case) for case in cases_of(model, rows, CONTEXTS.get(rows, (64,)), modelled_only=True)]
        rounds = [
            [
                median(each[case.name] for each in time_tries(case, evicted.sum, clock, (MIN_TRIES, MAX_TRIES), CASE_SECONDS))
                for _, case in cases
            ]
            for _ in range(1 if is_tiny else ROUNDS)
        ]
    for (config, case), seconds in zip(cases, zip(*rounds, strict=True), strict=True):
        assert case.modelled is not None
        yield MeasuredCall(config, *case.modelled, median(seconds))
