"""The memory of a group for the state of its sequences: pages for paged layers, slots for recurrent ones, and the prefix cache over both.

The scheduler and the engine ask for tokens, and never which memory a model has. Of a recurrent layer only the state behind the newest token
exists. So a prefix is reused only up to a border where a state was kept: the end of a segment of the prefix cache, at which a step ended.
Prompts are cut at two such borders, the last one and the one behind which they differ from all that is cached.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from flowrt.engine.page_allocator import PageAllocator
from flowrt.engine.prefix_cache import PrefixCache, Segment
from flowrt.engine.sequence import Sequence as TokenSequence
from flowrt.engine.sequence import SequenceState
from flowrt.engine.state_memory import Pages, Slots, StateMemory
from flowrt.engine.validation import num_pages_for
from flowrt.graph.settings import SLOTS_OF_SEQUENCE, GraphLimits


@dataclass(frozen=True, slots=True)
class Reuse:
    """What a sequence begins with: so many tokens in pages of a sibling or in segments of the prefix cache. `border`: behind it, nothing
    that is cached has the sequence's tokens."""

    num_tokens: int = 0
    pages: Sequence[int] = ()
    segments: Sequence[Segment] = field(default_factory=tuple)
    border: int = 0


class GroupMemory:
    """`num_slots`: slots of recurrent state; 0: the model has no recurrent layer. `chunk_tokens` as in the scheduler."""

    def __init__(self, limits: GraphLimits, chunk_tokens: int = 0, num_slots: int = 0) -> None:
        size = limits.page_size
        # Prefixes are shared up to a multiple of this: in whole pages, and so that the rest is cut as without sharing.
        self._share_tokens, self._chunk_tokens = math.lcm(size, chunk_tokens or 1), chunk_tokens
        self._caches = limits.enable_prefix_caching
        pages, slots = PageAllocator(limits.kv_pages), PageAllocator(num_slots) if num_slots else None
        self._cache = PrefixCache(pages, size, self._share_tokens // size, slots)
        self.pages = Pages(pages, self._cache, size)
        self.slots = None if slots is None else Slots(slots, self._cache.states)
        self._kinds: tuple[StateMemory, ...] = (self.pages,) if self.slots is None else (self.pages, self.slots)

    def cached_pages(self) -> list[int]:
        """The pages that the prefix cache holds."""
        return self._cache.pages()

    def cached_slots(self) -> list[int]:
        """The slots that the prefix cache holds."""
        return [*self._cache.states.by_slot]

    # What a sequence begins with

    def find(self, sequence: TokenSequence) -> Reuse | None:
        """What a sequence can begin with; None while a sibling computes it. At least one token is left to compute, or to pull."""
        shared = self._shared_pages(sequence)
        if shared is None:
            return None
        if shared:
            return Reuse(len(shared) * self.pages.page_size, shared)
        return Reuse() if sequence.computes_whole_prompt else self._cached(sequence)

    def _shared_pages(self, sequence: TokenSequence) -> list[int] | None:
        """Pages of the prompt that a sibling has filled; None while a sibling is filling them. At least one token is left to compute. With
        recurrent layers siblings share by the prefix cache, which keeps states when the prompt is through."""
        if sequence.computes_whole_prompt:
            return []
        num_tokens = (sequence.num_prompt_tokens - 1) // self._share_tokens * self._share_tokens
        with_pages = (SequenceState.PULLING, SequenceState.RUNNING)
        running = [other for other in sequence.siblings if other.state in with_pages] if num_tokens else []
        if self.slots is not None:
            is_cached = any(other.num_computed_tokens >= other.num_prompt_tokens for other in running)
            return None if running and self._caches and not is_cached else []
        for other in running:
            if other.num_computed_tokens >= num_tokens:
                return other.holding.pages[: num_tokens // self.pages.page_size]
        return None if running else []

    def _cached(self, sequence: TokenSequence) -> Reuse:
        """What the prefix cache has of a sequence. At least one token is left to compute, or to pull; strict: and all of the output. A
        transfer brings the state, too."""
        only_prompt = self._chunk_tokens or sequence.kv is not None
        num_tokens = sequence.num_prompt_tokens if only_prompt else len(sequence.tokens)
        found = self._cache.find(sequence.prefix, sequence.tokens, num_tokens - 1)
        border = len(found) * self._share_tokens
        if self.slots is not None and sequence.kv is None:
            while found and found[-1].state is None:
                found.pop()
        return Reuse(len(found) * self._share_tokens, segments=found, border=border)

    def fits(self, sequence: TokenSequence, reuse: Reuse, others: Iterable[TokenSequence]) -> bool:
        """Whether a sequence that begins so can be admitted beside `others`: with a page of headroom for each that may still grow."""
        size, soon = self.pages.page_size, min(len(sequence.tokens) + 1, sequence.max_kv_tokens)
        headroom = sum(len(other.holding.pages) < num_pages_for(other.max_kv_tokens, size) for other in others)
        needed = num_pages_for(soon, size) - reuse.num_tokens // size + headroom
        if self.pages.num_free - self._cache.num_idle_of(reuse.segments) < needed:
            return False
        begun = reuse.segments[-1] if reuse.segments and sequence.kv is None else None
        return self.slots is None or self.slots.num_free - (begun in self._cache.states.idle) >= SLOTS_OF_SEQUENCE

    def admit(self, sequence: TokenSequence, reuse: Reuse) -> None:
        """Give a sequence what it begins with, and all that its tokens need."""
        holding = sequence.holding
        if reuse.pages:
            self.pages.share(holding, reuse.pages)
        else:
            holding.pages = self._cache.take(reuse.segments, holding.holder)
        if self.slots is not None and self._caches:
            last = (sequence.num_prompt_tokens - 1) // self._share_tokens * self._share_tokens
            holding.borders = tuple(each for each in (reuse.border, last) if each > reuse.num_tokens)
        if self.slots is not None and reuse.segments and sequence.kv is None:
            self.slots.share(holding, [self._cache.take_state(reuse.segments[-1])])
        is_reserved = self.reserve(sequence)
        assert is_reserved, sequence.name

    # What it holds while it runs

    def reserve(self, sequence: TokenSequence) -> bool:
        """Take what the next steps of a sequence need for its tokens. False, with no change: there is not enough."""
        holding, num_tokens = sequence.holding, len(sequence.tokens)
        if any(kind.num_missing(holding, num_tokens) > kind.num_free for kind in self._kinds):
            return False
        return all([kind.reserve(holding, num_tokens) for kind in self._kinds])

    def has_enough(self, sequence: TokenSequence) -> bool:
        """Whether a sequence holds what its tokens need."""
        return not any(kind.num_missing(sequence.holding, len(sequence.tokens)) for kind in self._kinds)

    def end_of_step(self, sequence: TokenSequence, end: int) -> int:
        """The number of tokens at which a step ends that could compute a sequence up to `end`."""
        start = sequence.num_computed_tokens
        return min((border for border in sequence.holding.borders if start < border < end), default=end)

    def commit(self, sequence: TokenSequence) -> None:
        """A step of the sequence has committed: its state behind `num_computed_tokens` counts. A step that is dropped needs no call."""
        holding, num_tokens, num_prompt = sequence.holding, sequence.num_computed_tokens, sequence.num_prompt_tokens
        for kind in self._kinds:
            kind.commit(holding)
        if self.slots is None or not self._caches or sequence.is_degraded:
            return
        is_border = num_tokens in holding.borders
        if is_border or (num_tokens >= num_prompt and num_tokens % self._share_tokens == 0 and not self._chunk_tokens):
            self.slots.keep(holding, num_tokens, may_evict=is_border)

    def cache(self, sequence: TokenSequence) -> None:
        """Keep the state of a sequence that has just got a token, which shows that it is finite. Strict: that of whole chunks of its
        prompt, as output computed row by row has other bits than the same tokens in a prompt. Of the states of recurrent layers behind
        its prompt it keeps the latest."""
        holding, num_computed, num_prompt = sequence.holding, sequence.num_computed_tokens, sequence.num_prompt_tokens
        if self._caches and not sequence.is_degraded:
            num_tokens = min(num_computed, num_prompt) if self._chunk_tokens else num_computed
            self._cache.insert(sequence.prefix, sequence.tokens, holding.pages, num_tokens, holding.kept)
            older = num_computed - self._share_tokens
            if num_computed in holding.kept and older > num_prompt:
                self._cache.drop_idle_state(sequence.prefix, older)
        if self.slots is not None:
            self.slots.give(holding)

    def forget(self, sequence: TokenSequence) -> None:
        """Keep nothing of a sequence for others: its state may be wrong."""
        self._cache.forget(sequence.holding.pages)
        if self.slots is not None:
            self._cache.forget([page for segment in sequence.prefix.segments[:1] for page in segment.pages])
            self.slots.give(sequence.holding)

    def hold(self, sequence: TokenSequence) -> None:
        """Free what only steps of a sequence need; others read its state."""
        if self.slots is not None:
            self.slots.release_spare(sequence.holding)

    def release(self, sequence: TokenSequence) -> None:
        """Free all that a sequence holds. It must not be in a step."""
        for kind in self._kinds:
            kind.release(sequence.holding)
        sequence.prefix.segments = []
