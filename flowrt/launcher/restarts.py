"""Restarts workers whose death the run survives, and notifies their peers.

The unit of death is an OS process with all its workers; the run survives it when it can lose each of them (flowrt/graph/recovery.py). The
restart budget is in flowrt/reliability/restart_policy.py. The steps:
- `PeerLeft` to all peers, in the same callback that detects the death;
- in a task: the event, the delay that the restart budget demands, the fork, `Start`;
- when the new incarnation listens: `PeerJoined` to its peers and `Peers` to itself.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Protocol

from flowrt.actors.control import Control, LinkLost, PeerJoined, PeerLeft, Statistics
from flowrt.actors.mailbox import Mailbox
from flowrt.errors import UserError, WorkerDiedError
from flowrt.graph.model import FORK_SERVER, MONITOR, Graph
from flowrt.graph.recovery import neighbours, survivable_processes
from flowrt.launcher import events
from flowrt.launcher.control_connection import ControlConnection
from flowrt.launcher.hosts import Hosts, Placed
from flowrt.launcher.introduction import Introduction
from flowrt.launcher.totals import total
from flowrt.reliability.restart_policy import GiveUp, Restart, RestartPolicy

EXPLAINED_SECONDS = 2.0  # from a lost link to the death that explains it; after that the end that the run can lose is killed
FORK_SERVER_SECONDS = 15.0  # time limit for the fork server to report the exit of an ended process
_LAST_WORDS_SECONDS = 0.5  # for a process that closed its control connection to end, and to read the last messages of an ended one


class Run(Protocol):
    """The launcher's side of a restart."""

    workers: dict[str, ControlConnection]

    def renew(self, name: str) -> None: ...
    def add(self, placed: Placed) -> ControlConnection: ...
    async def follow(self, line: ControlConnection) -> None: ...
    def on_event(self, event: events.Event) -> None: ...


class Revival:
    """Restarts processes that the run can lose, the monitor included.

    Before `begin`, loading.py handles a death, or it ends the run. After `stop`, the run survives deaths but restarts no process.
    """

    def __init__(self, graph: Graph, run: Run, hosts: Hosts, introduction: Introduction) -> None:
        self._run, self._hosts, self._introduction = run, hosts, introduction
        self._may_die = survivable_processes(graph) | {MONITOR}
        self._neighbours = neighbours(graph)
        self._restart_policy = RestartPolicy(graph.reliability.restarts, graph.reliability.restart_window_seconds)
        self._lives: asyncio.TaskGroup | None = None
        self._down: Mailbox[tuple[str, str | None]] = Mailbox(1 << 16)  # (host, how it died; None: its first start)
        self._has_begun = False
        self._awaited: dict[str, asyncio.Future[str]] = {}  # host -> the exit that the fork server has to report
        self._causes: dict[str, str] = {}  # host -> the cause of its death, where more than the exit status is known
        self._reviving: dict[str, asyncio.Task[None]] = {}
        self._stopping = asyncio.Event()
        self._past: dict[str, list[Statistics]] = {}  # of past incarnations
        self._given_up: set[str] = set()  # hosts, until the next attempt
        self._num_restarts: dict[str, int] = {}

    def begin(self) -> None:
        """Survive deaths from now on: the run is up. Restarts also what was reaped since it loaded, whose exit notice came too early."""
        self._has_begun = True
        for host, exited in self._hosts.exits.items():
            if exited.done() and self.outlives(host):
                self.on_exit(host, exited.result())

    def bring(self, host: str) -> None:
        """Start a planned host outside the graph. Returns at once."""
        self._down.post((host, None))

    async def run(self) -> None:
        """Restart what dies, until cancelled. Owns the tasks of all later incarnations."""
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
        """Restart no process any more, and kill those that are just being started, since they hold no work yet."""
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
        """Whether the host is an OS process and the run can lose all its workers, once it is up."""
        workers = self._hosts.workers_of(host)
        return bool(workers) and self._may_die.issuperset(workers)

    def outlives(self, host: str) -> bool:
        """Whether the run goes on when this host dies now."""
        return self._has_begun and self.may_die(host)

    def restarting(self) -> list[str]:
        """Hosts that have died, or are being started, and are not given up."""
        return [host for host, task in self._reviving.items() if not task.done() and host not in self._given_up]

    def statistics(self, name: str) -> Statistics:
        """Statistics of all incarnations of a worker together, as far as they were reported."""
        return total([*self._past.get(name, []), self._run.workers[name].statistics], self._num_restarts.get(name, 0))

    # Signs of a death. None of these methods waits.

    def on_gone(self, host: str) -> None:
        """Notify the peers: the process has begun to die, or has ended. No-op for later notices of the same death."""
        if self.outlives(host):
            for line in self._lines(host):
                self._leave(line, self._causes.get(host, "its process has ended"))
            reaped = self._hosts.exits[host]
            if not reaped.done() and self._awaited.get(host) is not reaped:
                self._awaited[host] = reaped
                asyncio.get_running_loop().call_later(FORK_SERVER_SECONDS, self._tell_unless, reaped, host)

    def on_exit(self, host: str, how: str) -> None:
        """Queue the restart of a process that has ended and was reaped. The run survives its death."""
        self.on_gone(host)
        self._down.post((host, how))

    def on_line_end(self, line: ControlConnection) -> None:
        """Handle the end of a control connection without Stop: notify the peers, and kill the process unless it ends by itself soon."""
        line.answer_for_it()
        if not line.is_known_over:
            self._leave(line, self._causes.get(line.host, "it has closed its control connection"))
            ended = self._hosts.exits[line.host]
            asyncio.get_running_loop().call_later(_LAST_WORDS_SECONDS, self._kill_unless, ended, line.host)

    def blame(self, line: ControlConnection, reason: str) -> None:
        """Record why the worker is about to end: it reported a failure, or sent an invalid message. The first reason is kept."""
        self._causes.setdefault(line.host, reason)

    def on_link_lost(self, line: ControlConnection, lost: LinkLost) -> bool:
        """Return whether the run can lose one of the two ends. If so, that end is killed unless a death explains the lost link within
        EXPLAINED_SECONDS."""
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
        """Fence and kill `end`, unless the death of `other` explains the lost link."""
        if other is None or not other.is_over:
            self.condemn(end, reason)

    def condemn(self, line: ControlConnection, why: str) -> None:
        """Fence this incarnation: notify its peers, then send SIGKILL. No-op when the run cannot lose it, its end is known, or the run is
        stopping."""
        if not line.is_known_over and self.outlives(line.host) and not self._stopping.is_set():
            self._causes.setdefault(line.host, why)
            self._end(line.host)

    def _end(self, host: str) -> None:
        for line in self._lines(host):
            self._leave(line, self._causes.get(host, "the run is being stopped"))
        self._hosts.kill_now(host)

    def _tell_unless(self, reaped: asyncio.Future[str], host: str) -> None:
        """Report the host as down when the fork server has not reaped it in time. Only the fork server can reap and fork, so the host stays
        down unless the fork server continues."""
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
        """Send PeerLeft to the peers and the monitor, once per incarnation. No-op after a Stop."""
        if not line.is_known_over and not line.told_to_stop:
            line.is_known_over = True
            self._tell_others(line, (*self._neighbours.get(line.name, ()), MONITOR), PeerLeft(line.name, line.incarnation, why))

    def _tell_others(self, line: ControlConnection, names: tuple[str, ...], control: Control) -> None:
        for name in names:
            other = self._run.workers.get(name)
            if other is not None and other.host != line.host and not other.is_over:
                other.post(control)

    def _lines(self, host: str) -> list[ControlConnection]:
        names = [name for name in self._hosts.workers_of(host) if name in self._run.workers]
        return [self._run.workers[name] for name in names]

    # New incarnations.

    async def _revive(self, host: str, how: str | None) -> None:
        died = self._now()
        if how is not None:
            how = await self._explained(host, how)
        for line in self._lines(host):
            self._past.setdefault(line.name, []).append(line.statistics)
            line.statistics = Statistics()
            self._run.on_event(events.WorkerLost(line.name, how or ""))
            await line.aclose()
        self._causes.pop(host, None)  # a cause belongs to one incarnation, even when it comes late
        is_first = how is None
        while is_first or await self._is_to_live(host):
            is_first = False
            self._given_up.discard(host)
            try:
                lines = await self.fork_again(host)
            # memory or descriptors ran out; or the fork server has died, which ends the run
            except (WorkerDiedError, UserError) as error:
                if self._hosts.has_exited(FORK_SERVER):
                    return
                if isinstance(error, WorkerDiedError) and error.process == FORK_SERVER:  # it does not respond
                    self._stay_down(host, f"the fork server {error.reason}")
                continue
            if await self._introduce(lines) and how is not None:
                for line in lines:
                    self.count_restart(line.name)
                    self._run.on_event(events.WorkerRestarted(line.name, line.placed.pid, self._now() - died))
            return

    async def _explained(self, host: str, how: str) -> str:
        """Return how the process died, with the cause if it is known. Waits shortly for the control connections to end, since their last
        messages may be read after the exit notice."""
        unread = [line.ended for line in self._lines(host) if not line.ended.done()]
        if unread:
            await asyncio.wait(unread, timeout=_LAST_WORDS_SECONDS)
        cause = self._causes.get(host)
        return how if cause is None else f"{cause}; {how}"

    async def fork_again(self, host: str) -> list[ControlConnection]:
        """Start the next incarnation of a host and its workers. Raises WorkerDiedError and UserError as Hosts.fork_again."""
        for name in self._hosts.workers_of(host):
            self._run.renew(name)
        return [self._run.add(each) for each in await self._hosts.fork_again(host)]

    def count_restart(self, name: str) -> None:
        self._num_restarts[name] = self._num_restarts.get(name, 0) + 1

    def delay_before_next(self, host: str) -> float | str:
        """Count a death of the host. Returns the seconds to wait before its restart, or why the restart budget allows none."""
        decision = self._restart_policy.on_death(host, self._now())
        return decision.why if isinstance(decision, GiveUp) else decision.delay_seconds

    async def _is_to_live(self, host: str) -> bool:
        """Count a death of the host and wait as the restart budget demands. Returns whether to restart it: false when the budget is spent
        for good, or the run is stopping."""
        decision = self._restart_policy.on_death(host, self._now())
        if isinstance(decision, Restart):
            return not await self._pause(decision.delay_seconds)
        if decision.retry_seconds is None:
            self._stay_down(host, decision.why)
            return False
        self._stay_down(host, f"{decision.why}; the next try is in {decision.retry_seconds:g} s")
        return not await self._pause(decision.retry_seconds)

    async def _introduce(self, lines: list[ControlConnection]) -> bool:
        """Run the startup handshake with new incarnations and announce them to their peers. False: they have died; that death is handled
        like any other."""
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
                joined = PeerJoined(line.name, line.incarnation, self._introduction.addresses[line.name])
                self._tell_others(line, self._neighbours.get(line.name, ()), joined)
            if not await self._introduction.wait_connected(lines):
                return False
        except WorkerDiedError as error:
            self.condemn(lines[0], error.reason)
            return False
        for line in lines:
            self._tell_others(line, (MONITOR,), PeerJoined(line.name, line.incarnation, {}, line.placed.pid))
        return True

    async def _pause(self, seconds: float) -> bool:
        """Wait `seconds`, or until the run is stopping. Returns whether it is stopping."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._stopping.wait()
        return self._stopping.is_set()

    def _now(self) -> float:
        return asyncio.get_running_loop().time()
