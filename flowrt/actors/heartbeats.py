"""Heartbeats: periodic signs of progress of a worker, sent by the event loop that does its work.

A heartbeat reports that the loop turns, and the state of the threads that compute. No separate thread sends it, because such a thread would
continue while the loop is blocked. flowrt/reliability/detector.py draws the conclusions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable
from typing import NoReturn

from flowrt.actors.control import Control, Heartbeat
from flowrt.reliability.detector import LAG_SECONDS
from flowrt.seams import Clock, Running

HEARTBEAT_SECONDS = 0.1
LAUNCHER_HEARTBEAT_SECONDS = 0.05  # silence counts up to its latest heartbeat, so a process is marked dead later by this much
STILL_SHARE = 0.01  # of the time: an operation that uses less of a processor only checks whether it may continue
FIRST_STILL_SECONDS = 5.0  # while no call of the operation has ended in the run
REPORTED_SECONDS = 0.3  # a longer standstill is reported


async def send_heartbeats(
    incarnation: str,
    read: Callable[[], tuple[int, *tuple[Running | None, ...]]],
    clock: Clock,
    send: Callable[[Control], None],
    heartbeat_seconds: float = HEARTBEAT_SECONDS,
    process: str = "",
    ended: Collection[str] = (),
    ended_before: Iterable[str] = (),
) -> NoReturn:
    """Pass a Heartbeat to `send` every `heartbeat_seconds` until cancelled, the first one at once. `send` must not wait. `read` returns
    the number of firings and, for each thread that computes, the running operation, of which the one nearest to its bound is reported: a
    busy thread hides no hung one. `ended`: a view of the operations of which a call has ended here; `ended_before`:
    elsewhere in the run."""
    watches: list[OperationWatch] = []  # one per thread
    sequence, now = 0, clock.now()
    due = now
    while True:
        lag = now - due
        num_firings, *operations = read()
        watches += [OperationWatch(heartbeat_seconds, ended_before) for _ in operations[len(watches) :]]
        first_ended = watches[0].note_ended(ended)
        looks = [watch.look(now, running) for watch, running in zip(watches, operations, strict=True)]
        label, running_seconds, bound_seconds = max(looks, key=lambda look: -math.inf if look[0] is None else look[1] - look[2])
        send(
            Heartbeat(
                sequence=sequence,
                lag_seconds=lag if lag > LAG_SECONDS else 0.0,  # the loop may compute for so long itself
                num_firings=num_firings,
                running=label,
                running_seconds=running_seconds,
                bound_seconds=bound_seconds,
                incarnation=incarnation,
                process=process,
                ended=first_ended,
            )
        )
        sequence += 1
        due += heartbeat_seconds  # a late heartbeat delays no later one ...
        if due <= now:
            due = now + heartbeat_seconds  # ... and missed ones are not made up for
        await clock.sleep(max(0.0, due - clock.now()))
        now = clock.now()


class OperationWatch:
    """Measures how long the running operation has run and its time limit, from its processor time at each look.

    The limit counts only time in which the operation could run. It excludes waiting for a processor, and time without looks, in which this
    process was stopped or had no processor. An operation that neither computes nor waits for a processor stands still. It may stand still
    for `still_seconds`: its limit is then at most its time until it stood still plus `still_seconds`. This is FIRST_STILL_SECONDS for an
    operation of which no call has ended in the run (`ended`): it may read libraries and weights, which are in memory from then on.
    """

    def __init__(self, look_seconds: float = HEARTBEAT_SECONDS, ended: Iterable[str] = ()) -> None:
        self._ended = set(ended)
        self._max_between = 1.5 * look_seconds
        self._operation: tuple[str, float] | None = None
        self._looked = self._computed = self._queued = self._seconds = self._still = 0.0

    def note_ended(self, operations: Collection[str]) -> tuple[str, ...]:
        """A call of each of these has ended. Returns those that are new."""
        new = tuple(operation for operation in operations if operation not in self._ended)
        self._ended.update(new)
        return new

    def look(self, now: float, running: Running | None) -> tuple[str | None, float, float]:
        """Returns (description of the operation, seconds it has run, its bound in seconds). To be called every `look_seconds`."""
        if running is None:
            self._operation = None
            return None, 0.0, 0.0
        operation = (running.label, running.since_seconds)
        computed = running.computed_seconds
        if operation != self._operation:
            self._operation, self._seconds, self._still = operation, 0.0, 0.0
        else:
            passed = max(0.0, min(now - self._looked, self._max_between) - max(0.0, running.queued_seconds - self._queued))
            self._seconds += passed
            if computed is None or computed - self._computed > STILL_SHARE * passed or running.wants_processor():
                self._still = 0.0
            else:
                self._still += passed
        self._looked, self._computed, self._queued = now, computed or 0.0, running.queued_seconds
        seconds, still = self._seconds, self._still
        label = repr(running.label) if still < REPORTED_SECONDS else f"{running.label!r}, which has not computed for {still:.2f} s,"
        bound, still_seconds = running.bound_seconds, running.still_seconds
        if running.label not in self._ended:
            still_seconds = max(still_seconds, FIRST_STILL_SECONDS)
        return label, seconds, bound if not still else min(bound, seconds - still + still_seconds)
