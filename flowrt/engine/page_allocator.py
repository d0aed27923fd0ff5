"""Which KV pages are free and who owns the others.

Here: PageAllocator, pure bookkeeping over page numbers. Not here: the pages' memory (operators/kv_pages), who may have how many
(scheduler.py). Called by the scheduler only.

A page has at most one owner at each moment, and free + owned = total. Each re-use of a page counts its generation up, so that
whoever kept a page number past its time can be told from the owner.
"""

from __future__ import annotations

from collections.abc import Sequence


class PageAllocator:
    """`num_pages` pages, numbered from 0. Last freed, first used again: its memory is the likeliest to be in a cache."""

    def __init__(self, num_pages: int) -> None:
        if num_pages < 1:
            raise ValueError(f"num_pages is {num_pages}, it must be at least 1")
        self._free = list(range(num_pages - 1, -1, -1))
        self._owner: list[str | None] = [None] * num_pages
        self._generation = [0] * num_pages

    @property
    def num_pages(self) -> int:
        return len(self._owner)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self, num_pages: int, owner: str) -> list[int] | None:
        """That many pages, now owned by `owner`; None, and nothing changed, when so many are not free."""
        if num_pages < 0:
            raise ValueError(f"cannot allocate {num_pages} pages")
        if num_pages > len(self._free):
            return None
        pages = [self._free.pop() for _ in range(num_pages)]
        for page in pages:
            self._owner[page] = owner
            self._generation[page] += 1
        return pages

    def free(self, pages: Sequence[int], owner: str) -> None:
        """Give pages back. ValueError, and nothing changed, unless every page is `owner`'s and named once."""
        for page in pages:
            if not 0 <= page < len(self._owner):
                raise ValueError(f"page {page} does not exist, there are {len(self._owner)}")
            if self._owner[page] != owner:
                raise ValueError(f"page {page} belongs to {self._owner[page] or 'nobody'}, not to {owner}")
        if len(set(pages)) != len(pages):
            raise ValueError(f"pages freed twice in one call: {list(pages)}")
        for page in pages:
            self._owner[page] = None
        self._free.extend(reversed(pages))

    def owner_of(self, page: int) -> str | None:
        return self._owner[page]

    def generation_of(self, page: int) -> int:
        """How often the page has been given out: 0 before its first use."""
        return self._generation[page]
