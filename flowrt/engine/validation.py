"""What a request must be to be served at all: one line of error text, or nothing.

Here: `refusal` (asked by the engine for each request) and `max_new_tokens` (asked by the gateway when the user names no
max_tokens). Not here: what happens to a refused request (engine.py). Pure.
"""

from __future__ import annotations

import math

from flowrt.actors.control import Request, Sampling
from flowrt.graph.model import GraphLimits

MAX_CHOICES = 128  # of one request
MAX_LOGPROBS = 20  # per token, beside its own


def num_pages_for(num_tokens: int, page_size: int) -> int:
    return -(-num_tokens // page_size)


def max_new_tokens(num_prompt_tokens: int, limits: GraphLimits, max_position_embeddings: int) -> int:
    """The largest max_tokens that `refusal` lets through for such a prompt; below 1 when the prompt alone is too long.

    n new tokens occupy n - 1 positions behind the prompt, because the last one is never fed back.
    """
    room = min(max_position_embeddings, limits.kv_pages * limits.page_size) - num_prompt_tokens + 1
    return min(limits.max_tokens, room)


def refusal(request: Request, limits: GraphLimits, max_position_embeddings: int, vocab_size: int) -> str | None:
    """Why this group cannot serve the request, as one line for its user; None when it can."""
    prompt, new = request.prompt_token_ids, request.max_tokens
    if not prompt:
        return "the prompt is empty, it needs at least one token"
    for part, token_ids in (("prompt", prompt), *(("committed", committed) for committed in request.committed_token_ids)):
        if min(token_ids, default=0) < 0 or max(token_ids, default=0) >= vocab_size:
            position, token_id = next((at, each) for at, each in enumerate(token_ids) if not 0 <= each < vocab_size)
            return f"{part} token {token_id} at position {position} is outside the vocabulary (0 to {vocab_size - 1})"
        if part == "committed" and len(token_ids) > new:
            return f"{len(token_ids)} committed tokens are more than max_tokens {new}"
    if new < 1:
        return f"max_tokens is {new}, it must be at least 1"
    if new > limits.max_tokens:
        return f"max_tokens {new} is more than the graph allows ({limits.max_tokens}, limits.max_tokens)"
    if not 0 <= request.min_tokens <= new:
        return f"min_tokens is {request.min_tokens}, it must be from 0 to max_tokens ({new})"
    if (error := choices_refusal(request.num_choices)) is not None:
        return error
    if set(request.ended_choices) >= set(range(request.num_choices)):
        return f"all {request.num_choices} choices have ended already"
    for token_id in request.stop_token_ids:
        if not 0 <= token_id < vocab_size:
            return f"stop token {token_id} is outside the vocabulary (0 to {vocab_size - 1})"
    return _sampling_refusal(request.sampling) or _room_refusal(len(prompt), new, limits, max_position_embeddings)


def choices_refusal(num_choices: int) -> str | None:
    return None if 1 <= num_choices <= MAX_CHOICES else f"n is {num_choices}, it must be from 1 to {MAX_CHOICES}"


def _room_refusal(num_prompt: int, new: int, limits: GraphLimits, max_position_embeddings: int) -> str | None:
    whole = f"prompt of {num_prompt} tokens and {new} new tokens need"
    if num_prompt > max_position_embeddings:
        return f"prompt of {num_prompt} tokens is longer than the model's {max_position_embeddings} positions (max_position_embeddings)"
    prompt_pages = num_pages_for(num_prompt, limits.page_size)
    if prompt_pages > limits.kv_pages:
        return f"prompt of {num_prompt} tokens needs {prompt_pages} pages, the group has {limits.kv_pages} (limits.kv_pages)"
    num_positions = num_prompt + new - 1
    if num_positions > max_position_embeddings:
        return f"{whole} {num_positions} positions, the model has {max_position_embeddings} (max_position_embeddings)"
    num_pages = num_pages_for(num_positions, limits.page_size)
    if num_pages > limits.kv_pages:
        return f"{whole} {num_pages} pages, the group has {limits.kv_pages} (limits.kv_pages)"
    return None


def _sampling_refusal(sampling: Sampling) -> str | None:
    if not (math.isfinite(sampling.temperature) and sampling.temperature >= 0):
        return f"temperature is {sampling.temperature}, it must be a number of at least 0"
    if not 0 < sampling.top_p <= 1:
        return f"top_p is {sampling.top_p}, it must be above 0 and at most 1"
    if sampling.top_k < 0:
        return f"top_k is {sampling.top_k}, it must be 0 (off) or more"
    if not 0 <= sampling.seed < 1 << 63:
        return f"seed is {sampling.seed}, it must be from 0 to 2**63 - 1"
    if not (math.isfinite(sampling.repetition_penalty) and sampling.repetition_penalty > 0):
        return f"repetition_penalty is {sampling.repetition_penalty}, it must be a number above 0; 1 is off"
    for name, penalty in (("presence", sampling.presence_penalty), ("frequency", sampling.frequency_penalty)):
        if not -2 <= penalty <= 2:
            return f"{name}_penalty is {penalty}, it must be from -2 to 2; 0 is off"
    if sampling.num_logprobs is not None and not 0 <= sampling.num_logprobs <= MAX_LOGPROBS:
        return f"logprobs is {sampling.num_logprobs}, it must be from 0 to {MAX_LOGPROBS}"
    return None
