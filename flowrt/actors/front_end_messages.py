"""Messages between a front end and the gateway, on the front end's control connection. No text travels: only parameters and token ids.

A front end numbers its requests. It sends Reserve; after Reserved without a refusal it tokenizes the prompt and sends Place. RequestOutput
brings the tokens, and as the last one of each request its end. CancelRequest may be sent at any time after Reserve.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from flowrt.actors.control import Control
from flowrt.actors.outputs import ClientEvent, EndEvent
from flowrt.sampling_params import SamplingParams

RefusalKind = Literal["overloaded", "unavailable", "invalid"]
Topic = Literal["health", "ready", "metrics", "status", "page", "drain"]


class Refusal(msgspec.Struct, frozen=True):
    """Why a request is not admitted: too many others (overloaded), no service now (unavailable), or it can never be served (invalid)."""

    kind: RefusalKind
    text: str


class Reserve(Control, frozen=True):
    """From a front end: admit a request with these parameters. `num_tokens` estimates the length of its prompt. `num_refused`: requests
    that the front end itself has refused since its last message, because the gateway was full."""

    number: int
    params: SamplingParams
    num_tokens: int
    num_refused: int = 0


class Reserved(Control, frozen=True):
    """To a front end: the response to Reserve. A request with a `refusal` has ended. `overload`: why the next one would be refused now,
    whatever it is; "" if it would not."""

    number: int
    refusal: Refusal | None = None
    overload: str = ""


class Origin(msgspec.Struct, frozen=True, array_like=True):
    """Names a request that outlives its launcher: the id of its HTTP request, the number of its prompt there and of all prompts, and what a
    front end needs to respond to a client that comes back, in the front end's own form. `is_named`: the client has given the id."""

    id: Annotated[str, Meta(min_length=1, max_length=128)]
    prompt: Annotated[int, Meta(ge=0, lt=1 << 16)]
    num_prompts: Annotated[int, Meta(ge=1, lt=1 << 16)]
    form: bytes
    is_named: bool = False


class Place(Control, frozen=True):
    """From a front end: the prompt of a reserved request. `origin`: where the graph has a request log."""

    number: int
    prompt_token_ids: tuple[int, ...]
    origin: Origin | None = None


class Attach(Control, frozen=True):
    """From a front end: send the outputs of a request once more, from the first on. `id`, `prompt`: of its Origin."""

    number: int
    id: str
    prompt: int


class Attached(Control, frozen=True):
    """To a front end: the response to Attach. `origin` None: there is no such request."""

    number: int
    prompt_token_ids: tuple[int, ...] = ()
    origin: Origin | None = None


class CancelRequest(Control, frozen=True):
    """From a front end: its client has left, or sent what cannot be served (`is_invalid`). No RequestOutput follows."""

    number: int
    is_invalid: bool = False


class StopChoice(Control, frozen=True):
    """From a front end: the text of a choice contains a stop string, so it needs no more tokens."""

    number: int
    choice: int


class RequestOutput(msgspec.Struct, frozen=True, array_like=True):
    """The next events of a request; `number`: of the front end. Those that the gateway commits name the gateway's number."""

    number: int
    events: tuple[ClientEvent, ...]

    @property
    def end(self) -> EndEvent | None:
        last = self.events[-1]
        return last if isinstance(last, EndEvent) else None


class Outputs(Control, frozen=True):
    """To a front end: what is new of its requests."""

    outputs: tuple[RequestOutput, ...]


class StateQuery(Control, frozen=True):
    """From a front end: asks for the state of the run; "drain" first makes it admit no new requests. The response is StateReport.
    `num_refused`: as of Reserve."""

    number: int
    topic: Topic
    num_refused: int = 0


class StateReport(Control, frozen=True):
    """To a front end: whether the run is healthy or ready, and the details as text."""

    number: int
    is_ok: bool
    text: str
