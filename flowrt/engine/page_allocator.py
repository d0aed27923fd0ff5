"""Tracks which KV pages are free and which sequences hold the others, and likewise slots (state_memory.py). It handles numbers only.

A page is free or held: by one holder, which may write to it, or by several, which only read it. It is free again when its last holder
has freed it; free + held = total.
"""

from __future__ import annotations

import re
from collections.abc import Sequence


class PageAllocator:
    """`num_pages` pages, numbered from 0.

    A holder gets consecutive pages as long as possible: attention reads a contiguous context without copying it
    (operators/attention_plan.py). So a new holder starts in the middle of the longest free run, which leaves room for the holders
    before it to grow.
    """

    def __init__(self, num_pages: int) -> None:
        if num_pages < 1:
            raise ValueError(f"num_pages is {num_pages}, it must be at least 1")
        self._is_free = bytearray(b"\x01" * num_pages)
        self._num_free = num_pages
        self._holders: list[set[str]] = [set() for _ in range(num_pages)]

    @property
    def num_pages(self) -> int:
        return len(self._holders)

    @property
    def num_free(self) -> int:
        return self._num_free

    def allocate(self, num_pages: int, holder: str, behind: int | None = None) -> list[int] | None:
        """Allocate pages to `holder`. Returns None, and changes nothing, when fewer pages are free. The first page is the one after
        `behind`, the holder's last page, if that is free."""
        if num_pages < 0:
            raise ValueError(f"cannot allocate {num_pages} pages")
        if num_pages > self._num_free:
            return None
        pages: list[int] = []
        page = None if behind is None else behind + 1
        while len(pages) < num_pages:
            if page is None or page == self.num_pages or not self._is_free[page]:
                page = self._beginning(num_pages - len(pages))
            self._is_free[page] = False
            self._holders[page].add(holder)
            pages.append(page)
            page += 1
        self._num_free -= num_pages
        return pages

    def share(self, pages: Sequence[int], holder: str) -> None:
        """Add `holder` to the holders of these pages. ValueError, with no change, unless each page is held, and not by `holder`."""
        for page in pages:
            if not self.holders_of(page):
                raise ValueError(f"page {page} is free, it cannot be shared")
            if holder in self._holders[page]:
                raise ValueError(f"page {page} is held by {holder} already")
        self._check_once(pages, "shared")
        for page in pages:
            self._holders[page].add(holder)

    def free(self, pages: Sequence[int], holder: str) -> None:
        """Free pages of `holder`. ValueError, with no change, unless `holder` holds every page and each is given once."""
        for page in pages:
            if holder not in self.holders_of(page):
                raise ValueError(f"page {page} is held by {', '.join(sorted(self._holders[page])) or 'no sequence'}, not by {holder}")
        self._check_once(pages, "freed")
        for page in reversed(pages):
            holders = self._holders[page]
            holders.remove(holder)
            if not holders:
                self._is_free[page] = True
                self._num_free += 1

    def holders_of(self, page: int) -> frozenset[str]:
        """The holders of a page; empty when it is free. ValueError when there is no such page."""
        if not 0 <= page < len(self._holders):
            raise ValueError(f"page {page} does not exist, there are {len(self._holders)}")
        return frozenset(self._holders[page])

    def _beginning(self, num_pages: int) -> int:
        """The first page of a new holder: the middle of the longest free run, or its start if it is the first run or too short."""
        start, end = max((piece.span() for piece in re.finditer(b"\x01+", self._is_free)), key=lambda span: span[1] - span[0])
        return start + (end - start - num_pages) // 2 if start and num_pages < end - start else start

    @staticmethod
    def _check_once(pages: Sequence[int], what: str) -> None:
        if len(set(pages)) != len(pages):
            raise ValueError(f"pages {what} twice in one call: {list(pages)}")
