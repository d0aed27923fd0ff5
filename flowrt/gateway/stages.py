"""The stages of a request: a prefill worker computes its prompt, then a group computes its tokens. Pure.

An attempt goes through both stages if there are prefill workers (xDeepServe section 5.1), else a group does all. While its group pulls the
KV of the prompt, a request is placed in both; the group may have it before the prompt is computed. When no prefill
worker is left, or a request's KV was lost MAX_KV_LOST times, the group computes the prompt itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from flowrt.actors.control import KvCompleted, KvOffer
from flowrt.gateway.request_log import RequestLog, Stage
from flowrt.gateway.router import Router
from flowrt.gateway.routing import GuardedPolicy, RoutingPolicy, WorkerStatus, cache_aware, find_policy
from flowrt.graph.model import Graph
from flowrt.graph.recovery import attention_groups, prefill_workers
from flowrt.graph.settings import GraphLimits, LongPrompts

MAX_KV_LOST = 2
FIRST_EXPECTED_TOKENS = 256  # of each choice, before a request has ended; most requests end long before their max_tokens
LATEST_WEIGHT = 1 / 16  # of the latest request in the mean length of outputs


class Stages:
    """`groups` and `prefill_workers` are names of workers, `limits_of` returns the limits of each; `now` returns the time in seconds.
    Requests wait for `lost_group_seconds` when no group is left, and a prefill worker holds a computed prompt for at most
    `kv_hold_seconds`."""

    def __init__(
        self,
        groups: Iterable[str],
        prefill_workers: Iterable[str],
        limits_of: Callable[[str], GraphLimits],
        now: Callable[[], float],
        routing: RoutingPolicy = cache_aware,
        long_prompts: LongPrompts | None = None,
        lost_group_seconds: float = 30.0,
        kv_hold_seconds: float = 600.0,
    ) -> None:
        prefill_workers = tuple(prefill_workers)
        of_prefill, of_groups = (long_prompts, None) if prefill_workers else (None, long_prompts)
        self._now, policy = now, GuardedPolicy(routing)
        self._policy = policy
        self._open: dict[int, RequestLog] = {}  # requests with an attempt, by number
        self._groups = Router(tuple(groups), limits_of, lost_group_seconds, now, policy, "all", of_groups)
        self._prefill = Router(prefill_workers, limits_of, lost_group_seconds, now, policy, "prefill", of_prefill)
        self._mean_output_tokens: float | None = None  # of choices of the latest requests
        self._kv_hold_seconds = kv_hold_seconds
        self._holds: dict[int, float] = {}  # number of a request whose prompt a worker holds -> when that ends; the earliest first

    @classmethod
    def of(cls, graph: Graph, now: Callable[[], float]) -> Stages:
        """The stages of a graph that serves a model."""
        names, settings = (attention_groups(graph), prefill_workers(graph)), graph.reliability
        seconds = settings.lost_group_seconds, settings.kv_hold_seconds
        return cls(*names, graph.limits_of, now, find_policy(graph.routing), graph.long_prompts, *seconds)

    def use(self, graph: Graph) -> list[str]:
        """Use the workers of another version of the graph. Returns those that leave, which `lose` follows for."""
        routers = (self._groups, attention_groups(graph)), (self._prefill, prefill_workers(graph))
        return [worker for router, names in routers for worker in router.use(names, graph)]

    @property
    def num_routing_failures(self) -> int:
        return self._policy.num_failures

    @property
    def workers(self) -> dict[str, WorkerStatus]:
        """The groups and the prefill workers, by name."""
        return self._groups.statuses() | self._prefill.statuses()

    @property
    def num_waiting(self) -> int:
        """Requests that wait for a prefill worker or a group."""
        return len(self._prefill.waiting) + len(self._groups.waiting)

    @property
    def deadline(self) -> float | None:
        """When the next request without a group is given up, or the next held prompt; None: none will be."""
        deadlines = (self._groups.deadline(self._without_group()), next(iter(self._holds.values()), None))
        return min((each for each in deadlines if each is not None), default=None)

    def _without_group(self) -> list[RequestLog]:
        """The requests that are in no group, be they in a prefill worker, while no group is left."""
        return [log for log in self._open.values() if self._groups.group_of(log) is None] if self._groups.has_no_group else []

    def queue(self, log: RequestLog) -> None:
        """Begin an attempt. `place_waiting` follows."""
        self._open[log.index] = log
        log.kv, log.kv_was_lost, log.prefill_worker = None, False, None
        if log.attempt == 0:  # a prefill worker that dies does not prolong the wait for a group
            log.waits_since = self._now()
        log.num_expected_tokens = min(log.max_tokens, math.ceil(self._mean_output_tokens or FIRST_EXPECTED_TOKENS))
        (self._groups if self._skips_prefill(log) else self._prefill).add(log)

    def place_waiting(self) -> list[tuple[str, RequestLog, Stage]]:
        """Place the requests that wait, as long as a worker has room. Returns these, with their workers and stages."""
        if self._prefill.has_no_group:
            for log in self._prefill.take_waiting():
                self._groups.add(log)
        found: list[tuple[str, RequestLog, Stage]] = []
        for log in self._prefill.place_waiting(self._is_held):
            log.prefill_worker = self._prefill.group_of(log) or ""
            found.append((log.prefill_worker, log, "prefill"))
        return found + [(self._groups.group_of(log) or "", log, "all") for log in self._groups.place_waiting(self._is_held)]

    def offer(self, log: RequestLog, kv: KvOffer) -> None:
        """The prefill worker offers the KV of the prompt. `place_waiting` follows."""
        if log.kv is None:
            self._groups.add(log)
        log.kv = kv

    def lose_kv(self, log: RequestLog, *, with_group: bool = False) -> bool:
        """The group has lost the KV that it pulled, or is lost itself. Returns whether another attempt begins now. One whose prompt is
        still computed stays in its prefill worker, which may end or crash for the same reason, or report which part crashed the group: it
        is to be blamed, not hidden by an attempt elsewhere."""
        log.num_kv_lost += not with_group
        log.kv_was_lost = self._stage(log) is self._prefill
        if log.kv_was_lost:
            self._groups.remove(log)
        return not log.kv_was_lost

    def complete(self, log: RequestLog, kv: KvOffer) -> tuple[str, KvCompleted] | None:
        """The prefill worker has computed the prompt and holds its KV. Returns the group that pulls it already, and the message for it.
        `place_waiting` follows."""
        self._prefill.note_token(log)
        log.runs_alone = False
        self._holds[log.index] = self._now() + self._kv_hold_seconds
        self.offer(log, kv)
        if (group := self.group_of(log)) is None:
            return None
        return group, KvCompleted(log.id, log.attempt, kv, tuple(log.token_ids))

    def pulled(self, log: RequestLog) -> None:
        """The group has the KV. The prefill worker has room for others: `place_waiting` follows."""
        self._holds.pop(log.index, None)
        self._prefill.remove(log)

    def remove(self, log: RequestLog) -> None:
        """Forget a request that has ended, or whose attempt has."""
        self._holds.pop(log.index, None)
        self._open.pop(log.index, None)
        if log.end is not None and log.end.finish_reason in ("stop", "length"):
            num_tokens = sum(len(choice.token_ids) for choice in log.choices) / len(log.choices)
            before = num_tokens if self._mean_output_tokens is None else self._mean_output_tokens
            self._mean_output_tokens = before + LATEST_WEIGHT * (num_tokens - before)
        self._prefill.remove(log)
        self._groups.remove(log)

    def workers_of(self, log: RequestLog) -> list[str]:
        """The workers in which the request is placed."""
        return [worker for worker in (self._prefill.group_of(log), self._groups.group_of(log)) if worker is not None]

    def worker_of(self, log: RequestLog) -> str | None:
        """The worker that computes the request now; None while it waits for one."""
        return self._stage(log).group_of(log)

    def group_of(self, log: RequestLog) -> str | None:
        """The group that has the request, be its prompt computed or not."""
        return self._groups.group_of(log)

    def sender_of(self, log: RequestLog, index: int) -> str | None:
        """The only worker whose token at this index of the output may be committed: the prefill worker of the attempt sends the first."""
        return log.prefill_worker if index == 0 and log.prefill_worker is not None else self._groups.group_of(log)

    def begun(self) -> list[RequestLog]:
        """The requests that a worker has or had."""
        return [log for log in self._open.values() if log.attempt > 0 or self.workers_of(log)]

    def _is_held(self, log: RequestLog) -> bool:
        """Whether the request has crashed a process alone, and a worker has another such request. Of several that prefill workers hold, as
        the crashes were told of later, the oldest goes on, so that none waits for one that waits for it."""

        def turn(log: RequestLog) -> tuple[bool, bool, int]:
            return self._groups.group_of(log) is None, not self.workers_of(log), log.index

        others = [other for other in self._open.values() if other.num_crashes > 0 and self.workers_of(other)] if log.num_crashes else []
        return any(turn(other) < turn(log) for other in others)

    def note_progress(self, log: RequestLog, choice: int) -> bool:
        """A choice has committed a token or ended. Returns whether another request may have a place for it: `place_waiting` follows."""
        stage = self._stage(log)
        log.runs_alone = False
        if log.is_suspect:
            stage.prove(log, choice)
        return stage.note_token(log)

    def lose(self, worker: str, why: str, *, is_restarting: bool = False) -> None:
        """Place no more requests in this worker. `is_restarting`: a recovery policy restarts it."""
        self._of(worker).lose(worker, why, is_restarting=is_restarting)

    def give_up(self, worker: str) -> None:
        """Wait for this worker no longer than for any other lost one."""
        self._of(worker).give_up(worker)

    def readmit(self, worker: str) -> None:
        """Place requests in a lost worker again. `place_waiting` follows."""
        self._of(worker).readmit(worker)

    def expired(self) -> list[RequestLog]:
        """The requests that are given up now."""
        return self._groups.expired(self._without_group())

    def overdue_holds(self) -> list[RequestLog]:
        """The requests whose prompts prefill workers have held for too long. Another attempt begins for each."""
        now = self._now()
        found = [self._open[index] for index, deadline in self._holds.items() if deadline <= now]
        for log in found:
            log.num_kv_lost += 1
        return found

    def why_no_group(self) -> str:
        return self._groups.why_no_group()

    def _skips_prefill(self, log: RequestLog) -> bool:
        return self._prefill.has_no_group or log.num_kv_lost >= MAX_KV_LOST

    def _stage(self, log: RequestLog) -> Router:
        is_prefilled = log.kv is not None and log.kv.is_complete
        return self._groups if log.prefill_worker is None or is_prefilled else self._prefill

    def _of(self, worker: str) -> Router:
        return self._prefill if worker in self._prefill.groups else self._groups
