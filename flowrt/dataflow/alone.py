"""Firings that compute a part alone, of a suspect or the hedge of a late one.

Each needs a call of its own, which is reported first, because it may end the process.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import suppress

import msgspec

from flowrt.dataflow.matching import Firing
from flowrt.dataflow.parts import PartHeader
from flowrt.dataflow.payload import Payload
from flowrt.transports.wire.message import Tag


class AloneFirings:
    """`requests`: the edges by which parts come, of other workers and of this one. `report(tag, part)` sends a report; None: it is over."""

    def __init__(self, requests: Collection[int], report: Callable[[Tag | None, int | None], None]) -> None:
        self._requests, self._report = requests, report
        self.reported: tuple[Tag, int] | None = None

    def is_alone(self, firing: Firing) -> bool:
        return (header := self._header(firing)) is not None and header.alone

    def report(self, firing: Firing) -> None:
        """Call this before each batch, with its first firing; one that is alone has no other beside it."""
        header = self._header(firing)
        if header is not None and header.alone:
            self.reported = firing.tag, header.part
            self._report(firing.tag, header.part)
        else:
            self.end()

    def end(self) -> None:
        """Report that the last part is computed, unless this was reported: another firing follows, which is not of a part alone."""
        if self.reported is not None:
            self.reported = None
            self._report(None, None)

    def _header(self, firing: Firing) -> PartHeader | None:
        if any(edge in self._requests for edge in firing.via):
            for payload in firing.inputs.values():
                with suppress(AttributeError, msgspec.DecodeError):  # a gather's list, or another header
                    return part_header(payload)
        return None


def part_header(payload: Payload) -> PartHeader | None:
    return None if payload.header is None else payload.header_as(PartHeader)
