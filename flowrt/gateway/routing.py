"""Routing policies: which worker gets a request that waits at the gateway, or that it waits for a better one. Pure.

A policy is a function of the request and the statuses of the workers that may have it. The gateway has one queue per stage (router.py)
and asks the policy whenever a request waits and something has changed: the oldest request first, each with the effects of those before it.
So no worker has a queue that another could have served sooner (xDeepServe section 4.3). A package provides a policy of its own by the
entry point group `flowrt.routing_policies`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any, Literal, cast

from flowrt.errors import GraphError, error_text, place_of, shown
from flowrt.graph.settings import ROUTING_ENTRY_POINTS

log = logging.getLogger("flowrt.gateway")


@dataclass(frozen=True, slots=True)
class WaitingRequest:
    """`stage`: all = a group computes the prompt and the output; prefill = a prefill worker computes the prompt; decode = a group pulls
    the KV of the prompt and computes the output. `num_expected_tokens`: of output, of all its choices."""

    stage: Literal["all", "prefill", "decode"]
    num_prompt_tokens: int
    num_choices: int
    num_expected_tokens: int


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """What the gateway knows of a worker that is up and takes requests. Tokens are those of the requests that it has now."""

    name: str
    max_num_seqs: int  # its limits
    max_num_batched_tokens: int
    max_kv_tokens: int
    num_placed: int = 0  # requests that it has been given since the workers were last changed
    last_placed: int = 0  # counts the requests of all workers: the number of its latest one, 0 before the first
    num_sequences: int = 0
    num_uncomputed_tokens: int = 0  # of prompts without a token of output yet
    num_kv_tokens: int = 0  # of prompts and outputs
    num_expected_tokens: int = 0  # of output that is still to come
    num_cached_tokens: int = 0  # of the waiting request's prompt: probably in the worker's prefix cache
    num_held_tokens: int = 0  # of all prompts: probably in the worker's prefix cache


RoutingPolicy = Callable[[WaitingRequest, Sequence[WorkerStatus]], str | None]


def round_robin(request: WaitingRequest, workers: Sequence[WorkerStatus]) -> str | None:
    """Each worker that has room in its turn."""
    return min(workers, key=lambda worker: (_is_full(request, worker), worker.num_placed, worker.last_placed)).name


def cache_aware(request: WaitingRequest, workers: Sequence[WorkerStatus]) -> str | None:
    """The worker with the fewest rows to compute before and for this request, without those in its prefix cache. A worker that has prompts
    for a whole step at hand gets no more: the request waits for it if it has a part of the prompt, else for the first that is ready. For
    decode: the worker with the fewest tokens in its KV pages, and expected there. Workers with room for the sequences and their KV come
    before all others. Of equal ones the request goes where it replaces the least in the prefix cache, then to the one that has not been
    given any for the longest time."""

    def order(worker: WorkerStatus) -> tuple[int, ...]:
        prompts = worker.num_uncomputed_tokens + request.num_prompt_tokens - worker.num_cached_tokens
        load = {
            "prefill": prompts,
            "all": prompts + worker.num_expected_tokens,
            "decode": worker.num_kv_tokens + worker.num_expected_tokens,
        }
        return (
            _is_full(request, worker),
            load[request.stage],
            worker.num_sequences,
            num_replaced_tokens(request, worker),
            worker.last_placed,
        )

    if request.stage == "decode":
        return min(workers, key=order).name
    ready = [worker for worker in workers if worker.num_uncomputed_tokens < worker.max_num_batched_tokens]
    best = min(workers, key=order)
    if best in ready or best.num_cached_tokens or not ready:
        return best.name if best in ready else None
    return min(ready, key=order).name


def num_replaced_tokens(request: WaitingRequest, worker: WorkerStatus) -> int:
    """Tokens of other prompts that the worker's prefix cache loses to this one."""
    return max(0, worker.num_held_tokens + request.num_prompt_tokens - worker.num_cached_tokens - worker.max_kv_tokens)


def _is_full(request: WaitingRequest, worker: WorkerStatus) -> bool:
    return request.stage != "prefill" and not has_room(request, worker)  # a prefill worker has its sequences for a short time


def has_room(request: WaitingRequest, worker: WorkerStatus) -> bool:
    """Whether the group has room for the sequences, the KV and the expected output of the request."""
    num_tokens = worker.num_kv_tokens + worker.num_expected_tokens + request.num_prompt_tokens + request.num_expected_tokens
    return worker.num_sequences + request.num_choices <= worker.max_num_seqs and num_tokens <= worker.max_kv_tokens


_BUILT_IN: dict[str, RoutingPolicy] = {"cache_aware": cache_aware, "round_robin": round_robin}


class GuardedPolicy:
    """A policy that never ends the run: a request goes by `cache_aware` when `policy` raises, or returns no worker that it was given.
    `num_failures` counts these requests; the first one is logged."""

    def __init__(self, policy: RoutingPolicy) -> None:
        self._policy = policy
        self.num_failures = 0

    def __call__(self, request: WaitingRequest, workers: Sequence[WorkerStatus]) -> str | None:
        try:
            chosen = self._policy(request, tuple(workers))
            if chosen is None:
                return None
            if (name := next((worker.name for worker in workers if worker.name == chosen), None)) is not None:
                return name
            problem = f"returned {shown(chosen)}, expected None or one of {', '.join(worker.name for worker in workers)}"
        except Exception as error:
            place = place_of(error)
            problem = f"raised {error_text(error)}" + (f" ({place})" if place else "")
        if not self.num_failures:
            log.error("the routing policy %s; the request goes by cache_aware, and later failures are only counted", problem)
        self.num_failures += 1
        return cache_aware(request, workers)


def find_policy(name: str) -> RoutingPolicy:
    """The policy of this name (graph/file.py lists the known ones). Raises GraphError if its package cannot be imported."""
    if name in _BUILT_IN:
        return _BUILT_IN[name]
    found = next(iter(entry_points(group=ROUTING_ENTRY_POINTS, name=name)))
    try:
        policy: Any = found.load()
    except Exception as error:
        raise GraphError("", "routing", f"{name!r} cannot be loaded from {found.value}: {error_text(error)}") from error
    if not callable(policy):
        raise GraphError("", "routing", f"{name!r} is {shown(policy)} in {found.value}; a function is needed")
    return cast(RoutingPolicy, policy)
