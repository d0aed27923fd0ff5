"""The detector: who is alive, suspect or dead, from what was heard of whom and when.

Here: Detector, a state machine per process and life (incarnation): events in, decisions out. Not here: who hears and who carries out
(flowrt/workers/monitor.py, flowrt/cluster), how a worker measures itself (flowrt/actors/beats.py). Pure: the clock is an argument.

    joined, first beat            no beat for suspect_seconds,         no beat for dead_seconds,
          |                       a client reports it late             an operation beyond its bound
          v                                 |                                    |
        alive ----------------------------> suspect ---------------------------> dead      (also alive -> dead)
          ^                                 |                                    |
          +------ beats, nobody complains --+        a new incarnation joins     |
          +----------------------------------------------------------------------+

A process that beats in time is not dead, however slow it is. A dead life stays dead: what it says later is ignored and counted; only
a new incarnation is alive again. Who judges may be the slow one, so silence counts only as far as it can be trusted (see `_silence`).
"""

from __future__ import annotations

import enum
import math
from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

LAG_SECONDS = 0.025  # a loop this late has done nothing but its work
LAG_MEMORY_SECONDS = 10.0  # for so long a lag of the observer stretches its time-outs
DISTRUST_SECONDS = 2.0  # when nearly all fall silent at once: the observer takes it for its own fault, but no longer than this
DISTRUST_SHARE = 0.8
STARVED_SECONDS = 2.0  # so much of a silence, at most, is forgiven for standing in line for a processor
REPORT_SECONDS = 2.0  # for so long a client's complaint keeps a process suspect
MOST_PAST_LIVES = 64  # remembered per process


class State(enum.Enum):
    ALIVE = "alive"
    SUSPECT = "suspect"
    DEAD = "dead"


@dataclass(frozen=True)
class Suspected:
    """This life gives little sign of work. Nothing follows from it but a line for people."""

    process: str
    incarnation: str
    why: str


@dataclass(frozen=True)
class Cleared:
    """It was suspect, and is not any more."""

    process: str
    incarnation: str
    why: str


@dataclass(frozen=True)
class Condemned:
    """This life is dead, or to be treated so. Said once per life."""

    process: str
    incarnation: str
    why: str


Decision = Suspected | Cleared | Condemned


@dataclass(frozen=True)
class Timeouts:
    suspect_seconds: float = 0.4
    dead_seconds: float = 1.0


@dataclass
class Life:
    """The latest life of a process, as far as it is known."""

    incarnation: str
    heard_at: float
    state: State = State.ALIVE
    why: str = ""  # it is suspect or dead
    sequence: int = -1
    starved_seconds: float = 0.0  # of its silence, spent in line for a processor
    reported_until: float = -math.inf
    past: deque[str] = field(default_factory=lambda: deque(maxlen=MOST_PAST_LIVES))  # earlier incarnations


class Detector:
    """One observer. Call its events in the order of their times; carry out what they return.

    `num_ignored` counts the words of lives that are over or unknown, and repeated ones.
    """

    def __init__(self, timeouts: Timeouts | None = None) -> None:
        self._timeouts = timeouts or Timeouts()
        self._lives: dict[str, Life] = {}
        self._lags: deque[tuple[float, float]] = deque()  # the observer's own: (when, how late)
        self._path_at: float | None = None  # when whoever passes the beats on last gave a sign of its own; None: it never does
        self._starved: frozenset[str] = frozenset()
        self._looked_at = math.inf
        self._distrust_began: float | None = None
        self._distrust_until = -math.inf
        self.num_ignored = 0

    @property
    def lives(self) -> Mapping[str, Life]:
        """By process; to be looked at only."""
        return self._lives

    # --- what is heard of a process ---------------------------------------------------------------------------------------

    def joined(self, now: float, process: str, incarnation: str) -> None:
        """A new life works from now on. Idempotent; a life that is over stays over."""
        life = self._lives.get(process)
        if life is None or (life.incarnation != incarnation and incarnation not in life.past):
            self._begin(now, process, incarnation)

    def left(self, now: float, process: str, incarnation: str) -> None:
        """That life is over, as others have found: nothing is decided any more. Idempotent."""
        life = self._lives.get(process)
        if life is None:
            life = self._begin(now, process, incarnation)
        if life.incarnation == incarnation:
            life.state, life.why = State.DEAD, life.why or "it has left"
        elif incarnation not in life.past:
            life.past.append(incarnation)

    def beat(
        self,
        now: float,
        process: str,
        incarnation: str,
        sequence: int,
        running: str | None = None,
        running_seconds: float = 0.0,
        bound_seconds: float = 0.0,
    ) -> list[Decision]:
        """Its loop turns. `running`: what it computes, for how long it has, and at most should (0: no bound is declared)."""
        life = self._lives.get(process)
        if life is None or (life.state is State.DEAD and incarnation != life.incarnation and incarnation not in life.past):
            life = self._begin(now, process, incarnation)  # an observer that was started later learns who there is
        if incarnation != life.incarnation or life.state is State.DEAD or sequence <= life.sequence:
            self.num_ignored += 1
            return []
        life.heard_at, life.sequence, life.starved_seconds = now, sequence, 0.0
        if running is not None and 0 < bound_seconds < running_seconds:
            return [self._condemn(process, life, f"{running} has run {running_seconds:.2f} s, its bound is {bound_seconds:.2f} s")]
        if life.state is State.SUSPECT and now >= life.reported_until:
            return [self._clear(process, life)]
        return []

    def reported(
        self, now: float, process: str, incarnation: str, by: str, waited_seconds: float, expected_seconds: float
    ) -> list[Decision]:
        """A client waits longer than it should. That is a reason to look, and to ask another one; never to kill."""
        life = self._lives.get(process)
        if life is None or incarnation != life.incarnation or life.state is State.DEAD:
            self.num_ignored += 1
            return []
        life.reported_until = now + REPORT_SECONDS
        if life.state is State.SUSPECT:
            return []
        return [self._suspect(process, life, f"{by} has waited {waited_seconds:.2f} s for it, {expected_seconds:.2f} s is usual")]

    def starved(self, now: float, processes: Collection[str]) -> None:
        """From now on these, and no others, are seen to stand in line for a processor: slow, which is neither stopped nor hung.

        The time from look to look is taken off the silence of those who stood there at the first of the two, whatever befalls them
        next: who is stopped for a moment after two seconds in line has been silent for that moment.
        """
        for process in self._starved & self._lives.keys():
            self._lives[process].starved_seconds += max(0.0, now - self._looked_at)
        self._starved, self._looked_at = frozenset(processes), now

    # --- time, and the observer itself ----------------------------------------------------------------------------------

    def tick(self, now: float, lag_seconds: float = 0.0) -> list[Decision]:
        """Time has passed; the observer's own loop was this late. To be called several times per suspect_seconds."""
        self._note_lag(now, lag_seconds)
        return self._judge(now)

    def path_beat(self, now: float, lag_seconds: float) -> list[Decision]:
        """Whoever passes the beats on gave a sign of its own. From its first one on, silence counts only up to its latest: before the
        next nobody can tell a process that is silent from one that is not passed on."""
        self._path_at = now
        self._note_lag(now, lag_seconds)
        return self._judge(now)

    def stretch(self, now: float) -> float:
        """By how much time-outs are longer now: the observer's worst lag of late, at most dead_seconds."""
        while self._lags and self._lags[0][0] <= now - LAG_MEMORY_SECONDS:
            self._lags.popleft()
        return min(max((lag for _, lag in self._lags), default=0.0), self._timeouts.dead_seconds)

    # --- inside ---------------------------------------------------------------------------------------------------------

    def _judge(self, now: float) -> list[Decision]:
        stretch = self.stretch(now)
        suspect_seconds, dead_seconds = self._timeouts.suspect_seconds + stretch, self._timeouts.dead_seconds + stretch
        judged = [(process, life, self._silence(now, life)) for process, life in self._lives.items() if life.state is not State.DEAD]
        self._weigh_own_fault(now, sum(silence > suspect_seconds for _, _, silence in judged), len(judged))
        decisions: list[Decision] = []
        for process, life, silence in judged:
            patience = dead_seconds + min(life.starved_seconds, STARVED_SECONDS)
            trusted = now >= self._distrust_until or silence > dead_seconds + DISTRUST_SECONDS
            if silence > patience and trusted:
                decisions.append(self._condemn(process, life, f"no beat for {silence:.2f} s"))
            elif silence > suspect_seconds:
                if life.state is State.ALIVE:
                    decisions.append(self._suspect(process, life, f"no beat for {silence:.2f} s"))
            elif life.state is State.SUSPECT and now >= life.reported_until and life.sequence >= 0:
                decisions.append(self._clear(process, life))
        return decisions

    def _silence(self, now: float, life: Life) -> float:
        return (now if self._path_at is None else self._path_at) - life.heard_at

    def _note_lag(self, now: float, lag_seconds: float) -> None:
        if lag_seconds <= LAG_SECONDS:
            return
        self._lags.append((now, lag_seconds))
        if lag_seconds > self._timeouts.dead_seconds:  # it was away: what it has not heard meanwhile says nothing
            for life in self._lives.values():
                life.heard_at = max(life.heard_at, now)

    def _weigh_own_fault(self, now: float, num_silent: int, num: int) -> None:
        """Nearly all silent: judge nobody for a while, and a little longer, since they are heard again one after the other.

        A new doubt begins only after a moment without one, in which whoever was silent for too long has been condemned.
        """
        if num_silent >= max(2, math.ceil(DISTRUST_SHARE * num)):
            if self._distrust_began is None:
                self._distrust_began = now
            self._distrust_until = min(now + self._timeouts.suspect_seconds, self._distrust_began + DISTRUST_SECONDS)
        elif now >= self._distrust_until:
            self._distrust_began = None

    def _begin(self, now: float, process: str, incarnation: str) -> Life:
        before = self._lives.get(process)
        life = self._lives[process] = Life(incarnation, now)
        if before is not None:
            life.past.extend((*before.past, before.incarnation))
        return life

    def _suspect(self, process: str, life: Life, why: str) -> Suspected:
        life.state, life.why = State.SUSPECT, why
        return Suspected(process, life.incarnation, why)

    def _clear(self, process: str, life: Life) -> Cleared:
        life.state, life.why = State.ALIVE, ""
        return Cleared(process, life.incarnation, "it beats, and nobody complains")

    def _condemn(self, process: str, life: Life, why: str) -> Condemned:
        life.state, life.why = State.DEAD, why
        return Condemned(process, life.incarnation, why)
