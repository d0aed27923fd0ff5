"""Validates a request against a model and a graph: each check returns what is wrong, with one line of error text, or None.

The gateway checks a request before it sends it to a group; the group checks it again. Bounds that hold for every model
are those of SamplingParams (flowrt/sampling_params.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from flowrt.actors.control import Request
from flowrt.errors import shown
from flowrt.graph.settings import GraphLimits
from flowrt.sampling_params import MAX_PROMPT_LOGPROBS, SamplingParams

MAX_REQUEST_TOKENS = 1 << 21  # prompt and outputs: what is known of a request fits into one message, and its log into memory


class RequestProblem(NamedTuple):
    """`param`: the parameter that is wrong; "prompt" when prompt and output together are too long for the model or the graph."""

    param: str
    text: str
    is_too_long: bool = False


def num_pages_for(num_tokens: int, page_size: int) -> int:
    return -(-num_tokens // page_size)


def num_new_tokens(params: SamplingParams, num_prompt_tokens: int, limits: GraphLimits, max_position_embeddings: int) -> int:
    """The number of new tokens at which a choice of a request ends: its max_tokens, or fewer where no more fit or `limits` say so. At least
    1, which needs no position: the last token is never fed back."""
    bounds = [
        min(max_position_embeddings, limits.kv_pages * limits.page_size) - num_prompt_tokens,
        (MAX_REQUEST_TOKENS - num_prompt_tokens) // params.n,
        *(bound for bound in (params.max_tokens, limits.max_tokens) if bound is not None),
    ]
    return max(1, min(bounds))


def prompt_refusal(num_prompt_tokens: int, limits: GraphLimits, max_position_embeddings: int) -> str | None:
    """The reason why no request with a prompt of this length can be served, or None."""
    if not num_prompt_tokens:
        return "the prompt is empty, it needs at least one token"
    return _capacity_refusal(f"prompt of {num_prompt_tokens} tokens needs", num_prompt_tokens, limits, max_position_embeddings)


def refusal(request: Request, limits: GraphLimits, max_position_embeddings: int, vocab_size: int) -> str | None:
    """The reason why this request cannot be served, as one line for the user, or None."""
    problem = find_problem(request, limits, max_position_embeddings, vocab_size)
    return None if problem is None else problem.text


def find_problem(request: Request, limits: GraphLimits, max_position_embeddings: int, vocab_size: int) -> RequestProblem | None:
    """Why this request cannot be served, or None."""
    params, new, num_prompt = request.params, request.max_tokens, len(request.prompt_token_ids)
    if (error := prompt_refusal(num_prompt, limits, max_position_embeddings)) is not None:
        return RequestProblem("prompt", error, is_too_long=num_prompt > 0)
    if (error := _token_refusal("prompt", request.prompt_token_ids, vocab_size)) is not None:
        return RequestProblem("prompt", error)
    for committed in request.committed_token_ids:
        if (error := _token_refusal("committed", committed, vocab_size)) is not None:
            return RequestProblem("committed_token_ids", error)
        if len(committed) > new:
            return RequestProblem("committed_token_ids", f"{len(committed)} committed tokens are more than max_tokens {new}")
    if new < 1:
        return RequestProblem("max_tokens", f"max_tokens is {new}, it must be at least 1")
    for name, value in (("max_tokens", params.max_tokens or 1), ("min_tokens", params.min_tokens)):
        if value >= 1 << 63:
            return RequestProblem(name, f"{name} is {shown(value)}, it must be below 2**63")
    if params.max_tokens is not None and params.min_tokens > params.max_tokens:
        return RequestProblem("min_tokens", f"min_tokens is {params.min_tokens}, it must be from 0 to max_tokens ({params.max_tokens})")
    if set(request.ended_choices) >= set(range(params.n)):
        return RequestProblem("ended_choices", f"all {params.n} choices have ended already")
    if (error := _token_refusal("stop", params.stop_token_ids, vocab_size)) is not None:
        return RequestProblem("stop_token_ids", error)
    if (error := _token_refusal("logit_bias", [token_id for token_id, _ in params.logit_bias], vocab_size)) is not None:
        return RequestProblem("logit_bias", error)
    if (error := _token_refusal("allowed", params.allowed_token_ids, vocab_size)) is not None:
        return RequestProblem("allowed_token_ids", error)
    if params.prompt_logprobs is not None and (number := num_prompt * (1 + params.prompt_logprobs)) > MAX_PROMPT_LOGPROBS:
        text = f"a prompt of {num_prompt} tokens with {params.prompt_logprobs} logprobs beside each one's own has {number} logprobs"
        return RequestProblem("prompt_logprobs", f"{text}, at most {MAX_PROMPT_LOGPROBS} are possible")
    if request.kv is not None and request.kv.num_tokens != num_prompt:
        return RequestProblem("kv", f"the KV of {request.kv.num_tokens} tokens is offered for a prompt of {num_prompt}")
    if request.stage == "prefill":
        return None  # the other tokens are computed elsewhere
    needed = f"prompt of {num_prompt} tokens and {new} new tokens need"
    if (error := _capacity_refusal(needed, num_prompt + new - 1, limits, max_position_embeddings)) is not None:
        return RequestProblem("prompt", error, is_too_long=True)
    return None


def _token_refusal(which: str, token_ids: Sequence[int], vocab_size: int) -> str | None:
    if min(token_ids, default=0) >= 0 and max(token_ids, default=0) < vocab_size:
        return None
    position, token_id = next((at, each) for at, each in enumerate(token_ids) if not 0 <= each < vocab_size)
    return f"{which} token {token_id} at position {position} is outside the vocabulary (0 to {vocab_size - 1})"


def _capacity_refusal(needed: str, num_positions: int, limits: GraphLimits, max_position_embeddings: int) -> str | None:
    if num_positions > max_position_embeddings:
        return f"{needed} {num_positions} positions, the model has {max_position_embeddings} (max_position_embeddings)"
    num_pages = num_pages_for(num_positions, limits.page_size)
    if num_pages > limits.kv_pages:
        return f"{needed} {num_pages} pages, the group has {limits.kv_pages} (limits.kv_pages)"
    return None
