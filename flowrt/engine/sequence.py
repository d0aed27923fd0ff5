"""A sequence: what a group knows of one request while it works on it.

Here: Sequence and its states. Not here: who moves it from state to state (scheduler.py, engine.py). Pure data.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Literal

from flowrt.actors.control import Request

State = Enum("State", ["WAITING", "RUNNING", "ENDED"])
Reason = Literal["stop", "length", "cancelled", "error"]


@dataclass(eq=False, slots=True)
class Sequence:
    """One attempt of a request. `tokens` is the prompt followed by the output; the first `num_computed_tokens` have KV in `pages`.

    WAITING holds no page, RUNNING does. While `in_step` its rows are being computed by `lane`, and neither its pages nor its
    tokens may change. `order` is its place in the queue, for its whole life: a preempted sequence goes back to where it was.
    `num_computed_tokens` moves only when a step commits, so rolling a step back leaves it as it is.
    """

    request: Request
    order: int
    tokens: list[int] = field(init=False)
    num_prompt_tokens: int = field(init=False)
    state: State = State.WAITING
    num_computed_tokens: int = 0
    pages: list[int] = field(default_factory=list)
    lane: int = -1
    in_step: bool = False
    cancelled: bool = False  # its end has been told; its pages stay its own until its step is over
    num_preemptions: int = 0

    def __post_init__(self) -> None:
        self.tokens = [*self.request.prompt_token_ids, *self.request.committed_token_ids]
        self.num_prompt_tokens = len(self.request.prompt_token_ids)

    @property
    def name(self) -> str:
        """Owner of its pages: the request and the attempt."""
        return f"{self.request.id}/{self.request.attempt}"

    @property
    def num_output_tokens(self) -> int:
        return len(self.tokens) - self.num_prompt_tokens

    @property
    def num_missing_tokens(self) -> int:
        """Tokens whose KV is not computed: 1 while decoding, more before the prompt is through."""
        return len(self.tokens) - self.num_computed_tokens

    @property
    def most_kv_tokens(self) -> int:
        """Positions it may ever need: the last output token is never fed back."""
        return self.num_prompt_tokens + self.request.max_tokens - 1

    @property
    def decodes(self) -> bool:
        """Whether it needs one row for its next token. A prompt of one token does not decode yet: it must not overtake older
        prompts."""
        return self.num_computed_tokens > 0 and self.num_missing_tokens == 1

    def end_reason(self, eos_token_ids: frozenset[int]) -> Reason | None:
        """Why the output ends here, or None. A stop token counts as output."""
        if self.num_output_tokens:
            last = self.tokens[-1]
            if last in self.request.stop_token_ids or (last in eos_token_ids and not self.request.ignore_eos):
                return "stop"
        return "length" if self.num_output_tokens >= self.request.max_tokens else None
