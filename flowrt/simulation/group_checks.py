"""Checks how a run treats the requests of groups that die: whose tokens count, and which requests may end for a lost group (I2, I5)."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence

from flowrt.actors.control import Control, KvCompleted, KvLost, KvPulled, Submit, Tokens
from flowrt.actors.outputs import TokenEvent
from flowrt.gateway.request_log import RequestLog, Stage
from flowrt.gateway.router import max_sequences_at
from flowrt.graph.model import GATEWAY, Graph
from flowrt.graph.recovery import attention_groups, prefill_workers
from flowrt.launcher import events
from flowrt.launcher.deaths import FENCE_SECONDS
from flowrt.simulation.errors import InvariantError
from flowrt.simulation.faults import Faults
from flowrt.simulation.inside import WorkerInternals
from flowrt.simulation.outages import Outages
from flowrt.simulation.world import SimulatedProcess, World

LATE_SECONDS = 1.0  # a request that has waited too long for a group ends this much later at most


class GroupChecks:
    """Checks one run. `inside_of` returns the latest worker of a name, `log_of` the log of a request that the gateway keeps."""

    def __init__(
        self,
        world: World,
        graph: Graph,
        inside_of: Callable[[str], WorkerInternals | None],
        log_of: Callable[[str], RequestLog | None],
        faults: Faults,
    ) -> None:
        self._world, self._graph, self._groups, self._faults = world, graph, frozenset(attention_groups(graph)), faults
        self._workers = self._groups | {*prefill_workers(graph)}
        self._former = self._groups, self._workers  # of the version before: what was placed then may be sent now
        self._lost_group_seconds = graph.reliability.lost_group_seconds
        self._inside_of, self._log_of = inside_of, log_of
        self._outages = Outages({GATEWAY: frozenset({self._groups})})  # while no group lives, and none is restarted by a policy
        self._known = Outages({GATEWAY: frozenset({self._groups})})  # as announced, and no group is restarted by a policy
        self._placed: dict[tuple[str, Stage], tuple[str, int]] = {}  # request and stage -> worker and attempt whose tokens count
        self._attempts: dict[tuple[str, Stage], int] = {}  # request and stage -> its latest attempt
        self._wrong: list[InvariantError] = []
        self._died: dict[str, float] = {}  # groups: when
        self._began: dict[str, float] = {}  # open requests: when they were placed
        self.no_group_seconds: dict[str, float] = {}  # of requests that have ended: for how long, at most, no group was left
        self.crashes_alone = defaultdict[str, set[str]](set)  # request -> processes that crashed or hung while a group computed it alone
        world.deaths.append(self._on_death)

    def on_event(self, event: events.Event) -> None:
        """Call this before the gateway handles the event."""
        now = self._world.loop.time()
        if isinstance(event, events.WorkerLost | events.WorkerMarkedDead):
            hangs = isinstance(event, events.WorkerMarkedDead) and event.may_recur  # perhaps its heartbeats are late on a slow link
            self._note_alone(self._world.processes.get(event.name), hangs)
        match event:
            case events.GraphVersion(graph, joining):
                self._use(graph, joining, now)
            case events.WorkerJoined(name) if name in self._groups:
                for outages in (self._outages, self._known):
                    outages.up(GATEWAY, name, now)
            case events.WorkerLost(name, while_loading=False) | events.WorkerMarkedDead(name, is_killed=False) if name in self._workers:
                self._placed = {key: placed for key, placed in self._placed.items() if placed[0] != name}
                unread = self._world.processes[name].num_unread()
                if isinstance(event, events.WorkerLost) and unread and now < self._died.get(name, -math.inf) + FENCE_SECONDS:
                    self._wrong.append(InvariantError("I2", f"the loss of {name} was announced, and {unread} messages of it were not read"))
                if name not in self._groups:
                    return
                if isinstance(event, events.WorkerLost) and event.is_restarting:
                    self._outages.up(GATEWAY, name, now)
                else:
                    self._outages.down(name, now)
                    self._known.down(name, now)
            case events.WorkerGivenUp(name) if name in self._groups:
                for outages in (self._outages, self._known):
                    outages.down(name, now)
            case events.WorkerRestarted(name) | events.WorkerCleared(name) if name in self._groups:
                for outages in (self._outages, self._known):
                    outages.up(GATEWAY, name, now)

    def _use(self, graph: Graph, joining: Sequence[str], now: float) -> None:
        """A group that is leaving has no request any more, and one that is new has none yet."""
        self._former = self._groups, self._workers
        self._graph, self._groups = graph, frozenset(attention_groups(graph))
        self._workers = self._groups | {*prefill_workers(graph)}
        self._placed = {key: placed for key, placed in self._placed.items() if placed[0] not in graph.leaving}
        for outages in (self._outages, self._known):
            for name in self._groups.intersection(joining):
                outages.down(name, now)
            outages.place({GATEWAY: frozenset({self._groups - {*graph.leaving}})}, now)

    def on_submit(self, group: str, control: Submit) -> None:
        """Check that each attempt is sent once, with all committed tokens, and only to a group that has room (I2, I6). `look` raises: the
        gateway ignores the errors of a send."""
        request = control.request
        key = (request.id, request.stage)
        if group in self._graph.leaving or group not in self._workers:
            self._wrong.append(InvariantError("I2", f"{request.id} is sent to {group}, which leaves the graph"))
        if request.attempt <= self._attempts.get(key, -1):
            self._wrong.append(InvariantError("I2", f"attempt {request.attempt} of {request.id} is sent to {group}, and was sent before"))
        is_early = request.kv is not None and not request.kv.is_complete  # on_completed checks its tokens
        counts, committed = [*map(len, request.committed_token_ids)], self._committed(request.id)
        if counts != committed and (request.attempt or request.kv or any(committed)) and not is_early:
            self._wrong.append(InvariantError("I2", f"{request.id} is sent to {group} without its committed tokens"))
        if request.stage == "prefill":
            self._placed.pop((request.id, "all"), None)
        self._placed[key], self._attempts[key] = (group, request.attempt), request.attempt
        self._world.num_faults["KV transfer"] += request.kv is not None
        logs = [(self._log_of(name), attempt) for (name, _), (place, attempt) in self._placed.items() if place == group]
        here = [log for log, attempt in logs if log is not None and log.end is None and log.attempt == attempt]  # older ones were cancelled
        versions = (self._groups, self._workers), self._former
        num_alike = min(len(groups if group in groups else workers - groups) for groups, workers in versions if group in workers)
        room = max_sequences_at(self._graph.limits_of(group).max_num_seqs, num_alike)
        if len(here) > 1 and (count := sum(len(log.choices) if group in self._groups else 1 for log in here)) > room:
            self._wrong.append(InvariantError("I6", f"{count} sequences are at {group}, which has room for {room}"))

    def on_completed(self, group: str, control: KvCompleted) -> None:
        """Check that a group gets all committed tokens with the offer that it pulls (I2). What waited for room in a group that stood still
        may be of an attempt that has moved since: the group drops it."""
        if self._placed.get((control.request_id, "all")) != (group, control.attempt):
            return
        if (committed := self._committed(control.request_id)) and committed != [len(control.committed_token_ids)]:
            self._wrong.append(InvariantError("I2", f"the KV of {control.request_id} is completed in {group} without its committed tokens"))

    def tokens_before(self, control: Control) -> dict[str, list[int]]:
        """For `check_tokens`: the committed tokens of the requests of a message."""
        return {name: self._committed(name) for name, _ in _tokens_of(control)}

    def check_tokens(self, worker: str, control: Control, before: dict[str, list[int]]) -> None:
        """Check that KV arrives as it was sent, and that the message has changed no request but of the worker and attempt that have it
        (I2): the first token of a choice comes from the prefill worker if there is one, the others from the group."""
        if isinstance(control, KvPulled) and self._placed.get((control.request_id, "all")) == (worker, control.attempt):
            self._placed.pop((control.request_id, "prefill"), None)  # it may have others in its place
        if isinstance(control, KvLost) and "does not fit" in control.why:  # no fault of the simulation changes a chunk
            raise InvariantError("I2", f"{worker} lost the KV of {control.request_id}: {control.why}")
        if isinstance(control, KvLost) and self._placed.get((control.request_id, "all")) == (worker, control.attempt):
            self._placed.pop((control.request_id, "all"))  # its prompt may still be computed under this attempt
        for name, tokens in _tokens_of(control):
            stage: Stage = "prefill" if tokens.index == 0 and self._attempts.get((name, "prefill")) == tokens.attempt else "all"
            placed = self._placed.get((name, stage))
            if placed != (worker, tokens.attempt) and self._committed(name) != before[name]:
                which = f"attempt {tokens.attempt} of {name} at {worker}"
                raise InvariantError("I2", f"a token of {which} was committed, which has {placed or 'no group'}")

    def open(self, request_id: str) -> None:
        self._began[request_id] = self._world.loop.time()

    def look(self, is_open: Callable[[str], bool]) -> None:
        """Note the requests that have ended, and check that none waits too long for a group (I5)."""
        if self._wrong:
            raise self._wrong[0]
        if not self._began:
            return
        now = self._world.loop.time()
        lost_since = next((begin for begin, end in self._known.intervals(GATEWAY, now)[-1:] if end == now), now)
        for request_id, began in list(self._began.items()):
            if not is_open(request_id):
                before = self.no_group_seconds.get(request_id, 0.0)  # a client that comes back opens it once more
                self.no_group_seconds[request_id] = max(before, self._outages.longest(GATEWAY, began, now))
                del self._began[request_id]
            elif (log := self._log_of(request_id)) is not None and not log.prompt_token_ids:
                self._began[request_id] = now  # a request without a prompt yet waits for its client
            elif now - max(began, lost_since) > self._lost_group_seconds + LATE_SECONDS and not self._faults.has_met(GATEWAY):
                raise InvariantError("I5", f"{request_id} still waits for a group, and none is left since {lost_since:.6f} s")

    def _on_death(self, process: SimulatedProcess) -> None:
        """Called at the moment of the death, before any other process is notified."""
        now = self._world.loop.time()
        for name in sorted(self._workers):
            if self._world.processes.get(name) is process:
                if name in self._groups:
                    self._outages.down(name, now)
                self._died[name] = now
        self._note_alone(process)

    def _note_alone(self, process: SimulatedProcess | None, may_recur: bool = False) -> None:
        """Note the requests that groups compute alone when this process dies, and when it is known to have died. `may_recur`: it counts as
        one that hangs over what it computes, whatever fault has hit it."""
        names = [name for name, each in self._world.processes.items() if each is process]
        if process is not None and (may_recur or any(map(self._faults.may_recur, names))):
            for group in sorted(self._workers):
                if (inside := self._inside_of(group)) is not None and (request_id := inside.alone()) is not None:
                    self.crashes_alone[request_id].add(process.node)

    def _committed(self, request_id: str) -> list[int]:
        """The number of committed tokens of each choice; none when the log is gone."""
        log = self._log_of(request_id)
        return [len(choice.token_ids) for choice in log.choices] if log is not None else []


def _tokens_of(control: Control) -> list[tuple[str, TokenEvent]]:
    """The tokens of a message, each with the id of their request."""
    return [(f"request-{tokens.request}", tokens) for tokens in control.tokens] if isinstance(control, Tokens) else []
