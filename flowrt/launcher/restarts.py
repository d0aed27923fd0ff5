"""Deaths that a run outlives: everybody is told at once, and the worker is started again.

Here: `Revival`, for the processes that may die, the monitor among them. Not here: who may (flowrt/graph/recovery.py), how often
(supervision.py), who is held for dead (watching.py), how a process is made (hosts.py). Called by launcher.py, which owns the workers.

What dies is an OS process with all its workers; it can be outlived when each of them may die. Order: `Left` to all that knew them, in
the very callback in which the death is heard of; then, in a task, the event, the wait that the budget asks for, the fork, Start;
when it listens, `Joined` to the others and `Peers` to itself.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Protocol

from flowrt.actors.control import Control, Joined, Left, LinkLost, Statistics
from flowrt.actors.mailbox import Mailbox
from flowrt.errors import UserError, WorkerDiedError
from flowrt.graph.model import FORK_SERVER, MONITOR, Graph
from flowrt.graph.recovery import may_die, neighbours
from flowrt.launcher import events
from flowrt.launcher.control_connection import ControlConnection
from flowrt.launcher.hosts import Hosts, Placed
from flowrt.launcher.introduction import Introduction
from flowrt.launcher.totals import total
from flowrt.reliability.supervision import GiveUp, Restart, Supervision

EXPLAINED_SECONDS = 2.0  # from a lost link to the death that explains it; then the end which may die is killed
FORK_SERVER_SECONDS = 15.0  # for the fork server to say how a process ended that has
_LAST_WORDS_SECONDS = 0.5  # for a process that has closed its control connection to end, and for what an ended one has said to be read


class Run(Protocol):
    """What the launcher does for a new life."""

    workers: dict[str, ControlConnection]

    def renew(self, name: str) -> None: ...
    def add(self, placed: Placed) -> ControlConnection: ...
    async def follow(self, line: ControlConnection) -> None: ...
    def on_event(self, event: events.Event) -> None: ...


class Revival:
    """Until `begin`, deaths are loading.py's, or end the run; after `stop` those that may die are outlived, but not started again."""

    def __init__(self, graph: Graph, run: Run, hosts: Hosts, introduction: Introduction) -> None:
        self._run, self._hosts, self._introduction = run, hosts, introduction
        self._may_die = may_die(graph) | {MONITOR}
        self._neighbours = neighbours(graph)
        self._supervision = Supervision(graph.reliability.restarts, graph.reliability.restart_window_seconds)
        self._lives: asyncio.TaskGroup | None = None
        self._down: Mailbox[tuple[str, str | None]] = Mailbox(1 << 16)  # (host, how it died; None: it has not lived yet)
        self._has_begun = False
        self._awaited: dict[str, asyncio.Future[str]] = {}  # host -> the exit that the fork server is to tell of
        self._causes: dict[str, str] = {}  # host -> why it dies, where more is known of it than its exit status
        self._reviving: dict[str, asyncio.Task[None]] = {}
        self._stopping = asyncio.Event()
        self._past: dict[str, list[Statistics]] = {}  # of former lives
        self._given_up: set[str] = set()  # hosts, until the next try
        self._num_restarts: dict[str, int] = {}

    def begin(self) -> None:
        """The run is up: from now on deaths are outlived. `run` must run."""
        self._has_begun = True

    def bring(self, host: str) -> None:
        """Start what is planned beside the graph. The run does not wait for it."""
        self._down.post((host, None))

    async def run(self) -> None:
        """Start again what dies, until cancelled. Owns the tasks of all later lives."""
        try:
            async with asyncio.TaskGroup() as self._lives:
                while True:
                    host, how = await self._down.wait_item()
                    self._down.take_nowait()
                    if not self._stopping.is_set():
                        self._reviving[host] = self._lives.create_task(self._revive(host, how), name=f"revival of {host}")
        finally:
            self._stopping.set()

    async def stop(self) -> None:
        """Start nobody again, and end those that are just being started: they have nothing to say."""
        self._stopping.set()
        reviving = {host: task for host, task in self._reviving.items() if not task.done()}
        for host in reviving:
            self._end(host)
        if reviving:
            await asyncio.wait(reviving.values())
        ends = [self._hosts.exits[host] for host in reviving if not self._hosts.has_exited(host)]
        if ends:
            await asyncio.wait(ends, timeout=EXPLAINED_SECONDS)

    def may_die(self, host: str) -> bool:
        """Whether it is an OS process all of whose workers may die, at the right time."""
        workers = self._hosts.workers_of(host)
        return bool(workers) and self._may_die.issuperset(workers)

    def outlives(self, host: str) -> bool:
        """Whether the run goes on when this host dies now."""
        return self._has_begun and self.may_die(host)

    def restarting(self) -> list[str]:
        """Hosts that have died, or are being started, and are not given up."""
        return [host for host, task in self._reviving.items() if not task.done() and host not in self._given_up]

    def statistics(self, name: str) -> Statistics:
        """Of all lives, as far as they have told."""
        return total([*self._past.get(name, []), self._run.workers[name].statistics], self._num_restarts.get(name, 0))

    # What is heard of deaths. None of these waits.

    def on_gone(self, host: str) -> None:
        """The kernel says that the process has begun to die, or has ended: the first word of it counts."""
        if self.outlives(host):
            for line in self._lines(host):
                self._leave(line, self._causes.get(host, "its process has ended"))
            reaped = self._hosts.exits[host]
            if not reaped.done() and self._awaited.get(host) is not reaped:
                self._awaited[host] = reaped
                asyncio.get_running_loop().call_later(FORK_SERVER_SECONDS, self._tell_unless, reaped, host)

    def on_exit(self, host: str, how: str) -> None:
        """The process has ended and was reaped, one that the run outlives."""
        self.on_gone(host)
        self._down.post((host, how))

    def on_line_end(self, line: ControlConnection) -> None:
        """Its control connection has ended, and it was not told to stop: its process should end too."""
        line.answer_for_it()
        if not line.is_known_over:
            self._leave(line, self._causes.get(line.host, "it has closed its control connection"))
            ended = self._hosts.exits[line.host]
            asyncio.get_running_loop().call_later(_LAST_WORDS_SECONDS, self._kill_unless, ended, line.host)

    def blame(self, line: ControlConnection, reason: str) -> None:
        """It says that it fails, or speaks nonsense: it is about to end, and this is why."""
        self._causes.setdefault(line.host, reason)

    def on_link_lost(self, line: ControlConnection, lost: LinkLost) -> bool:
        """True when one of the two ends may die: that one is killed if it has not ended by itself soon."""
        peer = self._run.workers.get(lost.peer)
        for end, other in ((peer, line), (line, peer)):
            if end is None or not self.outlives(end.host):
                continue
            if not end.is_known_over and not (end is peer and lost.incarnation not in ("", end.incarnation)):
                reason = f"has lost its link to {other.name if other is not None else lost.peer} ({lost.reason})"
                asyncio.get_running_loop().call_later(EXPLAINED_SECONDS, self._condemn_unless_explained, end, other, reason)
            return True
        return False

    def _condemn_unless_explained(self, end: ControlConnection, other: ControlConnection | None, reason: str) -> None:
        """The end of the other process explains the lost link."""
        if other is None or not other.is_over:
            self.condemn(end, reason)

    def condemn(self, line: ControlConnection, why: str) -> None:
        """This life is to be used no more: all are told, then it is killed, so that it cannot come back."""
        if not line.is_known_over and self.outlives(line.host) and not self._stopping.is_set():
            self._causes.setdefault(line.host, why)
            self._end(line.host)

    def _end(self, host: str) -> None:
        for line in self._lines(host):
            self._leave(line, self._causes.get(host, "the run is being stopped"))
        self._hosts.kill_now(host)

    def _tell_unless(self, reaped: asyncio.Future[str], host: str) -> None:
        """Only the fork server can reap and fork, and it does not: what it was asked to bring back stays down, unless it wakes up."""
        if not reaped.done() and not self._stopping.is_set():
            asked = "is it stopped, or the machine overloaded?"
            self._stay_down(host, f"it died {FORK_SERVER_SECONDS:g} s ago, and the fork server has not said so: {asked}")

    def _stay_down(self, host: str, why: str) -> None:
        self._given_up.add(host)
        for name in self._hosts.workers_of(host):
            self._run.on_event(events.WorkerGivenUp(name, why))

    def _kill_unless(self, ended: asyncio.Future[str], host: str) -> None:
        if not ended.done():
            self._hosts.kill_now(host)

    def _leave(self, line: ControlConnection, why: str) -> None:
        """Once per life: tell those that may use it."""
        if not line.is_known_over and not line.told_to_stop:
            line.is_known_over = True
            self._tell_others(line, (*self._neighbours.get(line.name, ()), MONITOR), Left(line.name, line.incarnation, why))

    def _tell_others(self, line: ControlConnection, names: tuple[str, ...], control: Control) -> None:
        for name in names:
            other = self._run.workers.get(name)
            if other is not None and other.host != line.host and not other.is_over:
                other.post(control)

    def _lines(self, host: str) -> list[ControlConnection]:
        names = [name for name in self._hosts.workers_of(host) if name in self._run.workers]
        return [self._run.workers[name] for name in names]

    # New lives.

    async def _revive(self, host: str, how: str | None) -> None:
        died = self._now()
        if how is not None:
            how = await self._explained(host, how)
        for line in self._lines(host):
            self._past.setdefault(line.name, []).append(line.statistics)
            line.statistics = Statistics()
            self._run.on_event(events.WorkerLost(line.name, how or ""))
            await line.aclose()
        self._causes.pop(host, None)  # said in time or too late, it is not the next life's
        is_first = how is None
        while is_first or await self._is_to_live(host):
            is_first = False
            self._given_up.discard(host)
            try:
                lines = await self.fork_again(host)
            # no memory or no descriptor for it; or the fork server has died, which ends the run
            except (WorkerDiedError, UserError) as error:
                if self._hosts.has_exited(FORK_SERVER):
                    return
                if isinstance(error, WorkerDiedError) and error.process == FORK_SERVER:  # it stands still
                    self._stay_down(host, f"the fork server {error.reason}")
                continue
            if await self._introduce(lines) and how is not None:
                for line in lines:
                    self.count_restart(line.name)
                    self._run.on_event(events.WorkerRestarted(line.name, line.placed.pid, self._now() - died))
            return

    async def _explained(self, host: str, how: str) -> str:
        """How it died, and why if that is known: what it said on its control connections may be read after the word of its end."""
        unread = [line.ended for line in self._lines(host) if not line.ended.done()]
        if unread:
            await asyncio.wait(unread, timeout=_LAST_WORDS_SECONDS)
        cause = self._causes.get(host)
        return how if cause is None else f"{cause}; {how}"

    async def fork_again(self, host: str) -> list[ControlConnection]:
        """The next life of a host, and of its workers. Raises WorkerDiedError and UserError as Hosts.fork_again."""
        for name in self._hosts.workers_of(host):
            self._run.renew(name)
        return [self._run.add(each) for each in await self._hosts.fork_again(host)]

    def count_restart(self, name: str) -> None:
        self._num_restarts[name] = self._num_restarts.get(name, 0) + 1

    def delay_before_next(self, host: str) -> float | str:
        """A host has died: the seconds to wait before its next life; or why the budget allows none."""
        decision = self._supervision.on_death(host, self._now())
        return decision.why if isinstance(decision, GiveUp) else decision.delay_seconds

    async def _is_to_live(self, host: str) -> bool:
        """Whether it is to be started again, and the run goes on; after the wait that the restart budget asks for."""
        decision = self._supervision.on_death(host, self._now())
        if isinstance(decision, Restart):
            return not await self._pause(decision.delay_seconds)
        if decision.retry_seconds is None:
            self._stay_down(host, decision.why)
            return False
        self._stay_down(host, f"{decision.why}; the next try is in {decision.retry_seconds:g} s")
        return not await self._pause(decision.retry_seconds)

    async def _introduce(self, lines: list[ControlConnection]) -> bool:
        """Lead new lives from Start to where the others know them. False: they have died, which is another death like the first."""
        assert self._lives is not None
        for line in lines:
            self._lives.create_task(self._run.follow(line), name=f"line of {line.name}")
        if self._stopping.is_set():
            self._end(lines[0].host)
            return False
        try:
            for line in lines:
                await self._introduction.start(line)
            if not await self._introduction.wait_loaded(lines):
                return False
            for line in lines:
                joined = Joined(line.name, line.incarnation, self._introduction.addresses[line.name])
                self._tell_others(line, self._neighbours.get(line.name, ()), joined)
            if not await self._introduction.wait_connected(lines):
                return False
        except WorkerDiedError as error:
            self.condemn(lines[0], error.reason)
            return False
        for line in lines:
            self._tell_others(line, (MONITOR,), Joined(line.name, line.incarnation, {}, line.placed.pid))
        return True

    async def _pause(self, seconds: float) -> bool:
        """True when the run is being stopped."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._stopping.wait()
        return self._stopping.is_set()

    def _now(self) -> float:
        return asyncio.get_running_loop().time()
