"""The prefix cache: it gives pages with exactly the tokens looked up, evicts none in use, and keeps none that may be wrong."""

from __future__ import annotations

from hashlib import sha256

import msgspec
import pytest
from engine.toy_group import VOCABULARY, ToyGroup, expected_output, request
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from flowrt.actors.control import KvOffer, Request
from flowrt.engine import prefix_cache
from flowrt.engine.engine import Engine, StartStep
from flowrt.engine.page_allocator import PageAllocator
from flowrt.engine.prefix_cache import HOLDER, Prefix, PrefixCache
from flowrt.graph.settings import GraphLimits

Content = tuple[str, tuple[int, ...]]  # the salt, and all tokens up to the end of a page
LIMITS = GraphLimits(max_num_seqs=4, kv_pages=16, page_size=4, max_tokens=8, max_num_batched_tokens=64)


@pytest.fixture
def group() -> ToyGroup:
    return ToyGroup(LIMITS)


class _Reader:
    """A sequence as the scheduler keeps it."""

    def __init__(self, name: str, salt: str, tokens: list[int]) -> None:
        self.name, self.salt, self.tokens, self.prefix = name, salt, tokens, Prefix(salt)
        self.pages: list[int] = []


class CacheMachine(RuleBasedStateMachine):
    """The model: what each page contains, and which pages may be wrong. Digests are one of four, so that most contents collide."""

    is_colliding = False

    @initialize(num_pages=st.integers(1, 14), page_size=st.integers(1, 2), segment_pages=st.integers(1, 2))
    def begin(self, num_pages: int, page_size: int, segment_pages: int) -> None:
        self.patch = pytest.MonkeyPatch()
        if self.is_colliding:
            self.patch.setattr(prefix_cache, "content_digest", lambda before, tokens: bytes([sum(tokens) % 4]))
        self.allocator, self.page_size = PageAllocator(num_pages), page_size
        self.cache = PrefixCache(self.allocator, page_size, segment_pages)
        self.readers: dict[str, _Reader] = {}
        self.content: dict[int, Content] = {}
        self.wrong: set[int] = set()
        self.num_begun = 0

    def teardown(self) -> None:
        self.patch.undo()

    @rule(salt=st.sampled_from(["", "", "x"]), tokens=st.lists(st.integers(0, 1), min_size=1, max_size=12))
    def admit(self, salt: str, tokens: list[int]) -> None:
        self.num_begun += 1
        reader = _Reader(str(self.num_begun), salt, tokens)
        found = self.cache.find(reader.prefix, tokens, len(tokens) - 1)
        num_own = -(-len(tokens) // self.page_size) - sum(len(segment.pages) for segment in found)
        if num_own > self.allocator.num_free + self.cache.num_idle - self.cache.num_idle_of(found):
            return
        shared = self.cache.take(found, reader.name)
        for number, page in enumerate(shared, 1):
            assert self.content[page] == (salt, tuple(tokens[: number * self.page_size])), "another content was found"
            assert page not in self.wrong
        self.cache.evict(num_own - self.allocator.num_free)
        own = self.allocator.allocate(num_own, reader.name)
        assert own is not None, "idle pages are as good as free ones"
        reader.pages = shared + own
        for number, page in enumerate(reader.pages, 1):
            if page in own:
                self.content[page] = (salt, tuple(tokens[: number * self.page_size]))
                self.wrong.discard(page)
        self.readers[reader.name] = reader

    @precondition(lambda self: self.readers)
    @rule(data=st.data())
    def keep(self, data: st.DataObject) -> None:
        reader = self.readers[data.draw(st.sampled_from(sorted(self.readers)))]
        if not self.wrong.intersection(reader.pages):
            self.cache.insert(reader.prefix, reader.tokens, reader.pages, data.draw(st.integers(0, len(reader.tokens))))

    @precondition(lambda self: self.readers)
    @rule(data=st.data(), forgets=st.booleans())
    def end(self, data: st.DataObject, forgets: bool) -> None:
        reader = self.readers.pop(data.draw(st.sampled_from(sorted(self.readers))))
        if forgets:
            self.cache.forget(reader.pages)
            self.wrong.update(reader.pages)
        self.allocator.free(reader.pages, reader.name)
        self.cache.release(reader.pages)

    @rule(num_pages=st.integers(0, 5))
    def evict(self, num_pages: int) -> None:
        num_free, num_idle = self.allocator.num_free, self.cache.num_idle
        self.cache.evict(num_pages)
        assert self.allocator.num_free - num_free >= min(num_pages, num_idle)

    @invariant()
    def pages_of_readers_are_theirs(self) -> None:
        for reader in self.readers.values():
            assert all(reader.name in self.allocator.holders_of(page) for page in reader.pages)
        holders = [self.allocator.holders_of(page) for page in range(self.allocator.num_pages)]
        assert self.cache.num_idle == holders.count(frozenset({HOLDER}))
        assert self.allocator.num_free == holders.count(frozenset())


class CollidingCacheMachine(CacheMachine):
    is_colliding = True


CacheMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
CollidingCacheMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestCache = CacheMachine.TestCase
TestCollidingCache = CollidingCacheMachine.TestCase


def rows_of(group: ToyGroup, *requests: Request) -> list[int]:
    """Run each of the requests alone and check its tokens. Returns the rows of the first step of each."""
    found = []
    for each in requests:
        group.submit(each)
        group.start()
        found.append(sum(step.batch.num_rows for step in group.running.values()))
        group.run()
        assert group.tokens[each.id, each.attempt] == expected_output(each)
    return found


def test_a_prompt_that_begins_as_an_earlier_one_computes_the_rest(group: ToyGroup) -> None:
    assert rows_of(group, request("a", range(10)), request("b", range(10)), request("c", [*range(8), 50, 51])) == [10, 2, 2]
    statistics = group.engine.statistics()
    assert (statistics.num_prefix_queries, statistics.num_prefix_hits) == (30, 16)


def test_the_output_of_a_request_is_kept_for_a_longer_prompt(group: ToyGroup) -> None:
    first = request("a", range(6), max_tokens=8)
    longer = [*range(6), *expected_output(first), 3]
    assert rows_of(group, first, request("b", longer)) == [6, 3], "13 tokens had KV, of which 12 fill pages"


def test_strict_keeps_whole_chunks_of_prompts() -> None:
    group = ToyGroup(LIMITS, chunk_tokens=6)  # 12 tokens end a page and a chunk
    first = request("a", range(24), max_tokens=8)
    assert rows_of(group, first, request("b", range(30)), request("c", [*range(13), 5])) == [6, 6, 2]
    assert group.engine.statistics().num_prefix_hits == 24 + 12
    longer = [*range(24), *expected_output(first), *range(5)]
    rows_of(group, request("d", longer, max_tokens=1))
    assert group.engine.statistics().num_prefix_hits == 24 + 12 + 24, "output was computed row by row"


def test_requests_of_different_salts_share_nothing(group: ToyGroup) -> None:
    requests = [request(f"r{number}", range(9), cache_salt=salt) for number, salt in enumerate(("", "x", "y", "x", ""))]
    assert rows_of(group, *requests) == [9, 9, 9, 1, 1]


def test_without_prefix_caching_every_prompt_is_computed() -> None:
    group = ToyGroup(LIMITS.replace(enable_prefix_caching=False))
    assert rows_of(group, request("a", range(9)), request("b", range(9))) == [9, 9]


def test_the_least_recently_used_content_is_evicted_and_its_end_first(group: ToyGroup) -> None:
    a, b = list(range(21)), list(range(30, 51))
    rows_of(group, request("a", a, max_tokens=1), request("b", b, max_tokens=1), request("a2", a, max_tokens=1))
    rows_of(group, request("c", range(60, 92), max_tokens=1))  # 8 pages: 6 are free, b loses 2
    assert rows_of(group, request("a3", a, max_tokens=1), request("b2", b, max_tokens=1)) == [1, 13], "and another for the end of a3"


def test_pages_in_use_are_not_evicted(group: ToyGroup) -> None:
    group.submit(request("a", range(20), max_tokens=8))
    group.step()
    group.submit(request("b", range(40, 76), max_tokens=8), request("c", range(10, 46), max_tokens=8))
    group.run()
    assert group.tokens["a", 0] == expected_output(request("a", range(20), max_tokens=8))


def test_a_preempted_sequence_finds_its_pages_again() -> None:
    """As long as no other has taken them."""
    group = ToyGroup(GraphLimits(max_num_seqs=2, kv_pages=6, page_size=4, max_tokens=16, max_num_batched_tokens=64))
    group.submit(request("a", range(8), max_tokens=12), request("b", range(50, 58), max_tokens=12))
    group.run()
    assert group.engine.statistics().num_preemptions
    assert [group.tokens[name, 0] for name in "ab"] == [
        expected_output(request("a", range(8), max_tokens=12)),
        expected_output(request("b", range(50, 58), max_tokens=12)),
    ]


def test_kv_without_finite_logits_is_not_kept(group: ToyGroup) -> None:
    """The prompt's pages were kept after the first token; those that were computed later, and what they were computed from, are dropped."""
    group.submit(request("a", range(9), max_tokens=8))
    group.step()
    group.start()
    assert group.finish(0, broken="a") == 1
    group.start()
    assert group.running[0].batch.num_rows == 10, "it is computed again without the cache"
    group.run()
    assert rows_of(group, request("b", range(9))) == [1], "what was computed again is kept"


def test_degraded_kv_is_not_kept(group: ToyGroup) -> None:
    group.submit(request("a", range(9), max_tokens=1))
    (step,) = group.engine.next_steps()
    group.engine.step_done(0, step.step, [5], degraded=True)
    group.submit(request("b", range(9), max_tokens=1))
    (step,) = group.engine.next_steps()
    assert step.batch.num_rows == 9


def test_a_group_pulls_what_its_cache_lacks(group: ToyGroup) -> None:
    rows_of(group, request("a", range(9), max_tokens=1))
    offered = msgspec.structs.replace(
        request("b", range(12), max_tokens=3), kv=KvOffer("prefill.0", "i", 1, 12), committed_token_ids=((7,),)
    )
    group.submit(offered)
    assert group.engine.next_steps() == []
    (pull,) = group.engine.new_pulls()
    assert (pull.first, len(pull.pages)) == (8, 4)
    group.engine.pull_failed("b", 0, "no")
    assert group.engine.statistics().num_free_pages == LIMITS.kv_pages
    assert group.engine.statistics().num_prefix_hits == 0, "no computation was saved"


class _PullingGroup:
    """A group of 8 pages, whose next tokens are all 5. Prompts have 12 tokens."""

    def __init__(self, is_strict: bool) -> None:
        limits = GraphLimits(max_num_seqs=4, kv_pages=8, page_size=4, max_tokens=64, max_num_batched_tokens=64)
        self.engine = Engine(limits, 1, 100, VOCABULARY, chunk_tokens=4 if is_strict else 0)

    def step(self) -> list[str]:
        """The sequence of each row of the next step, which is computed."""
        steps = self.engine.next_steps()
        return self._finish(steps[0]) if steps else []

    def _finish(self, step: StartStep) -> list[str]:
        self.engine.step_done(0, step.step, [5] * len(step.batch.samples))
        batch = step.batch
        return [name for name, length in zip(batch.sequence_names, batch.query_lengths, strict=True) for _ in range(length)]

    def pull(self, name: str, is_strict: bool, max_tokens: int = 2) -> int:
        """Pull a prompt. Returns its first token that the group lacks."""
        kv = KvOffer("prefill.0", "i", 1, 12, is_strict=is_strict)
        self.engine.submit(msgspec.structs.replace(request(name, range(12), max_tokens), kv=kv, committed_token_ids=((7,),)))
        steps = self.engine.next_steps()
        (found,) = self.engine.new_pulls()
        for step in steps:
            self._finish(step)
        self.engine.pulled(name, 0)
        return found.first

    def rows_until_idle(self) -> list[str]:
        rows = []
        while not self.engine.idle:
            rows += self.step()
        return rows


def test_a_strict_group_keeps_kv_of_fast_prefill_workers_apart() -> None:
    """No prompt that it computes itself, or pulls from a strict worker, begins with such KV."""
    group = _PullingGroup(is_strict=True)
    assert group.pull("a", is_strict=False) == 0
    group.rows_until_idle()
    assert group.pull("b", is_strict=False) == 8, "the pages of a"
    group.rows_until_idle()
    assert group.pull("c", is_strict=True) == 0
    group.rows_until_idle()
    group.engine.submit(request("d", range(12), max_tokens=1))
    assert group.rows_until_idle() == ["d/0"] * 4, "the pages of c"


def test_kv_of_every_prefill_worker_is_alike_in_a_fast_group() -> None:
    group = _PullingGroup(is_strict=False)
    assert group.pull("a", is_strict=False) == 0
    group.rows_until_idle()
    assert group.pull("b", is_strict=True) == 8
    group.rows_until_idle()
    group.engine.submit(request("c", range(12), max_tokens=1))
    assert group.rows_until_idle() == ["c/0"] * 4


def test_a_preempted_sequence_of_fast_kv_stays_apart() -> None:
    """What it computes again behind such KV is not strict either: no other prompt begins with it."""
    group = _PullingGroup(is_strict=True)
    group.engine.submit(request("old", range(20, 32), max_tokens=10))
    assert group.step() == ["old/0"] * 4
    assert group.pull("young", is_strict=False, max_tokens=8) == 0
    while not group.engine.statistics().num_preemptions:
        assert group.step()
    rows = group.rows_until_idle()
    assert rows.count("young/0") == 4 + 7, "the end of its prompt, behind its own pages, and its output"
    group.engine.submit(request("own", range(12), max_tokens=1))
    assert group.rows_until_idle() == ["own/0"] * 12


def test_held_pages_are_kept_when_the_hold_ends(group: ToyGroup) -> None:
    group.submit(msgspec.structs.replace(request("a", range(9)), stage="prefill"))
    group.step()
    group.engine.cancel("a", 0)
    assert rows_of(group, request("b", range(9))) == [1]


def test_digests_are_chains_of_sha256() -> None:
    allocator = PageAllocator(4)
    cache, prefix = PrefixCache(allocator, 2, 1), Prefix("s")
    pages = allocator.allocate(2, "a")
    assert pages is not None
    cache.insert(prefix, [1, 2, 3, 4], pages, 4)
    first = sha256(b"s" + b"".join(token.to_bytes(8, "little") for token in (1, 2))).digest()
    assert prefix.digests == [first, sha256(first + b"".join(token.to_bytes(8, "little") for token in (3, 4))).digest()]
