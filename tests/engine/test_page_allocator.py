"""PageAllocator: one owner per page, free + owned = total, no double free, generations count re-uses."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from flowrt.engine.page_allocator import PageAllocator

OWNERS = ["a", "b", "c"]


class AllocatorMachine(RuleBasedStateMachine):
    @initialize(num_pages=st.integers(1, 12))
    def begin(self, num_pages: int) -> None:
        self.allocator = PageAllocator(num_pages)
        self.owned: dict[str, list[int]] = {owner: [] for owner in OWNERS}
        self.uses = [0] * num_pages

    @rule(owner=st.sampled_from(OWNERS), wanted=st.integers(0, 14))
    def allocate(self, owner: str, wanted: int) -> None:
        num_free = self.allocator.num_free
        pages = self.allocator.allocate(wanted, owner)
        assert (pages is None) == (wanted > num_free)
        for page in pages or []:
            self.uses[page] += 1
        self.owned[owner] += pages or []

    @precondition(lambda self: any(self.owned.values()))
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        owner = data.draw(st.sampled_from([owner for owner in OWNERS if self.owned[owner]]))
        pages = data.draw(st.lists(st.sampled_from(self.owned[owner]), unique=True))
        self.allocator.free(pages, owner)
        self.owned[owner] = [page for page in self.owned[owner] if page not in pages]

    @rule(data=st.data(), owner=st.sampled_from(OWNERS))
    def wrong_free_changes_nothing(self, data: st.DataObject, owner: str) -> None:
        foreign = [page for page in range(-1, self.allocator.num_pages + 1) if page not in self.owned[owner]]
        wrong = data.draw(st.sampled_from(foreign))
        with pytest.raises(ValueError, match=rf"page {wrong} (does not exist|belongs to)"):
            self.allocator.free([*self.owned[owner], wrong], owner)

    @precondition(lambda self: any(self.owned.values()))
    @rule(data=st.data())
    def naming_a_page_twice_changes_nothing(self, data: st.DataObject) -> None:
        owner = data.draw(st.sampled_from([owner for owner in OWNERS if self.owned[owner]]))
        with pytest.raises(ValueError, match="twice"):
            self.allocator.free([self.owned[owner][0]] * 2, owner)

    @invariant()
    def one_owner_each(self) -> None:
        owner_of = {page: owner for owner, pages in self.owned.items() for page in pages}
        assert sum(map(len, self.owned.values())) == len(owner_of)
        assert self.allocator.num_free + len(owner_of) == self.allocator.num_pages
        for page in range(self.allocator.num_pages):
            assert self.allocator.owner_of(page) == owner_of.get(page)
            assert self.allocator.generation_of(page) == self.uses[page]


AllocatorMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestAllocator = AllocatorMachine.TestCase


def test_impossible_numbers_are_refused() -> None:
    with pytest.raises(ValueError, match="num_pages is 0"):
        PageAllocator(0)
    with pytest.raises(ValueError, match="-1"):
        PageAllocator(1).allocate(-1, "a")
