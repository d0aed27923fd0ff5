"""Firings that compute a part alone, of a suspect or the hedge of a late one.

Each needs a call of its own. The report leaves before the call begins, because the call may end the process.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection
from contextlib import suppress

import msgspec

from flowrt.dataflow.matching import Firing
from flowrt.dataflow.parts import PartHeader
from flowrt.dataflow.payload import Payload
from flowrt.transports.wire.message import Tag


class AloneFirings:
    """`requests`: the edges by which parts come, of other workers and of this one. `report(tag, part)` returns when the report has left;
    None: it is over."""

    def __init__(self, requests: Collection[int], report: Callable[[Tag | None, int | None], Awaitable[None]]) -> None:
        self._requests, self._report = requests, report
        self.reported: tuple[Tag, int] | None = None
        self._is_reporting = False

    def is_alone(self, firing: Firing) -> bool:
        return (header := self._header(firing)) is not None and header.alone

    @property
    def is_over(self) -> bool:
        """Whether no part is reported, and that report has left."""
        return self.reported is None and not self._is_reporting

    async def report(self, firing: Firing) -> None:
        """Call this before each batch, with its first firing; one that is alone has no other beside it. Reports a part that is alone, and
        the end of one."""
        header = self._header(firing)
        alone = (firing.tag, header.part) if header is not None and header.alone else None
        if alone is not None or self.reported is not None:
            self.reported, self._is_reporting = alone, True
            await self._report(*(alone or (None, None)))
            self._is_reporting = False

    def _header(self, firing: Firing) -> PartHeader | None:
        if any(edge in self._requests for edge in firing.via):
            for payload in firing.inputs.values():
                with suppress(AttributeError, msgspec.DecodeError):  # a gather's list, or another header
                    return part_header(payload)
        return None


def part_header(payload: Payload) -> PartHeader | None:
    return None if payload.header is None else payload.header_as(PartHeader)


async def unreported(tag: Tag | None, part: int | None) -> None:
    """For a runner without parts of others."""
