"""What the launcher and a worker say to each other on the control connection: request in, token out, life and death.

Here: the message headers, one msgspec struct per kind, and `as_message` / `from_message`. Not here: who acts on them
(flowrt/cluster on one side, flowrt/workers on the other), the data path (edges of the graph). No torch.

Order of a worker's life: Start -> Listening -> Peers -> Connected -> (Submit, Cancel, Token, Ended ...) -> Drain or Stop ->
Statistics -> the line is closed. Failed may come at any time and is the last. From Peers on, Left and Joined tell of other workers' lives.
"""

from __future__ import annotations

from typing import ClassVar, Literal

import msgspec

from flowrt.emulation import EmulationStatistics
from flowrt.sampling_params import FinishReason, SamplingParams
from flowrt.transports.wire.message import Message


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """A request as a group sees it. `attempt` counts how often it has been placed; tokens carry it back.

    `max_tokens` and `seed` are those of `params`, or what the gateway filled in.
    """

    id: str
    attempt: int
    prompt_token_ids: tuple[int, ...]
    max_tokens: int
    seed: int = 0
    params: SamplingParams = SamplingParams()
    # Of each choice (none: (), for all) what was given to the client by an earlier attempt: replayed, not emitted.
    committed_token_ids: tuple[tuple[int, ...], ...] = ()
    ended_choices: tuple[int, ...] = ()  # those that ended in an earlier attempt: not computed any more


class Control(msgspec.Struct, frozen=True):
    """Root of all control messages; `kind` is the message's kind on the wire."""

    kind: ClassVar[str] = ""


class Start(Control, frozen=True):
    """First word to a worker: who it is, the whole expanded graph (JSON), the run's key, and how chatty to be."""

    kind: ClassVar[str] = "control.start"
    name: str
    incarnation: str
    graph: bytes
    key: bytes
    log_level: str = "warning"


class Progress(Control, frozen=True):
    """Loading: `done` of this worker's `total` operators have their weights; `text` names the one at work."""

    kind: ClassVar[str] = "control.progress"
    text: str
    done: int
    total: int


class Listening(Control, frozen=True):
    """Operators are loaded; the worker listens at these addresses (scheme -> address). Memory now, and before loading began."""

    kind: ClassVar[str] = "control.listening"
    addresses: dict[str, str]
    resident_bytes: int = 0
    imported_bytes: int = 0


class Peers(Control, frozen=True):
    """Where everybody listens (process -> scheme -> address) and who they are now. Sent once, when all listen."""

    kind: ClassVar[str] = "control.peers"
    addresses: dict[str, dict[str, str]]
    incarnations: dict[str, str]


class Connected(Control, frozen=True):
    """Every link of this worker is up; it can work."""

    kind: ClassVar[str] = "control.connected"


class Submit(Control, frozen=True):
    kind: ClassVar[str] = "control.submit"
    request: Request


class Cancel(Control, frozen=True):
    """End the attempt, or one choice of it."""

    kind: ClassVar[str] = "control.cancel"
    request_id: str
    attempt: int
    choice: int | None = None


class Logprobs(msgspec.Struct, frozen=True, array_like=True):
    """Natural logarithms of probabilities at one place of an output: the token's own, and (token id, logprob) of the likeliest, best
    first. They are those of the model's own distribution, before penalties, temperature and filters."""

    token: float
    top: tuple[tuple[int, float], ...] = ()


class Token(msgspec.Struct, frozen=True):
    """`token_ids` were sampled at output positions `index`, `index`+1, ... of this attempt's choice. `logprobs`: one each, or none.
    `degraded`: something that they come from was computed without an expert (`reliability.unavailable_expert: degrade`)."""

    request_id: str
    attempt: int
    index: int
    token_ids: tuple[int, ...]
    choice: int = 0
    logprobs: tuple[Logprobs, ...] = ()
    degraded: bool = False


class Tokens(Control, frozen=True):
    """What one step gave: several requests' tokens in one message."""

    kind: ClassVar[str] = "control.tokens"
    tokens: tuple[Token, ...]


class Ended(Control, frozen=True):
    """The end of a choice. With reason "error" it ends all choices of the attempt, and `error` tells the user why. `num_tokens` of its
    output, earlier attempts' included; None: not known."""

    kind: ClassVar[str] = "control.ended"
    request_id: str
    attempt: int
    reason: FinishReason
    error: str | None = None
    choice: int = 0
    num_tokens: int | None = None


class Drain(Control, frozen=True):
    """Finish what runs, admit nothing new. Answered by Drained."""

    kind: ClassVar[str] = "control.drain"


class Drained(Control, frozen=True):
    kind: ClassVar[str] = "control.drained"


class Ask(Control, frozen=True):
    """Asks for Statistics."""

    kind: ClassVar[str] = "control.ask"


class EdgeStatistics(msgspec.Struct, frozen=True):
    """What this worker sent on one edge, and over which transport."""

    edge: str
    transport: str
    num_messages: int
    payload_bytes: int


class Statistics(Control, frozen=True):
    kind: ClassVar[str] = "control.statistics"
    edges: tuple[EdgeStatistics, ...] = ()
    num_firings: int = 0
    compute_seconds: float = 0.0
    inline_seconds: float = 0.0  # the part of compute_seconds that ran on the event loop
    num_steps: int = 0
    late_wakeups: int = 0
    resident_bytes: int = 0
    strict_blocks: str = ""  # with strict numerics: which functions run in blocks of how many rows, for people
    emulation: EmulationStatistics | None = None
    num_asked_again: int = 0  # parts of the exchange with expert servers that were lost, or late, and cut anew
    fallbacks: tuple[str, ...] = ()  # links whose transport broke: which peer, what carried on, what was sent again; for people
    num_restarts: int = 0  # filled in by the launcher
    has_responded: bool = True  # the same; False: the worker is down or gave no response in time, its counts are older


class Stop(Control, frozen=True):
    """End now, in order. The worker sends Statistics and closes the line."""

    kind: ClassVar[str] = "control.stop"


class LinkLost(Control, frozen=True):
    """The link to `peer` broke. Usually the peer died and its death notice is on the way; if none comes, this ends the run, or that life
    of a peer which may die."""

    kind: ClassVar[str] = "control.link_lost"
    peer: str
    reason: str
    incarnation: str = ""  # the peer's; "": the life it has now


class Left(Control, frozen=True):
    """To a worker: this life of `process` is over; use it no more. May come twice, and before or after the link to it ends."""

    kind: ClassVar[str] = "control.left"
    process: str
    incarnation: str
    why: str


class Joined(Control, frozen=True):
    """To a worker: a new life of `process` listens at these addresses (scheme -> address); link up with it, then use it.

    It comes after Left for every earlier life. Which end calls is the same as at the start.
    """

    kind: ClassVar[str] = "control.joined"
    process: str
    incarnation: str
    addresses: dict[str, str]
    pid: int = 0  # to the monitor; 0: not on this machine, or not known


class Heartbeat(Control, frozen=True):
    """From the loop of a worker, at even intervals while it turns: relayed to the monitor.

    `sequence` counts the beats of this life; `lag_seconds`: how late the loop made this one; `num_firings` so far. `running` names the
    operation that computes, for how long it has and for how long at most it should (0: none is declared).
    """

    kind: ClassVar[str] = "control.beat"
    sequence: int
    lag_seconds: float
    num_firings: int
    running: str | None = None
    running_seconds: float = 0.0
    bound_seconds: float = 0.0
    incarnation: str = ""
    process: str = ""  # filled in by the launcher, which relays it
    pid: int = 0  # the same; 0: not on this machine, or not known


class Late(Control, frozen=True):
    """From a client: a server has owed it an answer for longer than is usual. Relayed to the monitor, which suspects it for a while.

    At most one per server and second. `incarnation`: that of the life which owes it. `by`: the client; filled in by the launcher.
    """

    kind: ClassVar[str] = "control.late"
    process: str
    incarnation: str
    waited_seconds: float
    expected_seconds: float
    by: str = ""


class Suspected(Control, frozen=True):
    """From the monitor: this life gives no sign of work. Nothing follows from it but a line for people."""

    kind: ClassVar[str] = "control.suspected"
    process: str
    incarnation: str
    why: str


class Cleared(Control, frozen=True):
    """From the monitor: what was suspected before shows signs of work again. For people."""

    kind: ClassVar[str] = "control.cleared"
    process: str
    incarnation: str
    why: str


class Condemned(Control, frozen=True):
    """From the monitor: this life is dead or as good as. All are told that it has left, then it is killed, so that it cannot come back."""

    kind: ClassVar[str] = "control.condemned"
    process: str
    incarnation: str
    why: str


class ExpertsLost(Control, frozen=True):
    """From a client of expert servers, each time this changes: which experts have no copy that it can ask, in a sentence; "" when all
    have one again. `follows`: what becomes of requests that need them: they wait, end in an error, or go on without (degrade)."""

    kind: ClassVar[str] = "control.experts_lost"
    text: str
    follows: Literal["wait", "error", "degrade"] = "wait"


class Failed(Control, frozen=True):
    """The worker cannot go on. `user` tells bad input (exit code 2) from a fault (exit code 3)."""

    kind: ClassVar[str] = "control.failed"
    error: str
    user: bool = False


_BY_KIND: dict[str, type[Control]] = {struct.kind: struct for struct in Control.__subclasses__()}


def as_message(control: Control) -> Message:
    return Message(kind=control.kind, header=control)


def from_message(message: Message) -> Control:
    """Raises msgspec.ValidationError for a message that is no control message."""
    struct = _BY_KIND.get(message.kind)
    if struct is None:
        raise msgspec.ValidationError(f"{message.kind!r} is no control message")
    return message.decode_header(struct)
