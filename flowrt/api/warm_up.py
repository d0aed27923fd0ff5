"""Warms a graph up: its groups and prefill workers serve requests of its own before the first one of a client (xDeepServe section 4.4).

So lazy links are open, memory has been touched, and what libraries make once per shape is made, for a full step of a prompt and for batches
that decode.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from flowrt.graph.recovery import pipelines
from flowrt.operators.families.registry import read_model_config
from flowrt.sampling_params import SamplingParams

SHORT_PROMPT, NEW_TOKENS = 4, 4


async def warm_up(graph: Any) -> None:
    """Serve in each group a prompt of a full step, and as many short ones as run at a time. When this fails, the run ends.

    `graph`: a RunningGraph, whose module imports this one.
    """
    model = graph.graph.model
    if model is None:
        return
    try:
        config, limits = read_model_config(Path(model.path)), graph.graph.group_limits()
        num_groups = len(pipelines(graph.graph))
        new_tokens = min(NEW_TOKENS, limits.max_tokens or NEW_TOKENS)
        room = min(limits.kv_pages * limits.page_size // 2, config.max_position_embeddings - new_tokens)
        lengths = [limits.max_num_batched_tokens, *[SHORT_PROMPT] * limits.max_num_seqs] * num_groups
        numbers = []
        for number, length in enumerate(lengths[: graph.max_requests]):
            prompt = [at % config.vocab_size for at in range(max(1, min(length, room)))]
            params = SamplingParams(max_tokens=new_tokens, ignore_eos=True, cache_salt=f"warm-up {number}")  # no prompt finds another
            numbers.append(await graph.submit(prompt, params))
        for number in numbers:
            async for _ in graph.follow(number):
                pass
    except BaseException as error:
        await graph.__aexit__(type(error), error, error.__traceback__)
        raise
