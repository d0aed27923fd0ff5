"""The failure detector: heartbeats and process samples in, decisions out. Pure: the clock is an argument.

    alive  <->  suspect  ->  dead        a new incarnation of a dead process starts alive
      ^-----------------------'          a heartbeat without a passed bound clears one that was neither killed nor removed

A process is suspect while its heartbeats are late or a client reports that it waits for it; nothing follows from that but a warning.
Silence alone never marks a process dead. These do, each since its last heartbeat:

    stopped     it was seen stopped by a signal (state T), and its heartbeats have been missing for dead_seconds
    busy        it received dead_seconds of processor time
    asleep      no thread of it could run, and its heartbeats have been missing for dead_seconds
    starting    its heartbeats have not begun, and it was seen stopped by a signal for dead_seconds without a break
    disk        it waited for a disk for DISK_SECONDS
    operation   its heartbeats continue and report that the running operation has passed its bound

Only observed evidence counts. Time in the run queue belongs to none of these states, so it extends every deadline; so does time
in which the observer itself did not run, and time in which the launcher, which relays the heartbeats, sent no heartbeat. Of a process on
another host, the host server observes the silence and takes the samples (flowrt/hosts/sampling.py); time without samples does not count.
Where the system gives no information about a process (no /proc) there are no samples: only a passed bound marks it dead.
"""

from __future__ import annotations

import enum
import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from flowrt.system.process_status import Activity, ProcessSample, ProcessTimes

TICK_SECONDS = 0.05  # between two ticks of an observer
LAG_SECONDS = 0.025  # lateness up to this is normal work of the loop
SAMPLE_SECONDS = 0.12  # a process without a heartbeat for so long is sampled
SEEN_SHARE = 0.75  # of dead_seconds: sampling starts after the last heartbeat, so it sees less than the whole silence
DISK_SECONDS = 60.0
MAX_TICK_SECONDS = 0.1  # a longer time between two ticks counts as this: the observer was late, and has unread heartbeats
PATH_SECONDS = 0.15  # after so long without a heartbeat of the launcher, silence does not count
REPORT_SECONDS = 2.0  # a client's report keeps a process suspect for this long
MAX_PAST = 64  # remembered incarnations per process


class ProcessState(enum.Enum):
    ALIVE = "alive"
    SUSPECT = "suspect"
    DEAD = "dead"


@dataclass(frozen=True)
class StateChange:
    """The new state of an incarnation. SUSPECT: it is late or was reported by a client; the only consequence is a warning.
    DEAD: it died or hangs. ALIVE: it is neither any more. `is_stopped`: it is dead because another process has stopped it."""

    process: str
    incarnation: str
    state: ProcessState
    why: str
    is_stopped: bool = False


@dataclass(frozen=True)
class Timeouts:
    suspect_seconds: float = 0.4
    dead_seconds: float = 1.0


@dataclass(frozen=True)
class Operation:
    """The running operation as reported by a heartbeat. `bound_seconds` 0: no bound is declared."""

    label: str
    seconds: float
    bound_seconds: float


@dataclass
class Watched:
    """The latest incarnation of a process. Each heartbeat resets the fields of the second half."""

    incarnation: str
    state: ProcessState = ProcessState.ALIVE
    why: str = ""  # reason why it is suspect or dead
    sequence: int = -1
    reported_until: float = -math.inf
    past: deque[str] = field(default_factory=lambda: deque(maxlen=MAX_PAST))  # earlier incarnations
    is_removed: bool = False  # it never returns
    is_starting: bool = False  # its heartbeats have not begun: only a stop is evidence

    received_at: float = 0.0
    silent_seconds: float = 0.0  # counted silence since the last heartbeat
    observed_seconds: float = 0.0  # the part of silent_seconds that samples cover
    sampled_at_silence: float = 0.0  # silence at the latest sample, as its observer counts it
    times: ProcessTimes | None = None  # of the latest sample
    activity: Activity | None = None
    received_seconds: float = 0.0  # processor time received in counted silence
    seconds: dict[Activity, float] = field(default_factory=dict)  # counted silence, neither running nor in the run queue

    def add_sample(self, sample: ProcessSample, silent_seconds: float) -> None:
        """Adds the activity since the previous sample, at most as much as the counted silence since then. `silent_seconds`: the silence
        when the sample was taken, as its observer counts it."""
        if silent_seconds < self.sampled_at_silence:  # a heartbeat came between, and was lost on its way from the observer
            self._forget_samples()
        passed = min(max(0.0, silent_seconds - self.sampled_at_silence), max(0.0, self.silent_seconds - self.observed_seconds))
        self.sampled_at_silence = silent_seconds
        self.observed_seconds += passed
        times, before, activity_before = sample.times, self.times, self.activity
        if self.is_starting and sample.activity is not Activity.STOPPED:
            self.seconds.clear()
        self.times, self.activity = times, sample.activity
        if before is None:
            return
        # A loop that waits for a processor receives nothing, whatever its other threads do.
        if sample.activity is Activity.RUNNABLE:
            received = times.loop_cpu_seconds - before.loop_cpu_seconds
        else:
            received = times.cpu_seconds - before.cpu_seconds
        received = min(max(0.0, received), passed)
        self.received_seconds += received
        if sample.activity is activity_before:
            idle = max(0.0, passed - received - max(0.0, times.queued_seconds - before.queued_seconds))
            self.seconds[sample.activity] = self.seconds.get(sample.activity, 0.0) + idle

    def _forget_samples(self) -> None:
        self.observed_seconds = self.sampled_at_silence = self.received_seconds = 0.0
        self.times = self.activity = None
        self.seconds.clear()


class ObserverTime:
    """The time that counts for an observer: a time in which it did not run counts as a tick, since it has unread heartbeats."""

    def __init__(self) -> None:
        self._ticked_at = -math.inf

    def tick(self, now: float) -> float:
        """The seconds since the previous tick that count."""
        passed, self._ticked_at = min(max(0.0, now - self._ticked_at), MAX_TICK_SECONDS), now
        return passed


class Detector:
    """One observer. Call its methods in the order of their times, and carry out the decisions that they return."""

    def __init__(self, timeouts: Timeouts | None = None) -> None:
        self._timeouts = timeouts or Timeouts()
        self.watched: dict[str, Watched] = {}  # the latest incarnation of each process
        self._path_at: float | None = None  # the launcher's latest heartbeat; None: it sends none
        self._time = ObserverTime()

    def add(self, now: float, process: str, incarnation: str, times: ProcessTimes | None = None, is_starting: bool = False) -> None:
        """Watch a new incarnation, while it starts (`is_starting`) and then again from its start on. Idempotent."""
        known = self.watched.get(process)
        if known is None or (known.incarnation != incarnation and incarnation not in known.past):
            self._begin(now, process, incarnation, times).is_starting = is_starting
        elif known.incarnation == incarnation and known.is_starting > is_starting and known.state is not ProcessState.DEAD:
            started = self.watched[process] = Watched(incarnation, past=known.past, received_at=now, times=times)
            # the next heartbeat clears these
            started.state, started.why, started.reported_until = known.state, known.why, known.reported_until

    def remove(self, now: float, process: str, incarnation: str) -> None:
        """Removes an incarnation whose connection closed or that was marked dead elsewhere: no more decisions about it. Idempotent."""
        watched = self.watched.get(process) or self._begin(now, process, incarnation)
        if watched.incarnation == incarnation:
            watched.state, watched.why, watched.is_removed = ProcessState.DEAD, watched.why or "its connection has closed", True
        elif incarnation not in watched.past:
            watched.past.append(incarnation)

    def record_heartbeat(
        self,
        now: float,
        process: str,
        incarnation: str,
        sequence: int,
        operation: Operation | None = None,
        times: ProcessTimes | None = None,
    ) -> list[StateChange]:
        """Records a heartbeat: the event loop of the process runs. `times`: its processor time, read when the heartbeat arrived."""
        watched = self.watched.get(process)
        if watched is None or (watched.state is ProcessState.DEAD and incarnation not in (watched.incarnation, *watched.past)):
            watched = self._begin(now, process, incarnation)  # an observer that starts later discovers processes by their heartbeats
        if incarnation != watched.incarnation or watched.is_removed or sequence <= watched.sequence:
            return []
        state, why = watched.state, watched.why
        fresh = Watched(incarnation, state, why, sequence, watched.reported_until, watched.past, received_at=now, times=times)
        self.watched[process] = fresh
        if operation is not None and 0 < operation.bound_seconds < operation.seconds:
            why = f"{operation.label} has run {operation.seconds:.2f} s, its bound is {operation.bound_seconds:.2f} s"
            return [_change(process, fresh, ProcessState.DEAD, why)] if state is not ProcessState.DEAD else []
        if state is ProcessState.DEAD or (state is ProcessState.SUSPECT and now >= fresh.reported_until):
            return [_clear(process, fresh)]
        return []

    def record_report(
        self, now: float, process: str, incarnation: str, by: str, waited_seconds: float, expected_seconds: float
    ) -> list[StateChange]:
        """Records that a client waits longer than usual. This can make the process suspect, never dead."""
        watched = self.watched.get(process)
        if watched is None or incarnation != watched.incarnation or watched.state is ProcessState.DEAD:
            return []
        watched.reported_until = now + REPORT_SECONDS
        if watched.state is ProcessState.SUSPECT:
            return []
        why = f"{by} has waited {waited_seconds:.2f} s for it, {expected_seconds:.2f} s is usual"
        return [_change(process, watched, ProcessState.SUSPECT, why)]

    def record_launcher_heartbeat(self, now: float) -> None:
        """Records a heartbeat of the launcher, which relays all others. After its first one, silence counts only while they continue."""
        self._path_at = now

    def silent(self) -> list[str]:
        """The processes that the next `tick` needs samples of."""
        return [
            process
            for process, watched in self.watched.items()
            if watched.state is not ProcessState.DEAD and watched.silent_seconds >= SAMPLE_SECONDS
        ]

    def tick(self, now: float, samples: Mapping[str, ProcessSample]) -> list[StateChange]:
        """Advances the time; call it every TICK_SECONDS. `samples`: of the `silent` processes of this host, as far as the system provides
        them."""
        passed = self._time.tick(now)
        if self._path_at is not None and now - self._path_at > PATH_SECONDS:
            passed = 0.0
        decisions: list[StateChange] = []
        for process, watched in self.watched.items():
            if watched.state is ProcessState.DEAD:
                continue
            watched.silent_seconds += min(passed, max(0.0, now - watched.received_at))
            if (sample := samples.get(process)) is not None:
                watched.add_sample(sample, watched.silent_seconds)
            decisions += self._evaluate(now, process, watched)
        return decisions

    def record_sample(self, process: str, incarnation: str, sample: ProcessSample, silent_seconds: float) -> None:
        """Records the sample of a process on another host, whose observer has seen no heartbeat for `silent_seconds`. Samples and
        heartbeats of one process come in the order in which they were observed. The next `tick` decides."""
        watched = self.watched.get(process)
        if watched is not None and watched.incarnation == incarnation:
            watched.add_sample(sample, silent_seconds)

    # Decisions.

    def _evaluate(self, now: float, process: str, watched: Watched) -> list[StateChange]:
        if (evidence := self._evidence(watched)) is not None:
            why = evidence if watched.is_starting else f"{evidence}, no heartbeat for {watched.silent_seconds:.2f} s"
            return [_change(process, watched, ProcessState.DEAD, why)]
        if watched.silent_seconds > self._timeouts.suspect_seconds:
            if watched.state is ProcessState.ALIVE and not watched.is_starting:
                seen = f" ({watched.activity.value})" if watched.activity is not None else ""
                return [_change(process, watched, ProcessState.SUSPECT, f"no heartbeat for {watched.silent_seconds:.2f} s{seen}")]
        elif watched.state is ProcessState.SUSPECT and now >= watched.reported_until and watched.sequence >= 0:
            return [_clear(process, watched)]
        return []

    def _evidence(self, watched: Watched) -> str | None:
        dead_seconds, seconds = self._timeouts.dead_seconds, watched.seconds
        if watched.is_starting:
            stopped_seconds = seconds.get(Activity.STOPPED, 0.0)
            return f"{Activity.STOPPED.value} for {stopped_seconds:.2f} s" if stopped_seconds >= dead_seconds else None
        if watched.received_seconds >= dead_seconds:
            return f"received {watched.received_seconds:.2f} s of processor time"
        if watched.observed_seconds < dead_seconds:
            return None
        for activity in (Activity.STOPPED, Activity.ASLEEP):
            if seconds.get(activity, 0.0) >= SEEN_SHARE * dead_seconds:
                return str(activity.value)
        return str(Activity.DISK.value) if seconds.get(Activity.DISK, 0.0) >= DISK_SECONDS else None

    def _begin(self, now: float, process: str, incarnation: str, times: ProcessTimes | None = None) -> Watched:
        before = self.watched.get(process)
        watched = self.watched[process] = Watched(incarnation, received_at=now, times=times)
        if before is not None:
            watched.past.extend((*before.past, before.incarnation))
        return watched


def _change(process: str, watched: Watched, state: ProcessState, why: str) -> StateChange:
    watched.state, watched.why = state, why if state is not ProcessState.ALIVE else ""
    is_stopped = state is ProcessState.DEAD and why.startswith(Activity.STOPPED.value)
    return StateChange(process, watched.incarnation, state, why, is_stopped)


def _clear(process: str, watched: Watched) -> StateChange:
    return _change(process, watched, ProcessState.ALIVE, "its heartbeats come in time, and no client reports it")
