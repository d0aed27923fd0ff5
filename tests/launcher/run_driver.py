"""A run state with a clock, for tests of its decisions. It carries out no action."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Self

from flowrt.actors.control import Listening
from flowrt.graph.model import Edge, Graph, Node
from flowrt.graph.settings import ReliabilitySettings
from flowrt.launcher import events
from flowrt.launcher.actions import Action, Announce, End, StartProcess
from flowrt.launcher.run_state import RunState
from flowrt.transports.contract import Identity

CLIENT, SERVER, OTHER = "client", "server", "other"
KILLED = "was killed by SIGKILL"


def graph_of(restarts: int = 3, opens: str = "lazy", recovery: str = "fine") -> Graph:
    """One worker whose death ends the run, and two servers that it sends requests to."""
    nodes = [Node(CLIENT, "nothing", CLIENT), Node(SERVER, "experts", SERVER), Node(OTHER, "experts", OTHER)]
    edges = [Edge(CLIENT, "y", server, "x", transport="zmq", open=opens) for server in (SERVER, OTHER)]  # type: ignore[arg-type]
    reliability = ReliabilitySettings(detector=False, restarts=restarts, recovery=recovery)  # type: ignore[arg-type]
    return Graph.of(nodes, edges, reliability=reliability)


class Driver:
    """A run state with a clock, which carries out no action."""

    def __init__(
        self,
        graph: Graph | None = None,
        packed: dict[str, list[str]] | None = None,
        standby_loads: Mapping[str, str] = {},
        names: Sequence[str] = (CLIENT, SERVER, OTHER),
    ) -> None:
        self.numbers = iter(range(10**6))
        self.names, self.processes = names, packed or {name: [name] for name in names}
        self.state = RunState(
            graph or graph_of(),
            self.processes,
            [],
            new_incarnation=lambda: str(next(self.numbers)),
            response_seconds=60.0,
            stop_seconds=5.0,
            standby_loads=standby_loads,
        )
        self.now = 100.0

    def do(self, event: Callable[..., None], *arguments: object) -> list[Action]:
        return self.state.handle(self.now, event, *arguments)

    def pass_time(self, seconds: float) -> list[Action]:
        """Run every timer that is due within `seconds`."""
        end, actions = self.now + seconds, []
        while (deadline := self.state.deadline) is not None and deadline <= end:
            self.now = max(self.now, deadline)
            actions += self.do(self.state.on_time)
        self.now = end
        return actions

    def start_of(self, name: str) -> StartProcess:
        """The start of the current incarnation of a process."""
        return StartProcess(name, (Identity(name, self.state.incarnations[name]),))

    def load(self) -> Self:
        self.do(self.state.start, self.now)
        for process in self.processes:
            self.do(self.state.on_forked, process, 7)
        return self

    def connect(self) -> Self:
        self.load()
        for name in self.names:
            self.do(self.state.on_listening, name, Listening({"zmq": name}))
        return self

    def begin(self) -> Self:
        self.connect()
        for name in self.names:
            self.do(self.state.on_connected, name)
        return self

    def die(self, name: str) -> list[Action]:
        return [*self.do(self.state.deaths.on_exited, name, KILLED), *self.do(self.state.deaths.on_connection_closed, name)]

    def restart(self, name: str) -> list[Action]:
        """The process dies, and what is due then is done, such as its start."""
        return [*self.die(name), *self.pass_time(0.0)]


def announced(actions: Sequence[Action]) -> list[events.Event]:
    return [action.event for action in actions if isinstance(action, Announce)]


def end_of(actions: Sequence[Action]) -> str:
    (end,) = [action for action in actions if isinstance(action, End)]
    return str(end.error)
