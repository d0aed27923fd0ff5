"""Transfers the large payloads of a UCX channel as regions, in pieces.

A region is the tensors of a message. The sender does not copy them: the receiver, which knows their sizes from the envelope, takes one
block for them, each at a multiple of 64 bytes, and UCX reads every piece from the sender's memory straight into that block. The received
tensors alias it. Pieces bound how long one read occupies the receiver's event loop.
"""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

from flowrt.transports.channel.blocks import BlockPool, placement
from flowrt.transports.ucx.endpoint import IN_PROGRESS, LostError, UCXLink, check_status
from flowrt.transports.wire.codec import Envelope, Part, WireError

PIECE_BYTES = 1 << 20
PIECES_AHEAD = 32  # pieces that the peer has not read yet; each takes one of the 256 slots of UCX's ring
PIECES_AT_ONCE = 4  # concurrent reads of a receiver


def cuts(nbytes: int) -> Iterator[tuple[int, int]]:
    """Yields (begin, end) of each piece of a tensor. The last piece takes the rest, which is less than 2 * PIECE_BYTES."""
    begin = 0
    while begin < nbytes:
        end = nbytes if nbytes - begin < 2 * PIECE_BYTES else begin + PIECE_BYTES
        yield begin, end
        begin = end


class RegionSender:
    """The outgoing regions of one end."""

    def __init__(self, link: UCXLink, tag: Any) -> None:
        self._link = link
        self._tag = tag
        self._waiting: deque[Any] = deque()
        # Pieces that UCX still reads: request and memory, which the request does not keep alive.
        self.sent: deque[tuple[Any, Any]] = deque()

    def send(self, tensors: Sequence[Part]) -> None:
        """Queues the pieces of `tensors`. The peer reads each piece in place; its memory is kept until then."""
        for tensor in tensors:
            view = memoryview(tensor)
            self._waiting.extend(self._link.array(view[begin:end]) for begin, end in cuts(len(view)))
        self._send_pieces()

    def look(self) -> None:
        """Frees the pieces that UCX has completed and sends further pieces. Raises WireError."""
        sent = self.sent
        while sent and (status := sent[0][0].status) != IN_PROGRESS:
            check_status(status)
            sent.popleft()
        self._send_pieces()

    def clear(self) -> None:
        """Discards all state; call it only after the link is closed."""
        self._waiting.clear()
        self.sent.clear()

    def _send_pieces(self) -> None:
        while self._waiting and len(self.sent) < PIECES_AHEAD:
            array = self._waiting.popleft()
            self.sent.append((self._link.send(array, self._tag), array))


class MessageArrival:
    """A message that has arrived or is queued behind one that has not; complete when `missing_bytes` is 0. Without an envelope, it is the
    peer's CLOSE."""

    def __init__(self, payload_bytes: int = 0, envelope: Envelope | None = None, tensors: Sequence[object] = ()) -> None:
        self.payload_bytes = payload_bytes
        self.envelope = envelope
        self.tensors = list(tensors)
        self.missing_bytes = 0


class RegionArrival(MessageArrival):
    """A message whose tensors arrive as a region, in `block`. `slices`: of the block, one per tensor."""

    def __init__(self, envelope: Envelope, sizes: Sequence[int], pool: BlockPool) -> None:
        super().__init__(sum(sizes), envelope)
        starts, region_bytes = placement(sizes)
        self.missing_bytes = self.payload_bytes
        self.block = pool.take(region_bytes)
        self.slices = [slice(start, start + size) for start, size in zip(starts, sizes, strict=True)]
        # (start, end) in the block of pieces that are not requested yet
        self.pieces = deque((start + begin, start + end) for start, size in zip(starts, sizes, strict=True) for begin, end in cuts(size))


class RegionReceiver:
    """The incoming regions of one end."""

    def __init__(self, link: UCXLink, pool: BlockPool, tag: Any, connection: socket.socket) -> None:
        self._link = link
        self._pool = pool
        self._tag = tag
        self._socket = connection
        self._announced: deque[RegionArrival] = deque()  # regions with pieces that are not requested yet
        self._reads: deque[tuple[Any, RegionArrival, int]] = deque()  # request, region, bytes

    def expect(self, envelope: Envelope, sizes: Sequence[int]) -> MessageArrival:
        """Allocates a block for an announced region, whose envelope is checked, and queues its pieces to be requested."""
        if not any(sizes):
            return MessageArrival(0, envelope, [bytearray() for _ in sizes])
        arrival = RegionArrival(envelope, sizes, self._pool)
        self._announced.append(arrival)
        return arrival

    def look(self, keep: bool) -> None:
        """Reads pieces, and sets the tensors of regions that have become complete; unless `keep`, their blocks return to the pool and their
        tensors are empty. Raises WireError."""
        complete = self._read_pieces()
        if complete and not self._is_socket_open():  # checked after the last piece: a sender keeps a region while its socket is open
            raise LostError("the peer died or closed before its message was read")
        for arrival in complete:
            if keep:
                lease = self._pool.lease(arrival.block)
                arrival.tensors = [lease[part] for part in arrival.slices]
            else:
                arrival.tensors = [bytearray() for _ in arrival.slices]
                self._pool.give_back(arrival.block)

    def _read_pieces(self) -> list[RegionArrival]:
        """Returns the regions that have become complete."""
        reads = self._reads
        complete: list[RegionArrival] = []
        while True:
            while reads and (status := reads[0][0].status) != IN_PROGRESS:
                check_status(status)
                _, arrival, nbytes = reads.popleft()
                arrival.missing_bytes -= nbytes
                if not arrival.missing_bytes:
                    complete.append(arrival)
            if not self._announced or len(reads) >= PIECES_AT_ONCE:
                return complete
            probed = self._link.probe(self._tag)
            if not probed.matched:
                return complete
            arrival = self._announced[0]
            start, end = arrival.pieces.popleft()
            if not arrival.pieces:
                self._announced.popleft()
            target = self._link.array(memoryview(arrival.block)[start:end])
            if probed.length != end - start:
                raise WireError(f"a piece of {probed.length} bytes, {end - start} were expected")
            reads.append((self._link.receive_probed(target, probed), arrival, end - start))

    def _is_socket_open(self) -> bool:
        try:
            return bool(self._socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT))
        except BlockingIOError:
            return True
        except OSError:
            return False

    def clear(self) -> None:
        """Discards all state; call it only after the link is closed."""
        self._reads.clear()
        self._announced.clear()
