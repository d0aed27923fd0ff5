"""Places requests in groups: queues what does not fit, moves requests of lost groups, and runs suspects one at a time. Pure.

There is one Placement for the groups, and one for the prefill workers, which are called groups here too (stages.py).
A request is placed when a group has room for it, the oldest first; until then it waits at the gateway. `SEQUENCES_AHEAD` lets a group
have the next sequences at hand when one of its own ends. A request that has waited for `lost_group_seconds` while no group is left is
given up.

A suspect is a request whose group crashed or hung while it ran there, so that it may be the cause. A group gets one suspect at a time, and
its engine computes each of its choices alone until it has committed a token (Request.is_suspect). A group that crashes meanwhile proves
that this request is the cause.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterable, Sequence

from flowrt.gateway.request_log import RequestLog
from flowrt.gateway.routing import GroupLoad, choose_group

SEQUENCES_AHEAD = 2  # sequences that a group is sent, in units of the most that it runs


class Placement:
    """`groups` are the names of the workers that take requests. `now` returns the time in seconds."""

    def __init__(self, groups: Iterable[str], max_num_seqs: int, lost_group_seconds: float, now: Callable[[], float]) -> None:
        self.loads = {group: GroupLoad() for group in groups}
        self._capacity = SEQUENCES_AHEAD * max_num_seqs
        self._lost_group_seconds, self._now = lost_group_seconds, now
        self._lost: dict[str, str] = {}  # group -> why
        self._restarting: set[str] = set()  # lost groups that a recovery policy restarts
        self._no_group_since = now()  # valid while no group is left
        self.waiting: list[RequestLog] = []  # the oldest first
        self._placed: dict[int, str] = {}  # number of a request -> its group
        self._interrupted: dict[str, RequestLog] = {}  # group that a policy restarts -> the suspect that it computed alone
        self._trials: dict[str, RequestLog] = {}  # group -> the suspect that runs there

    def deadline(self, waiting: Sequence[RequestLog]) -> float | None:
        """When the next of these requests is given up; None while a group is left."""
        if not waiting or not self.has_no_group:
            return None
        return min(max(log.waits_since, self._no_group_since) for log in waiting) + self._lost_group_seconds

    @property
    def has_no_group(self) -> bool:
        """Whether no group is left, and none is restarted on purpose."""
        return self._lost.keys() >= self.loads.keys() and not self._restarting

    def add(self, log: RequestLog) -> None:
        """Queue a request that has no group. `place_waiting` follows."""
        insort(self.waiting, log, key=lambda log: log.index)

    def remove(self, log: RequestLog) -> None:
        """Forget a request that ends or leaves its group. Its room is free for others."""
        if log in self.waiting:
            self.waiting.remove(log)
        if self.group_of(log) is not None:
            self._count(log, -1)
            self.end_trial(log)
            del self._placed[log.index]

    def group_of(self, log: RequestLog) -> str | None:
        """The group that the request is placed in."""
        return self._placed.get(log.index)

    def take_waiting(self) -> list[RequestLog]:
        """Forget the requests that wait, and return them."""
        waiting, self.waiting = self.waiting, []
        return waiting

    def place_waiting(self) -> list[RequestLog]:
        """Give a group to each waiting request that fits in one. Returns these requests; a request that fits nowhere lets none overtake
        it. Others pass a suspect that waits for the end of a trial alone."""
        placed = []
        for log in list(self.waiting):
            closed = self._closed_groups(log)
            group = choose_group(self.loads, closed | self._trials.keys() if log.is_suspect else closed)
            if group is not None:
                self.waiting.remove(log)
                self._placed[log.index] = group
                self._count(log, 1)
                if log.is_suspect:
                    self._trials[group] = log
                    log.unproven = {choice.index for choice in log.choices if choice.finish_reason is None}
                placed.append(log)
            elif closed >= self.loads.keys():
                break
        return placed

    def prove(self, log: RequestLog, choice: int) -> bool:
        """A choice of a suspect has committed a token or ended, so it was not the cause. Returns whether the trial is over."""
        log.ran_alone = False
        log.unproven.discard(choice)
        if log.unproven:
            return False
        log.is_suspect = False
        self.end_trial(log)
        return True

    def suspect(self, group: str, logs: Iterable[RequestLog]) -> RequestLog | None:
        """Handle a crash of the group with these requests. Returns the request that caused it, if one ran alone; else all are suspects."""
        if (trial := self._alone(group)) is not None:
            return trial
        for log in logs:
            log.is_suspect = True
        return None

    def alone_in(self, group: str) -> RequestLog | None:
        """The suspect that the group computes alone, or did when a policy ended it to restart it."""
        return self._alone(group) or self._interrupted.get(group)

    def _alone(self, group: str) -> RequestLog | None:
        trial = self._trials.get(group)
        return trial if trial is not None and trial.ran_alone else None

    def lose(self, group: str, why: str, *, is_restarting: bool = False) -> None:
        """Place no more requests in this group. `is_restarting`: a recovery policy restarts it."""
        if not self.has_no_group:
            self._no_group_since = self._now()
        if is_restarting:
            self._restarting.add(group)
            if (trial := self._alone(group)) is not None:
                self._interrupted[group] = trial
        self._lost[group] = why

    def give_up(self, group: str) -> None:
        """Wait for this group no longer than for any other lost one."""
        if not self.has_no_group:
            self._no_group_since = self._now()
        self._restarting.discard(group)

    def readmit(self, group: str) -> None:
        """Place requests in a lost group again. `place_waiting` follows."""
        self._lost.pop(group, None)
        self._interrupted.pop(group, None)
        self._restarting.discard(group)

    def expired(self, waiting: Sequence[RequestLog]) -> list[RequestLog]:
        """Those of these requests that are given up now."""
        if not self.has_no_group:
            return []
        latest = self._now() - self._lost_group_seconds
        return [log for log in waiting if max(log.waits_since, self._no_group_since) <= latest]

    def why_no_group(self) -> str:
        return "; ".join(["no attention group is left to serve the request", *(f"{group} {why}" for group, why in self._lost.items())])

    def _closed_groups(self, log: RequestLog) -> set[str]:
        """The groups that are lost or have no room for the request."""
        num_choices = len(log.choices)
        full = {group for group, load in self.loads.items() if load.num_sequences and load.num_sequences + num_choices > self._capacity}
        return full | self._lost.keys()

    def end_trial(self, log: RequestLog) -> None:
        """The request does not run alone in its group any more. No-op for one that did not."""
        log.ran_alone = False
        group = self.group_of(log)
        if group is not None and self._trials.get(group) is log:
            del self._trials[group]

    def _count(self, log: RequestLog, delta: int) -> None:
        group = self._placed[log.index]
        load, num_choices = self.loads[group], len(log.choices)
        num_tokens = len(log.prompt_token_ids) + num_choices * log.max_tokens
        self.loads[group] = GroupLoad(load.num_sequences + delta * num_choices, load.num_tokens + delta * num_tokens)
