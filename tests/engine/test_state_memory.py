"""The contract of StateMemory, for pages and slots alike: whatever happens to sequences, each reads the state of its own tokens."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import msgspec
import pytest
from engine.toy_group import ToyGroup, expected_output, request
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from flowrt.actors.control import KvCompleted, KvOffer, Request
from flowrt.engine.offered_prompt import NO_STATE
from flowrt.engine.page_allocator import PageAllocator
from flowrt.engine.state_memory import HeldMemory, Pages, Slots, StateMemory
from flowrt.graph.settings import GraphLimits

NUM_UNITS, PAGE_SIZE = 8, 2
CACHE = "the cache"


class _Nothing:
    """In place of a prefix cache."""

    num_idle = 0

    def evict(self, num_units: int) -> None: ...

    def release(self, units: Sequence[int]) -> None: ...


class _Layer(ABC):
    """Layers over one kind of memory, as a worker has them: what units contain is a function of the tokens of the steps."""

    memory: StateMemory

    @abstractmethod
    def step(self, holding: HeldMemory, num_computed: int, tokens: Sequence[int]) -> list[int]:
        """Compute tokens behind the first `num_computed`, as a step does. Returns all tokens that its last row has read."""

    @abstractmethod
    def shared(self, holding: HeldMemory, num_computed: int) -> tuple[int, list[int]]:
        """How many tokens another sequence can begin with, and the units with their state."""


class _Paged(_Layer):
    def __init__(self) -> None:
        self.memory = Pages(PageAllocator(NUM_UNITS), _Nothing(), PAGE_SIZE)
        self.tokens: dict[tuple[int, int], int] = {}

    def step(self, holding: HeldMemory, num_computed: int, tokens: Sequence[int]) -> list[int]:
        for position, token in enumerate(tokens, num_computed):
            self.tokens[holding.pages[position // PAGE_SIZE], position % PAGE_SIZE] = token
        positions = range(num_computed + len(tokens))
        return [self.tokens[holding.pages[each // PAGE_SIZE], each % PAGE_SIZE] for each in positions]

    def shared(self, holding: HeldMemory, num_computed: int) -> tuple[int, list[int]]:
        num_pages = num_computed // PAGE_SIZE
        return num_pages * PAGE_SIZE, holding.pages[:num_pages]


class _Recurrent(_Layer):
    def __init__(self) -> None:
        self.memory = Slots(PageAllocator(NUM_UNITS), _Nothing())
        self.states: dict[int, list[int]] = {NO_STATE: []}

    def step(self, holding: HeldMemory, num_computed: int, tokens: Sequence[int]) -> list[int]:
        assert holding.step_slots is not None
        source, target = holding.step_slots
        self.states[target] = [*self.states[source], *tokens]
        return self.states[target]

    def shared(self, holding: HeldMemory, num_computed: int) -> tuple[int, list[int]]:
        return (0, []) if holding.state is None else (num_computed, [holding.state])


class _Sequence:
    def __init__(self, name: str) -> None:
        self.holding, self.computed, self.running = HeldMemory(name), list[int](), list[int]()


class MemoryMachine(RuleBasedStateMachine):
    """Sequences begin, alone or with the state of another one, compute steps that commit or are dropped, and end."""

    new_layer: type[_Layer]

    @initialize()
    def begin(self) -> None:
        self.layer, self.alive, self.num_begun = self.new_layer(), list[_Sequence](), 0

    def _choose(self, data: st.DataObject) -> _Sequence:
        return data.draw(st.sampled_from(self.alive))

    @rule(data=st.data(), shares=st.booleans())
    def admit(self, data: st.DataObject, shares: bool) -> None:
        self.num_begun += 1
        sequence = _Sequence(str(self.num_begun))
        if shares and self.alive:
            other = self._choose(data)
            num_tokens, units = self.layer.shared(other.holding, len(other.computed))
            if num_tokens:
                self.layer.memory.share(sequence.holding, units)
                sequence.computed = other.computed[:num_tokens]
        self.alive.append(sequence)

    @precondition(lambda self: self.alive)
    @rule(data=st.data(), tokens=st.lists(st.integers(0, 9), min_size=1, max_size=4))
    def step(self, data: st.DataObject, tokens: list[int]) -> None:
        sequence = self._choose(data)
        memory, holding = self.layer.memory, sequence.holding
        num_free, missing = memory.num_free, memory.num_missing(holding, len(sequence.computed) + len(tokens))
        before = [*holding.pages, *holding.slots()]
        if memory.reserve(holding, len(sequence.computed) + len(tokens)):
            assert memory.num_free == num_free - missing
            sequence.running = tokens
            read = self.layer.step(holding, len(sequence.computed), tokens)
            assert read == [*sequence.computed, *tokens]
        else:
            assert missing > num_free
            assert before == [*holding.pages, *holding.slots()], "all or nothing"

    @precondition(lambda self: any(each.running for each in self.alive))
    @rule(data=st.data(), commits=st.booleans())
    def end_step(self, data: st.DataObject, commits: bool) -> None:
        """A dropped step needs no call."""
        sequence = data.draw(st.sampled_from([each for each in self.alive if each.running]))
        if commits:
            sequence.computed += sequence.running
            self.layer.memory.commit(sequence.holding)
        sequence.running = []

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        sequence = self._choose(data)
        self.layer.memory.release(sequence.holding)
        assert sequence.holding == HeldMemory(sequence.holding.holder) or not sequence.holding.pages + sequence.holding.slots()
        self.alive.remove(sequence)

    @invariant()
    def units_are_held_by_those_that_have_them(self) -> None:
        units = self.layer.memory.units
        for unit in range(NUM_UNITS):
            names = {each.holding.holder for each in self.alive if unit in (*each.holding.pages, *each.holding.slots())}
            assert units.holders_of(unit) == names

    def teardown(self) -> None:
        for each in getattr(self, "alive", ()):
            self.layer.memory.release(each.holding)
        if hasattr(self, "layer"):
            assert self.layer.memory.num_free == NUM_UNITS


class PagesMachine(MemoryMachine):
    new_layer = _Paged


class SlotsMachine(MemoryMachine):
    new_layer = _Recurrent


TestPages = PagesMachine.TestCase
TestSlots = SlotsMachine.TestCase
TestPages.settings = TestSlots.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


LIMITS = GraphLimits(max_num_seqs=4, kv_pages=32, page_size=4, max_tokens=32, max_num_batched_tokens=64, prefix_states=3)


@pytest.fixture
def group() -> ToyGroup:
    return ToyGroup(LIMITS, recurrent=True)


def rows_of(group: ToyGroup, *requests: Request) -> list[list[int]]:
    """The rows of the steps of each request's prompt, one request after the other. Checks their tokens."""
    found = []
    for each in requests:
        group.batches.clear()
        group.submit(each)
        group.run()
        assert group.tokens[each.id, each.attempt] == expected_output(each)
        steps = [(batch, [sample.token_index for sample in batch.samples]) for _, batch in group.batches]
        found.append([batch.num_rows for batch, indices in steps if not indices or 0 in indices])
    return found


def test_a_prompt_begins_with_the_state_that_an_earlier_one_left_at_a_border(group: ToyGroup) -> None:
    assert rows_of(group, request("a", range(10)), request("b", range(10)), request("c", [*range(8), 50, 51])) == [[8, 2], [2], [2]]
    assert group.engine.statistics().num_prefix_hits == 16


def test_the_state_is_kept_where_prompts_part(group: ToyGroup) -> None:
    """The second prompt finds no state there, and leaves one for the third."""
    prompts = [[*range(9), *range(start, start + 10)] for start in (20, 40, 60)]
    assert rows_of(group, *(request(f"r{start}", prompt) for start, prompt in enumerate(prompts))) == [[16, 3], [8, 8, 3], [8, 3]]


def test_a_longer_prompt_begins_with_the_state_of_an_output(group: ToyGroup) -> None:
    first = request("a", range(6), max_tokens=12)
    longer = [*range(6), *expected_output(first), 3]
    assert rows_of(group, first, request("b", longer)) == [[4, 2], [3]], "16 of the 17 tokens with state end a page"


def test_states_of_outputs_evict_none_of_prompts() -> None:
    group = ToyGroup(LIMITS.replace(max_num_seqs=1, prefix_states=1), recurrent=True)
    requests = request("a", range(9), max_tokens=1), request("b", range(40, 46), max_tokens=24), request("c", range(9), max_tokens=1)
    assert rows_of(group, *requests) == [[8, 1], [4, 2], [8, 1]], "room for one: the latest prompt's"
    group = ToyGroup(LIMITS.replace(max_num_seqs=1, prefix_states=2), recurrent=True)
    assert rows_of(group, *requests) == [[8, 1], [4, 2], [1]]


def test_without_room_no_state_is_kept_and_all_are_served() -> None:
    group = ToyGroup(LIMITS.replace(max_num_seqs=1, prefix_states=0), recurrent=True)
    assert rows_of(group, request("a", range(10)), request("b", range(10))) == [[8, 2], [8, 2]]


def test_without_prefix_caching_prompts_are_not_cut() -> None:
    group = ToyGroup(LIMITS.replace(enable_prefix_caching=False), recurrent=True)
    assert rows_of(group, request("a", range(10)), request("b", range(10), n=2)) == [[10], [20]]


def test_choices_begin_with_the_state_of_the_first(group: ToyGroup) -> None:
    assert rows_of(group, request("a", range(10), n=3)) == [[8, 2, 5]], "the last step has a token of the first choice, too"


def test_strict_keeps_states_of_whole_chunks_of_prompts() -> None:
    group = ToyGroup(LIMITS, chunk_tokens=6, recurrent=True)  # 12 tokens end a page and a chunk
    first = request("a", range(26), max_tokens=12)
    longer = [*range(26), *expected_output(first), 9]
    assert rows_of(group, first, request("b", range(26)), request("c", longer)) == [[6, 6, 6, 6, 2], [2], [6, 6, 3]]


def test_state_without_finite_logits_is_not_kept(group: ToyGroup) -> None:
    group.submit(request("a", range(9), max_tokens=8))
    for _ in range(2):
        group.step()
    group.start()
    assert group.finish(0, broken="a") == 1
    assert group.engine.snapshot().memory.cached_slots() == []
    group.run()
    assert rows_of(group, request("b", range(9))) == [[1]], "what was computed again is kept"


def test_a_degraded_state_is_not_kept(group: ToyGroup) -> None:
    group.submit(request("a", range(9), max_tokens=1))
    for tokens in ([], [5]):
        (step,) = group.engine.next_steps()
        group.engine.step_done(0, step.step, tokens, degraded=True)
    assert group.engine.snapshot().memory.cached_slots() == []
    assert group.engine.leftovers() == []


def test_a_prefill_worker_offers_the_state_of_a_prompt() -> None:
    """A held prompt keeps one slot: as long as too few are left, no prompt is admitted."""
    group = ToyGroup(LIMITS.replace(max_num_seqs=1, prefix_states=1, enable_prefix_caching=False), recurrent=True)
    group.submit(*(msgspec.structs.replace(request(name, range(7)), stage="prefill") for name in "abc"))
    for _ in range(2):
        group.step()
    a, b = group.engine.offered_prompts()
    assert (a.is_complete, b.is_complete) == (True, True)
    assert group.states[a.slot] == group.states[b.slot] == tuple(range(7))
    assert group.engine.next_steps() == []
    group.engine.cancel("a", 0)
    group.step()
    group.engine.cancel("b", 0)
    group.engine.cancel("c", 0)
    assert group.engine.leftovers() == []


def test_a_running_prompt_offers_no_state_yet(group: ToyGroup) -> None:
    group.engine._streams = True
    group.submit(msgspec.structs.replace(request("a", range(7)), stage="prefill"))
    group.start()
    (offer,) = group.engine.offered_prompts()
    assert (offer.is_complete, offer.slot) == (False, NO_STATE)


def test_a_group_decodes_from_the_state_that_it_has_pulled(group: ToyGroup) -> None:
    """It pulls no page that it has, and the state in any case."""
    rows_of(group, request("a", range(9), max_tokens=1))
    whole = request("b", range(12), max_tokens=6)
    kv, first = KvOffer("prefill.0", "i", 1, 12), expected_output(whole)[0]
    group.submit(msgspec.structs.replace(whole, kv=kv, committed_token_ids=((first,),)))
    assert group.engine.next_steps() == []
    (pull,) = group.engine.new_pulls()
    assert pull.first == 8
    for position in range(pull.first, 12):
        group.memory[pull.pages[position // 4] * 4 + position % 4] = position
    group.states[pull.slot] = tuple(range(12))
    group.engine.complete_kv(KvCompleted("b", 0, kv, (first,)))
    group.take(group.engine.pulled("b", 0))
    group.run()
    assert group.tokens["b", 0] == expected_output(whole)[1:]


@pytest.mark.parametrize("recurrent", [False, True])
def test_a_pull_that_fails_frees_all(recurrent: bool) -> None:
    group = ToyGroup(LIMITS, recurrent=recurrent)
    group.submit(msgspec.structs.replace(request("b", range(12)), kv=KvOffer("prefill.0", "i", 1, 12), committed_token_ids=((7,),)))
    group.engine.next_steps()
    (pull,) = group.engine.new_pulls()
    assert (pull.slot == NO_STATE) is not recurrent
    group.engine.pull_failed("b", 0, "no")
    assert group.engine.leftovers() == []
