"""Counts the requests and tokens of a gateway, and the times of both in histograms. Pure: events with their times in, numbers out."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from flowrt.actors.front_end_messages import RefusalKind
from flowrt.histogram import Histogram
from flowrt.sampling_params import FinishReason

# vLLM's edges, and finer ones below them, so that quantiles of both can be compared.
VLLM_FIRST_TOKEN_EDGES = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
VLLM_TOKEN_EDGES = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
VLLM_REQUEST_EDGES = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0),
    *(60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
VLLM_CHOICES_EDGES = (1.0, 2.0, 5.0, 10.0, 20.0)
MAX_ENDED = 100  # requests that are kept after their end
_FIRST_TOKEN_EDGES = (0.0001, 0.00025, 0.0005, *VLLM_FIRST_TOKEN_EDGES)
_TOKEN_EDGES = (0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, *VLLM_TOKEN_EDGES)
_REQUEST_EDGES = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.2, *VLLM_REQUEST_EDGES)


def token_edges(max_model_len: int) -> tuple[float, ...]:
    """vLLM's edges of token counts: 1, 2, 5, 10, 20, ... up to the longest prompt with its output."""
    edges = (digit * 10.0**power for power in range(len(str(max_model_len))) for digit in (1, 2, 5))
    return tuple(edge for edge in edges if edge <= max_model_len)


@dataclass
class RequestTimes:
    """A request, from its admission to its end or later. None: not yet. `latest`: time of the latest token, by choice. `num_by_choice`:
    tokens of each choice."""

    number: int
    arrived: float
    placed: float | None = None
    first_token: float | None = None
    ended: float | None = None
    reason: FinishReason | None = None
    num_prompt_tokens: int = 0
    num_choices: int = 1
    max_tokens: int = 0
    num_moved: int = 0
    latest: dict[int, float] = field(default_factory=dict)
    num_by_choice: Counter[int] = field(default_factory=Counter)

    @property
    def num_tokens(self) -> int:
        return self.num_by_choice.total()


class RequestMetrics:
    """`num_moved`: how often a request went on in another group. Times are in seconds. `max_model_len`: the most tokens of a prompt and its
    output together."""

    def __init__(self, max_model_len: int = 1 << 20) -> None:
        self.ended: Counter[FinishReason] = Counter()
        self.refused: Counter[RefusalKind] = Counter()
        self.num_prompt_tokens = self.num_generation_tokens = self.num_moved = 0
        self.queue_seconds, self.request_seconds = Histogram(_REQUEST_EDGES), Histogram(_REQUEST_EDGES)
        self.first_token_seconds, self.token_seconds = Histogram(_FIRST_TOKEN_EDGES), Histogram(_TOKEN_EDGES)
        # Of requests that have ended: in a group, until the first token there, from there to the last one, and per token of these.
        self.group_seconds, self.prefill_seconds, self.decode_seconds = (Histogram(VLLM_REQUEST_EDGES) for _ in range(3))
        self.mean_token_seconds = Histogram(VLLM_TOKEN_EDGES)
        edges = token_edges(max_model_len)
        self.prompt_tokens, self.generation_tokens, self.choice_tokens, self.max_tokens = (Histogram(edges) for _ in range(4))
        self.num_choices = Histogram(VLLM_CHOICES_EDGES)
        self.ended_requests: deque[RequestTimes] = deque(maxlen=MAX_ENDED)  # the latest ones
        self._times: dict[int, RequestTimes] = {}  # by request, from its admission to its end

    def refuse(self, kind: RefusalKind, number: int = 1) -> None:
        self.refused[kind] += number

    def admit(self, request: int, now: float) -> None:
        self._times[request] = RequestTimes(request, now)

    def withdraw(self, request: int, kind: RefusalKind) -> None:
        """An admitted request turns out to be one to refuse. No-op once it was sent to a group."""
        if (times := self._times.get(request)) is not None and times.placed is None:
            del self._times[request]
            self.refuse(kind)

    def place(self, request: int, num_prompt_tokens: int, num_choices: int, max_tokens: int, now: float) -> None:
        """The request is sent to a group, perhaps not for the first time."""
        if (times := self._times.get(request)) is None:
            return
        if times.placed is not None:
            self.num_moved += 1
            times.num_moved += 1
            return
        times.placed, times.num_prompt_tokens, times.num_choices, times.max_tokens = now, num_prompt_tokens, num_choices, max_tokens
        self.num_prompt_tokens += num_prompt_tokens
        self.queue_seconds.observe(now - times.arrived)

    def add_tokens(self, request: int, choice: int, now: float, number: int = 1) -> None:
        if (times := self._times.get(request)) is None:
            return
        self.num_generation_tokens += number
        latest = times.latest.get(choice)
        if latest is not None:
            self.token_seconds.observe(now - latest)
        elif not times.latest:
            times.first_token = now
            self.first_token_seconds.observe(now - times.arrived)
        times.latest[choice] = now
        times.num_by_choice[choice] += number

    def open_requests(self) -> Iterator[RequestTimes]:
        """The oldest first."""
        return iter(self._times.values())

    def end(self, request: int, reason: FinishReason, now: float) -> None:
        if (times := self._times.pop(request, None)) is not None:
            self.ended[reason] += 1
            self.request_seconds.observe(now - times.arrived)
            times.ended, times.reason = now, reason
            self.ended_requests.append(times)
            if times.placed is not None:
                self._add_ended(times, times.placed, now)

    def _add_ended(self, times: RequestTimes, placed: float, now: float) -> None:
        longest = max(times.num_by_choice.values(), default=0)
        self.group_seconds.observe(now - placed)
        self.prompt_tokens.observe(times.num_prompt_tokens)
        self.generation_tokens.observe(times.num_tokens)
        self.choice_tokens.observe(longest)
        self.max_tokens.observe(times.max_tokens)
        self.num_choices.observe(times.num_choices)
        if times.first_token is not None:
            decode_seconds = max(times.latest.values()) - times.first_token
            self.prefill_seconds.observe(times.first_token - placed)
            self.decode_seconds.observe(decode_seconds)
            if longest > 1:
                self.mean_token_seconds.observe(decode_seconds / (longest - 1))
