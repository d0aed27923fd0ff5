"""Rings of shared memory with both ends in this process."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from flowrt.transports.conformance.kit import check_numbered
from flowrt.transports.contract import ChannelStatistics, Limits
from flowrt.transports.native._words import Leases, Memory
from flowrt.transports.shared_memory import ring_writer
from flowrt.transports.shared_memory.ring import RELEASED, WRITER_SLEEPS, Layout
from flowrt.transports.shared_memory.ring_reader import RingReader
from flowrt.transports.shared_memory.ring_writer import RingWriter
from flowrt.transports.shared_memory.transport import sealed_memory


def mappings(nbytes: int) -> tuple[Memory, Memory]:
    """The same memory mapped twice, as two processes have it."""
    memfd = sealed_memory(nbytes)
    try:
        return Memory(memfd, nbytes), Memory(memfd, nbytes)
    finally:
        os.close(memfd)


def new_memory(nbytes: int) -> Memory:
    return mappings(nbytes)[0]


def ring_in(
    layout: Layout, limits: Limits, one: Memory, other: Memory, received: ChannelStatistics | None = None
) -> tuple[RingWriter, RingReader]:
    """The end that writes and the end that reads, which counts in `received`."""
    leases = Leases(other, layout.area(0), layout.area_bytes, RELEASED, WRITER_SLEEPS, -1)
    writer = RingWriter(one, layout, 0, limits, ChannelStatistics())
    return writer, RingReader(other, leases, layout, 0, limits, received or ChannelStatistics())


@contextmanager
def ring(limits: Limits) -> Iterator[tuple[Memory, Layout, RingWriter, RingReader]]:
    layout = Layout.of(limits)
    memory = new_memory(layout.total_bytes)
    writer, reader = ring_in(layout, limits, memory, memory)
    yield memory, layout, writer, reader
    writer.close()
    reader.close()


def check_next(reader: RingReader, number: int, nbytes: int) -> None:
    """The next message is there and is `numbered(number, nbytes)`."""
    message = reader.take()
    assert message is not None
    check_numbered(message, number, nbytes)


def copy_from(monkeypatch: pytest.MonkeyPatch, nbytes: int) -> None:
    """Copy threads copy payloads of this size and above."""
    monkeypatch.setattr(ring_writer, "MIN_BYTES", nbytes)
    monkeypatch.setattr(ring_writer, "threshold_bytes", lambda: nbytes)
