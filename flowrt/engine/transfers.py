"""The decisions of the engine about KV transfers, and what a prefill worker offers of the prompts that it computes. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from flowrt.actors.control import KvOffer
from flowrt.engine.batch import Part
from flowrt.engine.offered_prompt import NO_STATE, NO_STEP, OfferedPrompt
from flowrt.engine.sequence import Sequence as TokenSequence
from flowrt.engine.sequence import SequenceState
from flowrt.engine.validation import num_pages_for


@dataclass(frozen=True, slots=True)
class Hold:
    """Decision: this prompt is computed. Its pages keep the KV until the attempt is cancelled."""

    request_id: str
    attempt: int
    num_tokens: int
    is_degraded: bool


@dataclass(frozen=True, slots=True)
class Pull:
    """Begin to pull KV into these pages, then call `pulled` or `pull_failed`. The pull is void when the attempt has ended. `first`: the
    first token that they lack. `slot`: for the state of recurrent layers."""

    request_id: str
    attempt: int
    kv: KvOffer
    pages: tuple[int, ...]
    first: int = 0
    slot: int = NO_STATE


def is_offered(siblings: Sequence[TokenSequence], streams: bool) -> bool:
    """Whether groups may pull the prompt of these choices: when it is computed, or from its first step on (`streams`).

    A prompt that is computed again is offered late, as what was computed of it may be wrong. So is that of a suspect, which may crash a
    group, too, and one with several choices.
    """
    first = siblings[0]
    if not first.prefills:
        return False
    if first.state is SequenceState.HELD:
        return True
    is_first_run = not (first.num_redone or first.num_preemptions or first.request.is_suspect) and first.request.params.n == 1
    return streams and is_first_run and first.state is SequenceState.RUNNING and first.latest_step > 0


def offered_prompts(
    requests: Iterable[Sequence[TokenSequence]],
    running: Mapping[tuple[int, int, int], Sequence[Part]],
    epoch: int,
    page_size: int,
    streams: bool,
) -> list[OfferedPrompt]:
    """The prompts that groups may pull. `requests`: the choices of each that is alive. `running`: steps by (epoch, micro_batch, step)."""
    steps = {sequence.name: (step, num_rows) for step, parts in running.items() for sequence, num_rows in parts}
    found = []
    for siblings in requests:
        if is_offered(siblings, streams):
            first, is_complete = siblings[0], siblings[0].state is SequenceState.HELD
            num_tokens = first.num_prompt_tokens
            step, num_rows = (NO_STEP, 0) if is_complete else steps.get(first.name, (NO_STEP, 0))
            committed = min(first.num_computed_tokens, num_tokens)
            pages, key = tuple(first.holding.pages[: num_pages_for(num_tokens, page_size)]), (first.request.id, first.request.attempt)
            slot = first.holding.state if is_complete and first.holding.state is not None else NO_STATE
            found.append(OfferedPrompt(*key, pages, num_tokens, epoch, committed, committed + num_rows, step, is_complete, slot))
    return found
