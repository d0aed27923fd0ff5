"""Warms a graph up: its groups and prefill workers serve requests of its own before the first one of a client (xDeepServe section 4.4).

So lazy links are open, memory has been touched, and what libraries make once per shape is made, for a full step of a prompt and for batches
that decode.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from flowrt.gateway.requests import Requests
from flowrt.graph.model import Graph
from flowrt.graph.recovery import pipelines
from flowrt.sampling_params import SamplingParams

SHORT_PROMPT, NEW_TOKENS = 4, 4


async def warm_up(graph: Graph, requests: Requests) -> None:
    """Serve in each group a prompt of a full step, and as many short ones as run at a time. Raises what ends the run."""
    gateway, limits, num_groups = requests.gateway, graph.group_limits(), len(pipelines(graph))
    new_tokens = min(NEW_TOKENS, limits.max_tokens or NEW_TOKENS)
    room = min(limits.kv_pages * limits.page_size // 2, gateway.model.max_model_len - new_tokens)
    lengths = [limits.max_num_batched_tokens, *[SHORT_PROMPT] * limits.max_num_seqs] * num_groups
    numbers = []
    for number, length in enumerate(lengths[: gateway.admission.max_requests]):
        prompt = [at % gateway.model.vocab_size for at in range(max(1, min(length, room)))]
        params = SamplingParams(max_tokens=new_tokens, ignore_eos=True, cache_salt=f"warm-up {number}")  # no prompt finds another
        numbers.append(await requests.submit(params, partial(_given, prompt), is_logged=False))
    for number in numbers:
        async for _ in requests.follow(number):
            pass


async def _given(prompt: Sequence[int]) -> Sequence[int]:
    return prompt
