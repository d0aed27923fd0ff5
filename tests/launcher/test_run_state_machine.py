"""Properties of the run state that hold after any sequence of events."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from launcher.run_driver import CLIENT, KILLED, SERVER, Driver, graph_of

from flowrt.actors.control import (
    DetectorReport,
    Failed,
    LinkLost,
    Listening,
    Stop,
)
from flowrt.errors import WorkerDiedError
from flowrt.launcher.actions import Action, End, Send, StartProcess
from flowrt.reliability.detector import ProcessState


class RunStateMachine(RuleBasedStateMachine):
    """Any order of forks, messages, deaths, timers and Stop."""

    @initialize(restarts=st.integers(0, 2), opens=st.sampled_from(["lazy", "start"]))
    def begin(self, restarts: int, opens: str) -> None:
        self.restarts = restarts
        self.driver = Driver(graph_of(restarts, opens))
        self.living: set[str] = set()  # forked, and not exited
        self.forking: set[str] = set()
        self.open: set[str] = set()
        self.forks: dict[str, list[float]] = {}
        self.ends: list[End] = []
        self.stopping: set[str] = set()
        self.incarnations = set(self.driver.state.incarnations.values())
        self.carry_out(self.driver.do(self.driver.state.start, self.driver.now))

    def carry_out(self, actions: Sequence[Action]) -> None:
        for action in actions:
            assert not self.ends, "no action follows the end"
            if isinstance(action, StartProcess):
                assert action.process not in self.living | self.forking, "two incarnations of a name"
                self.forking.add(action.process)
                self.forks.setdefault(action.process, []).append(self.driver.now)
                if len(self.forks[action.process]) > 1:
                    incarnation = self.driver.state.incarnations[action.process]
                    assert incarnation not in self.incarnations
                    self.incarnations.add(incarnation)
            elif isinstance(action, Send) and isinstance(action.control, Stop):
                self.stopping.add(action.worker)
            elif isinstance(action, End):
                self.ends.append(action)

    @precondition(lambda self: self.forking)
    @rule(data=st.data(), fails=st.integers(0, 4))
    def fork(self, data: st.DataObject, fails: int) -> None:
        name = data.draw(st.sampled_from(sorted(self.forking)))
        self.forking.discard(name)
        if fails == 0:
            self.carry_out(self.driver.do(self.driver.state.deaths.on_fork_failed, name, WorkerDiedError(name, "could not be forked")))
        else:
            self.living.add(name)
            self.open.add(name)
            self.carry_out(self.driver.do(self.driver.state.on_forked, name, 7))

    @precondition(lambda self: self.open)
    @rule(data=st.data(), kind=st.sampled_from(["listening", "connected", "failed", "link lost", "stop sent", "marked dead", "cleared"]))
    def receive(self, data: st.DataObject, kind: str) -> None:
        name, state = data.draw(st.sampled_from(sorted(self.open))), self.driver.state
        match kind:
            case "listening":
                self.carry_out(self.driver.do(state.on_listening, name, Listening({})))
            case "connected" if state.is_usable(name) or state.counts_messages(name):
                self.carry_out(self.driver.do(state.on_connected, name))
            case "failed":
                self.carry_out(self.driver.do(state.deaths.on_failed, name, Failed("broken")))
            case "link lost":
                self.carry_out(self.driver.do(state.deaths.on_link_lost, name, LinkLost(SERVER, "it broke")))
            case "stop sent" if name in self.stopping:
                self.stopping.discard(name)
                self.carry_out(self.driver.do(state.on_stop_sent, name))
            case "marked dead" | "cleared":
                verdict = ProcessState.DEAD if kind == "marked dead" else ProcessState.ALIVE
                report = DetectorReport(name, state.incarnations[name], verdict, "no heartbeat")
                self.carry_out(self.driver.do(state.on_detector_report, report))

    @precondition(lambda self: self.living)
    @rule(data=st.data(), is_announced=st.booleans())
    def exit(self, data: st.DataObject, is_announced: bool) -> None:
        name = data.draw(st.sampled_from(sorted(self.living)))
        if is_announced:
            self.carry_out(self.driver.do(self.driver.state.deaths.on_dying, name, ""))
        self.living.discard(name)
        self.carry_out(self.driver.do(self.driver.state.deaths.on_exited, name, KILLED))

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.open)))
        self.open.discard(name)
        self.stopping.discard(name)
        self.carry_out(self.driver.do(self.driver.state.deaths.on_connection_closed, name))

    @rule(seconds=st.sampled_from([0.0, 0.1, 0.5, 2.0, 20.0]))
    def wait(self, seconds: float) -> None:
        end = self.driver.now + seconds
        while (deadline := self.driver.state.deadline) is not None and deadline <= end:
            self.driver.now = max(self.driver.now, deadline)
            self.carry_out(self.driver.do(self.driver.state.on_time))
            self.open -= self.forking  # a fork closes the former connection first
        self.driver.now = end

    @rule()
    def stop(self) -> None:
        self.carry_out(self.driver.do(self.driver.state.stop))

    @invariant()
    def leaves_no_process_that_is_marked_dead_and_can_be_lost(self) -> None:
        for worker in self.driver.state.table.workers.values() if hasattr(self, "driver") else ():
            assert worker.marked_dead is None or not self.driver.state.table.can_kill(worker.process), worker.name

    @invariant()
    def ends_with_a_reason_and_stays_in_budget(self) -> None:
        for name, times in getattr(self, "forks", {}).items():
            assert name != CLIENT or len(times) == 1, "this process cannot be restarted"
            assert self.restarts > 0 or len(times) == 1
            soon = [at for at in times[1:] if at > self.driver.now - 30.0]
            assert len(soon) <= max(1, self.restarts) + 1, "more restarts than the budget allows, and one attempt after it was given up"
        for end in getattr(self, "ends", []):
            assert end.error is None or str(end.error)


RunStateMachine.TestCase.settings = settings(
    max_examples=150, stateful_step_count=60, deadline=None, suppress_health_check=list(HealthCheck)
)
TestAnySequence = RunStateMachine.TestCase
