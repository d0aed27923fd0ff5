"""What the launcher and a worker say to each other on the control line: request in, token out, life and death.

Here: the message headers, one msgspec struct per kind, and `as_message` / `from_message`. Not here: who acts on them
(flowrt/cluster on one side, flowrt/workers on the other), the data path (edges of the graph). No torch.

Order of a worker's life: Start -> Listening -> Peers -> Connected -> (Submit, Cancel, Token, Ended ...) -> Drain or Stop ->
Statistics -> the line is closed. Failed may come at any time and is the last.
"""

from __future__ import annotations

from typing import ClassVar

import msgspec

from transports.message import Message


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """How tokens are drawn. temperature 0 is greedy; top_k 0 and top_p 1 are off. The gateway fills in the seed."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """A request as a group sees it. `attempt` counts how often it has been placed; tokens carry it back."""

    id: str
    attempt: int
    prompt_token_ids: tuple[int, ...]
    max_tokens: int
    sampling: Sampling = Sampling()
    stop_token_ids: tuple[int, ...] = ()  # user's stop ids; the model's end-of-sequence ids are added by the engine
    ignore_eos: bool = False
    committed_token_ids: tuple[int, ...] = ()  # already given to the client by an earlier attempt: replayed, not emitted


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
    local: tuple[str, ...] = ()  # workers of the same OS process, itself included: reached over inproc
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
    """Where everybody listens (process -> scheme -> address) and who they are now. Sent again when somebody joins."""

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
    kind: ClassVar[str] = "control.cancel"
    request_id: str
    attempt: int


class Token(msgspec.Struct, frozen=True):
    """`token_ids` were sampled at output positions `index`, `index`+1, ... of this attempt."""

    request_id: str
    attempt: int
    index: int
    token_ids: tuple[int, ...]


class Tokens(Control, frozen=True):
    """What one step gave: several requests' tokens in one message."""

    kind: ClassVar[str] = "control.tokens"
    tokens: tuple[Token, ...]


class Ended(Control, frozen=True):
    """The attempt's one terminal word. reason: stop, length, cancelled, error (then `error` says why, for the user)."""

    kind: ClassVar[str] = "control.ended"
    request_id: str
    attempt: int
    reason: str
    error: str | None = None


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

    edge: int
    transport: str
    num_messages: int
    payload_bytes: int


class Statistics(Control, frozen=True):
    kind: ClassVar[str] = "control.statistics"
    edges: tuple[EdgeStatistics, ...] = ()
    num_firings: int = 0
    compute_seconds: float = 0.0
    num_steps: int = 0
    late_wakeups: int = 0
    resident_bytes: int = 0


class Stop(Control, frozen=True):
    """End now, in order. The worker sends Statistics and closes the line."""

    kind: ClassVar[str] = "control.stop"


class LinkLost(Control, frozen=True):
    """The link to `peer` broke. Usually the peer died and its death notice is on the way; if none comes, this ends the run."""

    kind: ClassVar[str] = "control.link_lost"
    peer: str
    reason: str


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
