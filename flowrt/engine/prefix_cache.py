"""Keeps the state of sequences for later ones that begin with the same tokens. Pure; only GroupMemory calls it.

What is kept are *segments*: a page, and with strict numerics as many as end where a chunk of a prompt does. A segment is found by its
content: the SHA-256 of its tokens behind that of the segment before it, the first behind its namespace. Its tokens and the namespace are
compared too, so two contents with one hash are never taken for each other. Only whole segments are kept, and no step writes to them any
more. So nothing has to be copied on write: a sequence computes the rest in pages of its own.

The namespace is the `cache_salt` of the request and, in a strict group, whether its KV begins with that of a fast prefill worker. The KV
behind that depends on it, and is not strict either, also when the group computes a preempted sequence again.

The cache is a holder of its pages (page_allocator.py). Those that no sequence holds are *idle*. They are evicted when a sequence needs
pages, the least recently used first, and of one content its end first.

A segment may also have the state of recurrent layers behind its last token, in a slot (state_memory.py). Idle slots are evicted alike,
without the pages of their segments.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256

from flowrt.engine.page_allocator import PageAllocator

HOLDER = "the prefix cache"


@dataclass(eq=False, slots=True)
class Segment:
    """Cached tokens, behind those of `parent`, and the pages with their KV. `state`: the slot with the recurrent state behind them."""

    digest: bytes
    namespace: tuple[str, bool]
    parent: Segment | None
    tokens: tuple[int, ...]
    pages: tuple[int, ...]
    children: list[Segment] = field(default_factory=list)
    state: int | None = None


class Prefix:
    """What the cache knows of one sequence: the digests of its segments, and its first segments as far as they are cached."""

    def __init__(self, salt: str) -> None:
        self.salt = salt
        self.is_weaker = False  # in a strict group: its KV begins with that of a fast prefill worker
        self.digests: list[bytes] = []
        self.segments: list[Segment] = []

    @property
    def namespace(self) -> tuple[str, bool]:
        return self.salt, self.is_weaker


def content_digest(before: bytes, tokens: Sequence[int]) -> bytes:
    return sha256(before + array("q", tokens).tobytes()).digest()


class PrefixCache:
    """`segment_pages` is the size of a segment, `page_size` the tokens of a page. `states`: the slots with their recurrent states."""

    def __init__(self, pages: PageAllocator, page_size: int, segment_pages: int, slots: PageAllocator | None = None) -> None:
        self.segment_tokens = segment_pages * page_size
        self.states = CachedStates(slots or PageAllocator(1))
        self._pages, self._segment_pages = pages, segment_pages
        self._segments: dict[bytes, Segment] = {}
        self._by_page: dict[int, Segment] = {}  # by the first page of each
        self._idle: dict[Segment, None] = {}  # the least recently used first

    @property
    def num_idle(self) -> int:
        """Pages that no sequence holds."""
        return len(self._idle) * self._segment_pages

    def pages(self) -> list[int]:
        return [page for segment in self._segments.values() for page in segment.pages]

    def find(self, prefix: Prefix, tokens: Sequence[int], num_tokens: int) -> list[Segment]:
        """The cached segments of these tokens from the first on, of at most `num_tokens`."""
        found: list[Segment] = []
        for number in range(num_tokens // self.segment_tokens):
            segment = self._segment(prefix, tokens, number, found[-1] if found else None)
            if segment is None:
                break
            found.append(segment)
        return found

    def num_idle_of(self, segments: Sequence[Segment]) -> int:
        """How many pages of these segments are idle."""
        return sum(segment in self._idle for segment in segments) * self._segment_pages

    def take(self, segments: Sequence[Segment], holder: str) -> list[int]:
        """Let `holder` hold the pages of these segments. `release` follows its `free`."""
        pages = [page for segment in segments for page in segment.pages]
        self._pages.share(pages, holder)
        for segment in segments:
            self._idle.pop(segment, None)
        return pages

    def drop_idle_state(self, prefix: Prefix, num_tokens: int) -> None:
        """Drop the state behind the first tokens of a sequence, unless another one begins with it."""
        for segment in prefix.segments[num_tokens // self.segment_tokens - 1 :][:1]:
            if segment in self.states.idle:
                self.states.drop(segment)

    def take_state(self, segment: Segment) -> int:
        """The slot with the state behind a segment, which a sequence will hold. It is not idle from now on."""
        assert segment.state is not None
        self.states.idle.pop(segment, None)
        return segment.state

    def insert(self, prefix: Prefix, tokens: Sequence[int], pages: Sequence[int], num_tokens: int, states: Mapping[int, int] = {}) -> None:
        """Keep the segments of a sequence whose first `num_tokens` have KV in `pages`, except those that are kept already. `states`: by
        number of tokens, the slots with the states behind them."""
        self._insert(prefix, tokens, pages, num_tokens)
        for end, slot in states.items():
            segment = prefix.segments[end // self.segment_tokens - 1] if end // self.segment_tokens <= len(prefix.segments) else None
            if segment is not None and segment.state is None and self._segments.get(segment.digest) is segment:
                self.states.add(segment, slot)

    def _insert(self, prefix: Prefix, tokens: Sequence[int], pages: Sequence[int], num_tokens: int) -> None:
        segments = prefix.segments
        for number in range(len(segments), num_tokens // self.segment_tokens):
            parent = segments[-1] if segments else None
            if parent is not None and self._segments.get(parent.digest) is not parent:
                return  # it was dropped
            if (segment := self._segment(prefix, tokens, number, parent)) is None:
                digest = self._digest(prefix, tokens, number)
                if digest in self._segments:
                    return  # of another content
                start = number * self._segment_pages
                own = tuple(pages[start : start + self._segment_pages])
                segment = Segment(digest, prefix.namespace, parent, self._tokens(tokens, number), own)
                self._pages.share(segment.pages, HOLDER)
                self._segments[digest] = self._by_page[segment.pages[0]] = segment
                if parent is not None:
                    parent.children.append(segment)
            segments.append(segment)

    def release(self, units: Sequence[int]) -> None:
        """A sequence has freed these pages. Those that no other holds are idle from now on."""
        for page in reversed(units):
            segment = self._by_page.get(page)
            if segment is not None and self._pages.holders_of(page) == {HOLDER}:
                self._idle[segment] = None

    def evict(self, num_units: int) -> None:
        """Free at least so many idle pages, or all."""
        target = self._pages.num_free + num_units
        while self._idle and self._pages.num_free < target:
            self._drop(next(iter(self._idle)))

    def forget(self, pages: Sequence[int]) -> None:
        """Keep none of these pages, nor what was computed from them: their KV may be wrong."""
        for page in pages:
            if (segment := self._by_page.get(page)) is not None:
                self._drop(segment)

    def _drop(self, first: Segment) -> None:
        """Drop a segment and those behind it. Their pages are free, unless a sequence holds them."""
        if first.parent is not None:
            first.parent.children.remove(first)
        dropped = [first]
        while dropped:
            segment = dropped.pop()
            dropped += segment.children
            del self._segments[segment.digest], self._by_page[segment.pages[0]]
            self._idle.pop(segment, None)
            self._pages.free(segment.pages, HOLDER)
            self.states.drop(segment)

    def _segment(self, prefix: Prefix, tokens: Sequence[int], number: int, parent: Segment | None) -> Segment | None:
        """The cached segment with this content, behind `parent`; None: there is none."""
        segment = self._segments.get(self._digest(prefix, tokens, number))
        if segment is None or segment.parent is not parent or segment.namespace != prefix.namespace:
            return None
        return segment if segment.tokens == self._tokens(tokens, number) else None

    def _digest(self, prefix: Prefix, tokens: Sequence[int], number: int) -> bytes:
        digests = prefix.digests
        while len(digests) <= number:
            before = digests[-1] if digests else b"weaker " * prefix.is_weaker + prefix.salt.encode()
            digests.append(content_digest(before, self._tokens(tokens, len(digests))))
        return digests[number]

    def _tokens(self, tokens: Sequence[int], number: int) -> tuple[int, ...]:
        return tuple(tokens[number * self.segment_tokens : (number + 1) * self.segment_tokens])


class CachedStates:
    """The recurrent states of segments. `idle`: those that no sequence holds, the least recently used first."""

    def __init__(self, slots: PageAllocator) -> None:
        self._slots = slots
        self.by_slot: dict[int, Segment] = {}
        self.idle: dict[Segment, None] = {}

    @property
    def num_idle(self) -> int:
        return len(self.idle)

    def add(self, segment: Segment, slot: int) -> None:
        """Hold the state of a segment that has none. A sequence holds it, too."""
        self._slots.share([slot], HOLDER)
        segment.state, self.by_slot[slot] = slot, segment

    def release(self, units: Sequence[int]) -> None:
        """A sequence has freed these slots. Those that no other holds are idle from now on."""
        for slot in units:
            if (segment := self.by_slot.get(slot)) is not None and self._slots.holders_of(slot) == {HOLDER}:
                self.idle[segment] = None

    def evict(self, num_units: int) -> None:
        """Drop at least so many idle states, or all."""
        for segment in list(self.idle)[:num_units]:
            self.drop(segment)

    def drop(self, segment: Segment) -> None:
        """Drop the state of a segment, if it has one. Its slot is free, unless a sequence holds it."""
        if segment.state is not None:
            del self.by_slot[segment.state]
            self.idle.pop(segment, None)
            self._slots.free([segment.state], HOLDER)
            segment.state = None
