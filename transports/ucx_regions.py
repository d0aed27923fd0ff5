"""The bulk lane of a UCX channel: regions, cut into pieces.

Here: `RegionSender` (copy, cut, send ahead, take the memory back), `RegionReceiver` (check, take memory, ask for pieces, hand out what is
whole), `region_layout`. Not here: the frames that announce a region and what happens to a message (ucx.py, which calls this).

A region is the tensors of a message, each at a multiple of 64 bytes, and its envelope at the end. The sender copies it once into a block
of its own, so that the tensors are the caller's again, and each piece goes as soon as it is copied: the receiver reads it, straight out of
the sender's block into its own, while the next is copied. The received tensors lie in that block.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from transports.codec import Envelope, Part, WireError, decode_envelope
from transports.contract import Limits
from transports.ucx_blocks import Block, BlockPool
from transports.ucx_link import IN_PROGRESS, Link, check_status

PIECE_BYTES = 1 << 18
PIECES_AHEAD = 32  # that the peer has not read yet; each takes a slot of UCX's ring, of which there are 256
PIECES_AT_ONCE = 4  # asked for by a receiver
ALIGNMENT = 64


def region_layout(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Where each part of a region begins, and the region's size: all parts but the last, the envelope, are aligned."""
    starts = []
    end = 0
    for size in sizes[:-1]:
        starts.append(end)
        end += -(-size // ALIGNMENT) * ALIGNMENT
    return [*starts, end], end + sizes[-1]


def piece_end(start: int, region_bytes: int) -> int:
    """Where the piece that begins at `start` ends. The last one takes what is left, less than twice as much as the others."""
    return region_bytes if region_bytes - start < 2 * PIECE_BYTES else start + PIECE_BYTES


class RegionSender:
    """One end's outgoing regions."""

    def __init__(self, link: Link, pool: BlockPool, tag: Any) -> None:
        self._link = link
        self._pool = pool
        self._tag = tag
        self._waiting: deque[tuple[Any, Block | None]] = deque()
        self.sent: deque[tuple[Any, Block | None]] = (
            deque()
        )  # pieces that UCX still needs; a block comes with the last piece that lies in it

    def send(self, parts: Sequence[Part], starts: Sequence[int], region_bytes: int) -> None:
        """Copy `parts` to where `starts` says, as region_layout made them, and let each piece go as soon as it is whole."""
        block = self._pool.take(region_bytes)
        target = memoryview(block)
        sent = 0
        for start, part in zip(starts, parts, strict=True):
            for copied in range(0, len(part), PIECE_BYTES):
                end = start + min(copied + PIECE_BYTES, len(part))
                target[start + copied : end] = part[copied : copied + PIECE_BYTES]
                while end >= sent + PIECE_BYTES and piece_end(sent, region_bytes) < region_bytes:
                    self._add(target[sent : sent + PIECE_BYTES], None)
                    sent += PIECE_BYTES
        self._add(target[sent:region_bytes], block)

    def look(self) -> None:
        """Take back what UCX has completed, and send more. Raises WireError."""
        sent = self.sent
        while sent and (status := sent[0][0].status) != IN_PROGRESS:
            check_status(status)
            block = sent.popleft()[1]
            if block is not None:
                self._pool.give_back(block)
        self._go_on()

    def clear(self) -> None:
        """Forget all; only once the link is closed."""
        self._waiting.clear()
        self.sent.clear()

    def _add(self, piece: memoryview, block: Block | None) -> None:
        self._waiting.append((self._link.array(piece), block))
        self._go_on()

    def _go_on(self) -> None:
        while self._waiting and len(self.sent) < PIECES_AHEAD:
            array, block = self._waiting.popleft()
            self.sent.append((self._link.send(array, self._tag), block))


class Arrival:
    """A message on its way in, or behind one that is: complete when `missing_bytes` is 0. Without an envelope then: the peer's CLOSE."""

    __slots__ = ("block", "envelope", "envelope_bytes", "missing_bytes", "next_byte", "payload_bytes", "region_bytes", "tensors")

    def __init__(self, payload_bytes: int = 0, envelope: Envelope | None = None, tensors: Sequence[object] = ()) -> None:
        self.payload_bytes = payload_bytes
        self.envelope = envelope
        self.tensors = list(tensors)
        self.block: Block | None = None
        self.envelope_bytes = self.region_bytes = self.missing_bytes = self.next_byte = 0


class RegionReceiver:
    """One end's incoming regions."""

    def __init__(self, link: Link, pool: BlockPool, tag: Any, limits: Limits) -> None:
        self._link = link
        self._pool = pool
        self._tag = tag
        self._limits = limits
        self._announced: deque[Arrival] = deque()  # for which pieces must still be asked
        self._asked: deque[tuple[Any, Arrival, int]] = deque()

    def check_announced(self, envelope_bytes: int, payload_bytes: int, region_bytes: int) -> None:
        """Raise WireError unless a region of these sizes can be within the limits."""
        limits = self._limits
        if envelope_bytes > limits.max_header_bytes or payload_bytes > limits.max_message_bytes:
            raise WireError(f"a message of {payload_bytes} bytes and an envelope of {envelope_bytes}: more than the limits")
        least = payload_bytes + envelope_bytes
        if not 0 < least <= region_bytes <= least + ALIGNMENT * limits.max_tensors:
            raise WireError(f"a region of {region_bytes} bytes for {payload_bytes} bytes of tensors")

    def expect(self, envelope_bytes: int, payload_bytes: int, region_bytes: int) -> Arrival:
        """Take memory for an announced region that has been checked, and ask for its pieces from now on."""
        arrival = Arrival(payload_bytes)
        arrival.block = self._pool.take(region_bytes)
        arrival.envelope_bytes = envelope_bytes
        arrival.region_bytes = arrival.missing_bytes = region_bytes
        self._announced.append(arrival)
        return arrival

    def look(self) -> list[Arrival]:
        """The regions that have become whole. Raises WireError."""
        asked = self._asked
        whole: list[Arrival] = []
        while True:
            while asked and (status := asked[0][0].status) != IN_PROGRESS:
                check_status(status)
                _, arrival, nbytes = asked.popleft()
                arrival.missing_bytes -= nbytes
                if not arrival.missing_bytes:
                    whole.append(arrival)
            if not self._announced or len(asked) >= PIECES_AT_ONCE:
                return whole
            probed = self._link.probe(self._tag)
            if not probed.matched:
                return whole
            arrival = self._announced[0]
            start = arrival.next_byte
            arrival.next_byte = end = piece_end(start, arrival.region_bytes)
            if end == arrival.region_bytes:
                self._announced.popleft()
            target = self._link.array(_view(arrival, start, end))
            if probed.length != end - start:
                raise WireError(f"a piece of {probed.length} bytes, {end - start} were due")
            asked.append((self._link.receive_probed(target, probed), arrival, end - start))

    def open(self, arrival: Arrival, wanted: bool) -> None:
        """Fill in the envelope and the tensors of a whole region; its memory is let go of unless tensors are `wanted`. WireError."""
        block = arrival.block
        assert block is not None
        end = arrival.region_bytes - arrival.envelope_bytes
        envelope, sizes = decode_envelope(bytes(_view(arrival, end, arrival.region_bytes)), self._limits)
        starts, region_bytes = region_layout([*sizes, arrival.envelope_bytes])
        if region_bytes != arrival.region_bytes or sum(sizes) != arrival.payload_bytes:
            raise WireError(f"tensors of {sizes[:16]} bytes do not fill a region of {arrival.region_bytes}")
        arrival.envelope, arrival.block = envelope, None
        if wanted and arrival.payload_bytes:
            lease = self._pool.lease(block)
            arrival.tensors = [lease[start : start + size] for start, size in zip(starts, sizes, strict=False)]
        else:
            arrival.tensors = [bytearray() for _ in sizes]
            self._pool.give_back(block)

    def clear(self) -> None:
        """Forget all; only once the link is closed."""
        self._asked.clear()
        self._announced.clear()


def _view(arrival: Arrival, start: int, end: int) -> memoryview:
    assert arrival.block is not None
    return memoryview(arrival.block)[start:end]
