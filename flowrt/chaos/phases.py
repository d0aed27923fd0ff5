"""Observes what a process does in a running graph: it starts, prefills, decodes, idles, replays moved requests, or drains."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from flowrt.api import RunningGraph
from flowrt.chaos.cells import Phase
from flowrt.chaos.compare import Move, ReceivedAnswer
from flowrt.gateway.gateway import Gateway
from flowrt.gateway.request_log import RequestLog
from flowrt.graph.model import FORK_SERVER
from flowrt.launcher import events
from flowrt.launcher.run_table import ProcessPhase
from flowrt.seams import Clock

POLL_SECONDS, WAIT_SECONDS = 1e-3, 5.0  # for a phase: if it does not come, the fault is injected all the same
START_SECONDS = 60.0  # the same for a start, which may wait for the restart budget


class Phases:
    """`answers`: those that the load receives. Call `on_event` with each event, after the graph itself."""

    def __init__(self, running: RunningGraph, clock: Clock, answers: Callable[[], Iterable[ReceivedAnswer]]) -> None:
        self._running, self._clock, self._answers = running, clock, answers
        self._num_at_move: dict[str, int] = {}  # request id -> tokens that its latest attempt replays
        self._num_moves: dict[int, int] = {}  # by request
        self.is_draining = False

    def phase_of(self, process: str) -> Phase | None:
        """The phase of the process, or of all groups together for a process that serves several. None: it is down."""
        state = self._running.launcher.state
        if process != FORK_SERVER and not state.is_usable(process):
            return "start" if state.table.workers[process].process.phase == ProcessPhase.STARTING else None
        if self.is_draining:
            return "drain"
        logs = self._logs(process)
        if not logs:
            return "idle"
        if any(num_tokens(log) == self._num_at_move.get(log.id) for log in logs):
            return "replay"
        return "decode" if all(map(num_tokens, logs)) else "prefill"

    async def wait(self, process: str, phase: Phase) -> None:
        """Wait until the process is in this phase, for a limited time."""
        await self._poll(lambda: self.phase_of(process) == phase, START_SECONDS if phase == "start" else WAIT_SECONDS)

    async def wait_cleared(self) -> None:
        """Wait until no request is a suspect: a group that hangs again while a suspect runs alone there proves that it is the cause."""
        await self._poll(lambda: not any(log.is_suspect for log in self._gateway.active_logs()), START_SECONDS)

    async def _poll(self, condition: Callable[[], bool], seconds: float) -> None:
        until = self._clock.now() + seconds
        while not condition() and self._clock.now() < until:
            await self._clock.sleep(POLL_SECONDS)

    def on_event(self, event: events.Event) -> None:
        """Record which requests a lost group's death moves."""
        if not isinstance(event, events.WorkerLost):
            return
        now = self._clock.now()
        answers = {answer.index: answer for answer in self._answers() if answer.index >= 0 and answer.finish_reason is None}
        for log in self._gateway.active_logs():
            num_moves = log.attempt - log.num_kv_lost  # a KV transfer that failed begins an attempt, too
            if num_moves > self._num_moves.get(log.index, 0):
                self._num_moves[log.index] = num_moves
                self._num_at_move[log.id] = num_tokens(log)
                if log.index in answers:
                    answers[log.index].moves.append(Move(now, event.name, max((len(each.token_ids) for each in log.choices), default=0)))

    def _logs(self, process: str) -> list[RequestLog]:
        logs = self._gateway.active_logs()
        return [log for log in logs if process in self._gateway.groups_of(log.index)] if process in self._gateway.workers else logs

    @property
    def _gateway(self) -> Gateway:
        return self._running.run.require_requests().gateway


def num_tokens(log: RequestLog) -> int:
    return sum(len(choice.token_ids) for choice in log.choices)
