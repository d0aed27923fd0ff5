"""PageAllocator: free + held = total, and a page is free again exactly when its last holder releases it."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from flowrt.engine.page_allocator import PageAllocator

HOLDERS = ["a", "b", "c"]


class AllocatorMachine(RuleBasedStateMachine):
    @initialize(num_pages=st.integers(1, 12))
    def begin(self, num_pages: int) -> None:
        self.allocator = PageAllocator(num_pages)
        self.held: dict[str, list[int]] = {holder: [] for holder in HOLDERS}

    @rule(holder=st.sampled_from(HOLDERS), wanted=st.integers(0, 14))
    def allocate(self, holder: str, wanted: int) -> None:
        num_free = self.allocator.num_free
        pages = self.allocator.allocate(wanted, holder)
        assert (pages is None) == (wanted > num_free)
        self.held[holder] += pages or []

    @precondition(lambda self: any(self.held.values()))
    @rule(data=st.data(), holder=st.sampled_from(HOLDERS))
    def share(self, data: st.DataObject, holder: str) -> None:
        of_others = sorted({page for pages in self.held.values() for page in pages} - set(self.held[holder]))
        pages = data.draw(st.lists(st.sampled_from(of_others), unique=True)) if of_others else []
        num_free = self.allocator.num_free
        self.allocator.share(pages, holder)
        assert self.allocator.num_free == num_free
        self.held[holder] += pages

    @precondition(lambda self: any(self.held.values()))
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        holder = data.draw(st.sampled_from([holder for holder in HOLDERS if self.held[holder]]))
        pages = data.draw(st.lists(st.sampled_from(self.held[holder]), unique=True))
        self.allocator.free(pages, holder)
        self.held[holder] = [page for page in self.held[holder] if page not in pages]

    @rule(data=st.data(), holder=st.sampled_from(HOLDERS))
    def wrong_free_changes_nothing(self, data: st.DataObject, holder: str) -> None:
        foreign = [page for page in range(-1, self.allocator.num_pages + 1) if page not in self.held[holder]]
        wrong = data.draw(st.sampled_from(foreign))
        with pytest.raises(ValueError, match=rf"page {wrong} (does not exist|is held by)"):
            self.allocator.free([*self.held[holder], wrong], holder)

    @rule(data=st.data(), holder=st.sampled_from(HOLDERS))
    def wrong_share_changes_nothing(self, data: st.DataObject, holder: str) -> None:
        held = {page for pages in self.held.values() for page in pages}
        good = held - set(self.held[holder])
        wrong = data.draw(st.sampled_from([page for page in range(-1, self.allocator.num_pages + 1) if page not in good]))
        with pytest.raises(ValueError, match=rf"page {wrong} (does not exist|is free|is held by {holder} already)"):
            self.allocator.share([*good, wrong], holder)

    @precondition(lambda self: any(self.held.values()))
    @rule()
    def naming_a_page_twice_changes_nothing(self) -> None:
        holder = next(holder for holder in HOLDERS if self.held[holder])
        with pytest.raises(ValueError, match="freed twice"):
            self.allocator.free([self.held[holder][0]] * 2, holder)
        with pytest.raises(ValueError, match="shared twice"):
            self.allocator.share([self.held[holder][0]] * 2, "d")

    @invariant()
    def every_page_is_free_or_held(self) -> None:
        held = {page for pages in self.held.values() for page in pages}
        assert self.allocator.num_free + len(held) == self.allocator.num_pages
        for page in range(self.allocator.num_pages):
            assert self.allocator.holders_of(page) == {holder for holder, pages in self.held.items() if page in pages}


AllocatorMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
TestAllocator = AllocatorMachine.TestCase


def test_pages_of_a_holder_lie_in_one_piece_while_they_can() -> None:
    allocator = PageAllocator(16)
    assert allocator.allocate(2, "a") == [0, 1]
    assert allocator.allocate(2, "b") == [8, 9]  # in the middle of what is left
    assert allocator.allocate(3, "a", 1) == [2, 3, 4]
    assert allocator.allocate(6, "b", 9) == [10, 11, 12, 13, 14, 15]
    assert allocator.allocate(2, "b", 15) == [5, 6]  # there is no page 16: another piece
    assert allocator.allocate(1, "a", 4) == [7]  # the next is taken
    allocator.free([11, 12], "b")
    assert allocator.allocate(3, "c") is None
    assert allocator.allocate(2, "c") == [11, 12]


def test_many_holders_that_grow_in_turn_stay_in_one_piece() -> None:
    allocator = PageAllocator(256)
    held = {holder: allocator.allocate(1, str(holder)) or [] for holder in range(8)}
    for _ in range(15):
        for holder, pages in held.items():
            pages += allocator.allocate(1, str(holder), pages[-1]) or []
    assert all(pages == list(range(pages[0], pages[0] + 16)) for pages in held.values())


def test_impossible_numbers_are_refused() -> None:
    with pytest.raises(ValueError, match="num_pages is 0"):
        PageAllocator(0)
    with pytest.raises(ValueError, match="-1"):
        PageAllocator(1).allocate(-1, "a")
