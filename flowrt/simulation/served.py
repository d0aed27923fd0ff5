"""Defines the records of the clients of a simulated graph, which invariants.py checks."""

from __future__ import annotations

from dataclasses import dataclass, field

from flowrt.actors.control import Statistics
from flowrt.actors.outputs import ChoiceEvent, ClientEvent, EndEvent, TokenEvent
from flowrt.simulation.case import SimulatedRequest

UNREADABLE_TEXT = "text that cannot be tokenized"
CONNECTION_TEXT = "the connection to the front end was lost"


@dataclass
class ClientRecord:
    """What one client saw: its events; `failure`: what a call raised; `has_left`: it did not wait for the end. `outage_seconds`: for how
    long, at most, an expert had no replica that the request's group could use, while the request was there. `no_group_seconds`: the same
    for no group. `crashes_alone`: processes that crashed or hung while a group computed it alone. `front_end`: the process that
    it is connected to."""

    request: SimulatedRequest
    request_id: str = ""
    front_end: str = ""
    events: list[ClientEvent] = field(default_factory=list)
    failure: str | None = None
    has_left: bool = False
    outage_seconds: float = 0.0
    no_group_seconds: float = 0.0
    crashes_alone: int = 0
    log: tuple[tuple[int, ...], str] | None = None  # tokens and text of the first choice, if the request had ended before it was read

    def tokens(self, choice: int) -> list[TokenEvent]:
        return [event for event in self.events if isinstance(event, TokenEvent) and event.choice == choice]

    @property
    def choices(self) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(each for event in self.tokens(choice) for each in event.token_ids) for choice in range(self.request.params.n))

    @property
    def degraded(self) -> tuple[tuple[int, ...], ...]:
        """For each choice, the indexes of tokens marked as degraded."""
        return tuple(
            tuple(each for event in self.tokens(choice) if event.degraded for each in event.indices)
            for choice in range(self.request.params.n)
        )

    @property
    def end(self) -> EndEvent | None:
        return next((event for event in self.events if isinstance(event, EndEvent)), None)

    @property
    def finish_reason(self) -> str:
        """The finish reason from the view of the client: an exception counts as `error`, leaving as `abort`."""
        if self.end is not None:
            return self.end.finish_reason
        return "error" if self.failure is not None else "abort" if self.has_left else ""

    @property
    def error(self) -> str | None:
        return self.end.error if self.end is not None else self.failure

    @property
    def num_ends(self) -> int:
        """The number of terminal events; the ends of single choices do not count."""
        ends = sum(isinstance(event, EndEvent) for event in self.events)
        return ends + (self.failure is not None) or int(self.has_left)  # it may leave while the answer or the refusal is on its way

    @property
    def has_events_after_end(self) -> bool:
        ended: set[int] = set()
        for event in self.events:
            if not isinstance(event, EndEvent) and event.choice in ended:
                return True
            if isinstance(event, ChoiceEvent):
                ended.add(event.choice)
        return False


@dataclass(frozen=True)
class Served:
    """What all clients saw, in the order of the requests, and each worker's last statistics. `failed` is the process that the run failed
    for, `failure` the text, `failed_seconds` the time since the first request; None in a good run. `num_poisoned`: how often a process
    computed the poison; `num_poison_parts`: different parts that end the servers that compute them. Both are the most of any launcher."""

    clients: tuple[ClientRecord, ...]
    statistics: dict[str, Statistics]
    failed: str | None = None
    failure: str | None = None
    failed_seconds: float | None = None
    num_poisoned: int = 0
    num_poison_parts: int = 0
