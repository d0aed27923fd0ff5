"""Makes gateways without a graph file."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from flowrt.gateway.gateway import Gateway, ServedModel
from flowrt.gateway.stages import Stages
from flowrt.graph.settings import GraphLimits

OF_STAGES = ("routing", "long_prompts", "lost_group_seconds", "kv_hold_seconds")


def gateway_of(
    groups: Iterable[str] = ("g",),
    limits: GraphLimits = GraphLimits(),
    max_model_len: int = 64,
    vocab_size: int = 512,
    *,
    prefill_workers: Iterable[str] = (),
    limits_of: Callable[[str], GraphLimits] | None = None,
    now: Callable[[], float] = lambda: 0.0,
    draw_seed: Callable[[], int] = lambda: 1,
    **more: Any,
) -> Gateway:
    """`more`: further arguments of Stages and ServedModel."""
    of_stages = {name: more.pop(name) for name in OF_STAGES if name in more}
    stages = Stages(groups, prefill_workers, limits_of or (lambda worker: limits), now, **of_stages)
    return Gateway(stages, ServedModel(max_model_len, vocab_size, **more), limits, draw_seed)
