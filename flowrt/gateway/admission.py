"""Decides which new requests a gateway admits, by the number of active requests and the length of their prompts. Pure."""

from __future__ import annotations

from flowrt.actors.front_end_messages import Refusal


class Admission:
    """Bounds the requests that have not ended (`max_requests`), and the tokens of their prompts together (`max_prompt_tokens`)."""

    def __init__(self, max_requests: int, max_prompt_tokens: int) -> None:
        self.max_requests, self._max_prompt_tokens = max_requests, max_prompt_tokens
        self._prompt_tokens: dict[int, int] = {}  # of the active requests, by number
        self._num_prompt_tokens = 0  # of all of them
        self.refuses_all: str | None = None  # why no new request is admitted, whatever it is

    @property
    def overload(self) -> str:
        """Why any further request is refused until an active one has ended; "" if it is not."""
        is_full = len(self._prompt_tokens) >= self.max_requests
        return f"too many active requests ({len(self._prompt_tokens)}, limit {self.max_requests})" if is_full else ""

    def refusal_now(self, num_tokens: int = 0) -> Refusal | None:
        """Why a request with a prompt of about so many tokens is not admitted now; None: it is. Without another request any prompt is
        admitted."""
        if self.refuses_all is not None:
            return Refusal("unavailable", self.refuses_all)
        if overload := self.overload:
            return Refusal("overloaded", overload)
        if self._num_prompt_tokens and self._num_prompt_tokens + num_tokens > self._max_prompt_tokens:
            numbers = f"{self._num_prompt_tokens} tokens, limit {self._max_prompt_tokens}"
            return Refusal("overloaded", f"the prompts of the active requests are too long ({numbers})")
        return None

    def count(self, request: int, num_tokens: int) -> None:
        """The request is active, and its prompt has so many tokens. A repeated call replaces an estimate."""
        self._num_prompt_tokens += num_tokens - self._prompt_tokens.get(request, 0)
        self._prompt_tokens[request] = num_tokens

    def end(self, request: int) -> None:
        """The request has ended."""
        self._num_prompt_tokens -= self._prompt_tokens.pop(request)
