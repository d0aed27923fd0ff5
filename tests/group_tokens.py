"""Makes the tokens that a group sends, as tests name requests."""

from __future__ import annotations

from flowrt.actors.outputs import Logprobs, TokenEvent


def number_of(request_id: str) -> int:
    """The number of "request-7" is 7; that of a short name is made of its letters."""
    number = request_id.removeprefix("request-")
    return int(number) if number.isdigit() else int.from_bytes(number[:7].encode())


def request_named(number: int) -> str:
    """The short name with this number."""
    return number.to_bytes(7).lstrip(b"\0").decode()


def group_tokens(
    request_id: str,
    attempt: int,
    index: int,
    token_ids: tuple[int, ...],
    choice: int = 0,
    logprobs: tuple[Logprobs, ...] = (),
    degraded: bool = False,
    num_cached_tokens: int = 0,
    prompt_logprobs: tuple[Logprobs, ...] = (),
) -> TokenEvent:
    given = (logprobs, degraded, prompt_logprobs, num_cached_tokens, attempt)
    return TokenEvent(number_of(request_id), index, token_ids, "", choice, *given)
