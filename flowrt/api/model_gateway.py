"""Makes the gateway of a graph that serves a model."""

from __future__ import annotations

from flowrt.api.served import max_model_len
from flowrt.gateway.gateway import Gateway
from flowrt.gateway.routing import find_policy
from flowrt.graph.model import Graph
from flowrt.graph.recovery import attention_groups, prefill_workers
from flowrt.operators.model_config import ModelConfig
from flowrt.seams import Seams
from flowrt.serving.front_end_settings import ServeOptions
from flowrt.serving.tokenizer import Tokenizer


def new_gateway(graph: Graph, config: ModelConfig, tokenizer: Tokenizer | None, seams: Seams, serving: ServeOptions | None) -> Gateway:
    longest, bounds = config.max_position_embeddings, {}
    if serving is not None:
        longest = max_model_len(graph, config, serving)
        bounds = {"max_requests": graph.serving.max_requests, "max_prompt_tokens": graph.serving.max_prompt_tokens}
    return Gateway(
        attention_groups(graph),
        graph.group_limits(),
        longest,
        config.vocab_size,
        draw_seed=seams.new_seed,
        new_detokenizer=tokenizer.stream if tokenizer is not None else None,
        eos_token_ids=config.eos_token_ids,
        now=seams.clock.now,
        lost_group_seconds=graph.reliability.lost_group_seconds,
        prefill_workers=prefill_workers(graph),
        routing=find_policy(graph.routing),
        limits_of=graph.limits_of,
        long_prompts=graph.long_prompts,
        kv_hold_seconds=graph.reliability.kv_hold_seconds,
        **bounds,
    )
