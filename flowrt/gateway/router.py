"""Places requests in groups: queues what does not fit, and moves requests of lost groups. Pure.

There is one Router for the groups, and one for the prefill workers, which are called groups here too (stages.py).
A request is placed when the routing policy gives it a group (routing.py), the oldest first; until then it waits at the gateway. A group has
the next sequences at hand when one of its own ends (`max_sequences_at`); no policy gives it more. A request that has waited
for `lost_group_seconds` while no group is left is given up.

A suspect is a request whose group crashed or hung while it ran there, so that it may be the cause. Its next group replays its committed
tokens beside others, as an earlier group has computed them, and then computes each of its choices alone until it has committed a token
(Request.is_suspect), which the group reports before it begins. A process that crashes meanwhile counts: one that has crashed a process
alone is placed while no other such request is, and ends at the second one. So a request that runs alone in its group while another one
crashes a server is not taken for the cause. If a group crashes while no request runs alone, its suspects replay alone, too.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from flowrt.gateway.prefix_index import PrefixIndex, digests_of
from flowrt.gateway.request_log import RequestLog
from flowrt.gateway.routing import RoutingPolicy, WaitingRequest, WorkerStatus, has_room
from flowrt.graph.model import Graph
from flowrt.graph.settings import GraphLimits, LongPrompts

LOOKAHEAD = 64  # requests that the policy lets wait before no later one is considered


def max_sequences_at(max_num_seqs: int, num_groups: int) -> int:
    """Sequences that a group is sent. One of several gets few more than it runs: another group may have a place for them sooner."""
    return 2 * max_num_seqs if num_groups == 1 else max_num_seqs + max(1, max_num_seqs // 8)


@dataclass(slots=True)
class _PlacedRequest:
    """A request in a group. `num_uncomputed`: tokens of its prompt that the group has still to compute, until its next token."""

    log: RequestLog
    group: str
    num_uncomputed: int


class Router:
    """`groups` are the names of the workers that take requests, `limits_of` returns those of each. `now` returns the time in seconds."""

    def __init__(
        self,
        groups: Iterable[str],
        limits_of: Callable[[str], GraphLimits],
        lost_group_seconds: float,
        now: Callable[[], float],
        policy: RoutingPolicy,
        stage: Literal["all", "prefill"],
        long_prompts: LongPrompts | None = None,
    ) -> None:
        self._min_long_tokens = 0 if long_prompts is None else long_prompts.min_tokens
        self._num_for_long = 0 if long_prompts is None else long_prompts.workers
        self._policy, self._stage = policy, stage
        self._prefixes: PrefixIndex | None = None
        self._leaving = frozenset[str]()
        self._set_groups(groups, limits_of)
        self._num_placed, self._last_placed = Counter[str](), Counter[str]()
        self._lost_group_seconds, self._now = lost_group_seconds, now
        self._lost: dict[str, str] = {}  # group -> why
        self._restarting: set[str] = set()  # lost groups that a recovery policy restarts
        self._no_group_since: float | None = None  # while no group is left, and none is restarted on purpose
        self.waiting: list[RequestLog] = []  # the oldest first
        self._placed: dict[int, _PlacedRequest] = {}  # by the number of the request
        self._note_groups()

    def _set_groups(self, groups: Iterable[str], limits_of: Callable[[str], GraphLimits]) -> None:
        self.groups = tuple(groups)
        staying = [group for group in self.groups if group not in self._leaving]
        self._for_long = frozenset(staying[-self._num_for_long :] if self._num_for_long else ())
        limits = {group: limits_of(group) for group in self.groups}
        self._idle = {
            group: WorkerStatus(group, each.max_num_seqs, each.max_num_batched_tokens, each.kv_pages * each.page_size)
            for group, each in limits.items()
        }
        cached = {group: self._idle[group].max_kv_tokens if each.enable_prefix_caching else 0 for group, each in limits.items()}
        self._prefixes = PrefixIndex(cached, self._prefixes) if len(cached) > 1 and any(cached.values()) else None

    def use(self, groups: Collection[str], graph: Graph) -> list[str]:
        """Use these groups of a graph. A new one counts as lost until `readmit`. Returns those that leave now, which `lose` follows for."""
        before, self._leaving = self.groups, frozenset(graph.leaving).intersection(groups)
        self._set_groups(groups, graph.limits_of)
        for group in self.groups:
            if group not in before:
                self._mark_lost(group, "has not joined yet")
        for known in (self._lost, self._num_placed, self._last_placed):
            for group in known.keys() - self._idle.keys():
                del known[group]
        self._restarting &= self._idle.keys()
        self._note_groups()
        return sorted(self._leaving - self._lost.keys())

    def deadline(self, waiting: Sequence[RequestLog]) -> float | None:
        """When the next of these requests is given up; None while a group is left."""
        if not waiting or self._no_group_since is None:
            return None
        return min(max(log.waits_since, self._no_group_since) for log in waiting) + self._lost_group_seconds

    @property
    def has_no_group(self) -> bool:
        """Whether no group is left, and none is restarted on purpose."""
        return self._no_group_since is not None

    def _note_groups(self) -> None:
        """Call this after each change of what groups there are, which are lost and which are restarted."""
        if self._restarting or not self._lost.keys() >= self._idle.keys():
            self._no_group_since = None
        elif self._no_group_since is None:
            self._no_group_since = self._now()

    def add(self, log: RequestLog) -> None:
        """Queue a request that has no group. `place_waiting` follows."""
        insort(self.waiting, log, key=lambda log: log.index)

    def remove(self, log: RequestLog) -> None:
        """Forget a request that ends or leaves its group. Its room is free for others."""
        if log in self.waiting:
            self.waiting.remove(log)
        self._placed.pop(log.index, None)

    def group_of(self, log: RequestLog) -> str | None:
        """The group that the request is placed in."""
        placed = self._placed.get(log.index)
        return None if placed is None else placed.group

    def take_waiting(self) -> list[RequestLog]:
        """Forget the requests that wait, and return them."""
        waiting, self.waiting = self.waiting, []
        return waiting

    def place_waiting(self, is_held: Callable[[RequestLog], bool]) -> list[RequestLog]:
        """Give a group to each waiting request for which the policy has one. Returns these requests. A request that fits nowhere lets none
        overtake it. Others pass a request that the policy lets wait for a group, that waits for a group for long or short prompts, or that
        `is_held`."""
        placed: list[RequestLog] = []
        num_left = 0
        statuses = self.statuses() if self.waiting else {}
        for log in list(self.waiting):
            open_groups = self._open_groups(log, statuses)
            if num_left == LOOKAHEAD or not (open_groups or self._for_long):
                break
            if not open_groups or is_held(log):
                continue
            workers, request = [self._with_cached(statuses[group], log) for group in open_groups], self._request(log)
            if log.kv is not None and not log.kv.is_complete:  # no group keeps it in its queue before it can be computed
                workers = [worker for worker in workers if has_room(request, worker)]
            group = self._policy(request, workers) if workers else None
            if group is None:
                num_left += 1
                continue
            self._place(log, next(worker for worker in workers if worker.name == group))
            statuses[group] = self._status(group)
            placed.append(log)
        return placed

    def _place(self, log: RequestLog, worker: WorkerStatus) -> None:
        self.waiting.remove(log)
        num_uncomputed = 0 if log.kv is not None else len(log.prompt_token_ids) - worker.num_cached_tokens
        self._placed[log.index] = _PlacedRequest(log, worker.name, num_uncomputed)
        self._num_placed[worker.name] += 1
        self._last_placed[worker.name] = max(self._last_placed.values(), default=0) + 1
        if self._prefixes is not None:
            self._prefixes.add(worker.name, self._digests(log))
        if log.attempt > log.placed_attempt:  # what has crashed over the attempt before is known by now
            log.placed_attempt, log.runs_alone = log.attempt, False
        if log.is_suspect:
            log.unproven = {choice.index for choice in log.choices if choice.finish_reason is None}

    def note_token(self, log: RequestLog) -> bool:
        """A group has computed the prompt of the request. Returns whether another one waits, which it may get now."""
        placed = self._placed.get(log.index)
        if placed is None or not placed.num_uncomputed:
            return False
        placed.num_uncomputed = 0
        return bool(self.waiting)

    def prove(self, log: RequestLog, choice: int) -> None:
        """A choice of a suspect has committed a token or ended, so it was not the cause."""
        if choice in log.unproven:
            log.unproven.remove(choice)
            if not log.unproven:
                log.is_suspect = log.replays_alone = False
                log.num_crashes = 0

    def lose(self, group: str, why: str, *, is_restarting: bool = False) -> None:
        """Place no more requests in this group. `is_restarting`: a recovery policy restarts it."""
        if is_restarting:
            self._restarting.add(group)
        self._mark_lost(group, why)
        self._note_groups()

    def _mark_lost(self, group: str, why: str) -> None:
        self._lost[group] = why
        if self._prefixes is not None:
            self._prefixes.clear(group)

    def give_up(self, group: str) -> None:
        """Wait for this group no longer than for any other lost one."""
        self._restarting.discard(group)
        self._note_groups()

    def readmit(self, group: str) -> None:
        """Place requests in a lost group again, unless it leaves. `place_waiting` follows."""
        if group in self._leaving:
            return
        self._lost.pop(group, None)
        self._num_placed.clear()
        self._restarting.discard(group)
        self._note_groups()

    def expired(self, waiting: Sequence[RequestLog]) -> list[RequestLog]:
        """Those of these requests that are given up now."""
        if self._no_group_since is None:
            return []
        latest = self._now() - self._lost_group_seconds
        return [log for log in waiting if max(log.waits_since, self._no_group_since) <= latest]

    def why_no_group(self) -> str:
        return "; ".join(["no attention group is left to serve the request", *(f"{group} {why}" for group, why in self._lost.items())])

    def _open_groups(self, log: RequestLog, statuses: dict[str, WorkerStatus]) -> list[str]:
        """The groups that are up and have room for the request."""
        num_more = self._num_sequences(log)
        roomy = [
            name
            for name, status in statuses.items()
            if not status.num_sequences or status.num_sequences + num_more <= max_sequences_at(status.max_num_seqs, len(statuses))
        ]
        meant = self._meant_for(log)
        return [name for name in roomy if name not in self._lost and name in meant]

    def _meant_for(self, log: RequestLog) -> Collection[str]:
        """The groups for prompts of this length; all while those are lost."""
        if not self._for_long:
            return self._idle
        is_long = len(log.prompt_token_ids) >= self._min_long_tokens
        meant = [name for name in self.groups if (name in self._for_long) is is_long]
        return self._idle if self._lost.keys() >= {*meant} else meant

    def _request(self, log: RequestLog) -> WaitingRequest:
        num_choices = len(log.choices)
        stage: Literal["all", "prefill", "decode"] = self._stage if log.kv is None else "decode"
        return WaitingRequest(stage, len(log.prompt_token_ids), num_choices, num_choices * log.num_expected_tokens)

    def _num_sequences(self, log: RequestLog) -> int:
        return 1 if self._stage == "prefill" else len(log.choices)  # all choices share the rows of the prompt

    def statuses(self) -> dict[str, WorkerStatus]:
        """What the groups have now, by name."""
        return {group: self._status(group) for group in self.groups}

    def _status(self, group: str) -> WorkerStatus:
        here = [placed for placed in self._placed.values() if placed.group == group]
        num_output = sum(len(choice.token_ids) for placed in here for choice in placed.log.choices)
        return replace(
            self._idle[group],
            num_placed=self._num_placed[group],
            last_placed=self._last_placed[group],
            num_held_tokens=0 if self._prefixes is None else self._prefixes.num_held_tokens(group),
            num_sequences=sum(self._num_sequences(placed.log) for placed in here),
            num_uncomputed_tokens=sum(placed.num_uncomputed for placed in here),
            num_kv_tokens=sum(len(placed.log.prompt_token_ids) for placed in here) + num_output,
            num_expected_tokens=sum(placed.log.num_expected_now for placed in here),
        )

    def _with_cached(self, status: WorkerStatus, log: RequestLog) -> WorkerStatus:
        if self._prefixes is None:
            return status
        return replace(status, num_cached_tokens=self._prefixes.num_cached_tokens(status.name, self._digests(log)))

    def _digests(self, log: RequestLog) -> tuple[bytes, ...]:
        if log.prefix_digests is None:
            log.prefix_digests = digests_of(log.params.cache_salt, log.prompt_token_ids)
        return log.prefix_digests
