"""Implements the `cuda` transport: payloads in device memory between two processes of one host, by CUDA IPC, over NVLink where present.

It has not run on a GPU yet: the tests that need one are marked, and the other tests use a driver of their own.

The socket of the rendezvous becomes a stream channel: it carries envelopes, host tensors, credits and the end, and its end-of-file is the
peer's death. Each end allocates an *area* on its device and sends the peer its handle in the first frame. The sender copies a tensor
whose buffer has `__cuda_array_interface__` straight into a range of the receiver's area; the copy is complete when the message is sent.
The receiver owns that memory, so received tensors outlive the channel and the peer. When the last tensor of a message is freed, and the
device has finished its work on it, a frame returns the range.

A receiver that holds many tensors copies further payloads to separate device memory. When no range is free, or the area cannot be opened
(different devices, a container), the bytes go over the host. This is slower but never blocks, and `host_copies` counts it.

The protocol adds two frames to those of stream.py: AREA (uint64 bytes, 64 bytes handle) and GIVEN_BACK (uint64 start). The kind of a
message with device tensors begins with "@"; its header is a `_DeviceHeader`."""

from __future__ import annotations

import struct
from collections import deque
from contextlib import suppress
from typing import ClassVar

import msgspec

from flowrt.transports.channel.rendezvous import Meeting
from flowrt.transports.channel.socket_transport import SocketTransport
from flowrt.transports.contract import Capabilities, ChannelStatistics, Limits
from flowrt.transports.cuda import driver as cuda_driver
from flowrt.transports.cuda.driver import HANDLE_BYTES, Driver, DriverError
from flowrt.transports.cuda.memory import ALIGNMENT, Area, DeviceBuffer, HeldRanges, Ranges, aligned, device_pointer
from flowrt.transports.errors import InvalidMessageError, UnavailableError
from flowrt.transports.stream import StreamChannel
from flowrt.transports.wire.codec import Envelope, WireError, check_limits, encode, header_bytes, spec_bytes
from flowrt.transports.wire.message import Message, Tensor, TensorSpec

GIVE_BACK_SECONDS = 0.001  # polling interval for the device to finish its work on freed ranges
_FRAME = struct.Struct("<B3xI")  # as in stream.py
_AREA_KIND, _GIVEN_BACK_KIND = 128, 129
_AREA = struct.Struct(f"<Q{HANDLE_BYTES}s")
_START = struct.Struct("<Q")
_MARK = "@"


class _DeviceHeader(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """The header of a message with device tensors: the original header, all tensor specs, which of them are on the device, and where."""

    header: bytes | None
    tensors: tuple[TensorSpec, ...]
    on_device: tuple[bool, ...]
    start: int  # of the range in the receiver's area; -1: the bytes are sent over the host, as tensors of this message
    nbytes: int


_decode_device_header = msgspec.msgpack.Decoder(_DeviceHeader).decode


class CUDAChannel(StreamChannel):
    """One end of a channel. Its device work is ordered with torch's default stream (see driver.py)."""

    scheme = "cuda"
    fills_private_memory = False
    body_bytes: ClassVar[dict[int, int]] = {**StreamChannel.body_bytes, _AREA_KIND: _AREA.size, _GIVEN_BACK_KIND: _START.size}

    def __init__(self, meeting: Meeting, driver: Driver, area: Area) -> None:
        super().__init__(meeting.sock, meeting.limits, meeting.peer)
        self._driver = driver
        self._capacity_bytes = meeting.limits.capacity_bytes
        self._area = area
        self._peer_area = 0  # address at which the peer's area is mapped
        self._ranges = Ranges(0)  # of the peer's area
        self._held: dict[int, int] = {}  # start -> bytes of the ranges of the own area that the user holds
        self._returning: deque[tuple[object, int, Area | None]] = deque()  # fence, start of the range, and the area to which it was copied
        self._polls_device = False
        self.host_copies = 0
        self._loop.call_soon(self._send_area)  # after the last bytes of the handshake

    def statistics(self) -> ChannelStatistics:
        self._counters.held_buffers = len(self._held)
        return super().statistics()

    def _send_area(self) -> None:
        if not self._closed and self._broken is None:
            self._write([_FRAME.pack(_AREA_KIND, _AREA.size), _AREA.pack(self._area.nbytes, self._driver.export(self._area.pointer))])

    # Sending.

    def _transmit(self, message: Message) -> bool:
        pointers = [device_pointer(tensor) for tensor in message.tensors]
        if message.kind[:1] == _MARK:
            raise InvalidMessageError(f"a kind must not begin with {_MARK}")
        if all(pointer is None for pointer in pointers):
            return super()._transmit(message)
        total = message.payload_bytes
        check_limits(message, total, self.limits)
        if not self._sending.fits(total):
            return False
        try:
            placed = self._copy_to_peer(message, pointers)
        except DriverError as error:
            raise InvalidMessageError(f"a tensor cannot be read from the device: {error}") from error
        super()._transmit(placed)  # there is room: the bytes of `placed` are part of the total
        on_device = total - placed.payload_bytes
        self._sending.sent_bytes += on_device
        self._counters.bytes_sent += on_device
        return True

    def _copy_to_peer(self, message: Message, pointers: list[int | None]) -> Message:
        """Returns the message for the stream. The device tensors are copied into the peer's area, or into the message as bytes."""
        tensors = message.tensors
        sizes = [aligned(tensor.spec.nbytes) for tensor, pointer in zip(tensors, pointers, strict=True) if pointer is not None]
        start = self._ranges.take(max(sum(sizes), ALIGNMENT))
        rest = []
        offset = 0
        try:
            for tensor, pointer in zip(tensors, pointers, strict=True):
                if pointer is None:
                    rest.append(tensor)
                elif start is None:
                    copied = bytearray(tensor.spec.nbytes)
                    self._driver.wait()
                    self._driver.read(copied, pointer)
                    rest.append(Tensor(tensor.spec, copied))
                else:
                    self._driver.copy(self._peer_area + start + offset, pointer, tensor.spec.nbytes)
                    offset += aligned(tensor.spec.nbytes)
            if start is not None:
                self._driver.wait()
            on_device = tuple(pointer is not None for pointer in pointers)
            described = _DeviceHeader(
                header_bytes(message), tuple(tensor.spec for tensor in tensors), on_device, -1 if start is None else start, sum(sizes)
            )
            placed = Message(_MARK + message.kind, message.tag, message.edge, described, tuple(rest))
            encode(placed, self._sending.sent_messages, self.limits)  # raises before the range is announced
        except BaseException:
            if start is not None:
                self._ranges.give_back(start)
            raise
        self.host_copies += start is None
        return placed

    # Receiving.

    def _on_frame(self, kind: int, body: bytearray) -> None:
        if kind == _AREA_KIND:
            nbytes, handle = _AREA.unpack(body)
            if nbytes != self._area.nbytes or self._peer_area:
                raise WireError(f"an area of {nbytes} bytes on the device, one of {self._area.nbytes} was agreed on")
            with suppress(DriverError):  # without access, payloads go over the host instead
                self._peer_area = self._driver.open(handle)
                self._ranges = Ranges(nbytes)
        elif kind == _GIVEN_BACK_KIND:
            (start,) = _START.unpack(body)
            if not self._ranges.give_back(start):
                raise WireError("the peer gives back memory that it did not have")
        else:
            super()._on_frame(kind, body)

    def _deliver(self, envelope: Envelope, buffers: list[object] | list[bytearray], payload_bytes: int) -> None:
        if envelope.kind[:1] != _MARK:
            super()._deliver(envelope, buffers, payload_bytes)
            return
        try:
            placed = _decode_device_header(envelope.header or b"")
        except (msgspec.DecodeError, RecursionError) as error:
            raise WireError(f"a message on the device that cannot be read: {error}") from error
        total = self._check(placed, envelope)
        window = self._receiving
        window.arrived_bytes += total - payload_bytes
        if window.arrived_messages - window.reported_messages > 1 and window.arrived_bytes - window.reported_bytes > self._capacity_bytes:
            raise WireError("the peer sent more than the channel may hold")
        try:
            tensors: list[object] = self._take_buffers(placed, buffers) if not self._closed else [b""] * len(placed.tensors)
        except DriverError as error:
            raise WireError(f"the device failed: {error}") from error
        own = msgspec.structs.replace(envelope, kind=envelope.kind[1:], header=placed.header, tensors=placed.tensors)
        super()._deliver(own, tensors, total)

    def _check(self, placed: _DeviceHeader, envelope: Envelope) -> int:
        """Returns the total payload bytes of a message. Raises WireError for an invalid message."""
        if len(placed.tensors) != len(placed.on_device) or len(placed.tensors) > self.limits.max_tensors:
            raise WireError(f"{len(placed.tensors)} tensors in a message on the device")
        over_host = placed.start < 0
        expected = tuple(spec for spec, on_device in zip(placed.tensors, placed.on_device, strict=True) if over_host or not on_device)
        nbytes = sum(aligned(spec_bytes(spec)) for spec, on in zip(placed.tensors, placed.on_device, strict=True) if on)
        total = sum(map(spec_bytes, placed.tensors))
        if expected != envelope.tensors or nbytes != placed.nbytes or total > self.limits.max_message_bytes:
            raise WireError("a message on the device whose tensors do not fit its parts")
        if not over_host and (placed.start + nbytes > self._area.nbytes or placed.start in self._held):
            raise WireError("a range that is not in the area, or is in use")
        return total

    def _take_buffers(self, placed: _DeviceHeader, buffers: list[object] | list[bytearray]) -> list[object]:
        """Returns a buffer for each tensor. A device buffer lies in the own area, or in separate device memory when its bytes came over the
        host or the user holds too much of the area."""
        area, base, held = self._area, placed.start, None
        if placed.start < 0 or sum(list(self._held.values())) + placed.nbytes > self._capacity_bytes:
            area, base = Area(self._driver, placed.nbytes), 0
            held = HeldRanges(area, lambda: None)
            if placed.start >= 0:
                self._driver.copy(area.pointer, self._area.pointer + placed.start, placed.nbytes)
                self._return_range(placed.start, area)
        else:
            self._held[placed.start] = placed.nbytes
            held = HeldRanges(area, lambda: self._on_range_freed(placed.start))
        rest = iter(buffers)
        found: list[object] = []
        offset = base
        for spec, on_device in zip(placed.tensors, placed.on_device, strict=True):
            if not on_device:
                found.append(next(rest))
                continue
            nbytes = spec_bytes(spec)
            if placed.start < 0:
                self._driver.write(area.pointer + offset, memoryview(next(rest)))  # type: ignore[arg-type]
            found.append(DeviceBuffer(held, area.pointer + offset, nbytes))
            offset += aligned(nbytes)
        return found

    # Returning ranges.

    def _on_range_freed(self, start: int) -> None:
        """Handles the release of a range by the user, possibly on another thread."""
        self._held.pop(start, None)
        with suppress(RuntimeError):  # the loop and the channel are closed
            self._loop.call_soon_threadsafe(self._return_range, start)

    def _return_range(self, start: int, copied_to: Area | None = None) -> None:
        """Returns the range at `start` to the peer after the device has finished all earlier work."""
        if self._closed or self._broken is not None:
            return
        self._returning.append((self._driver.fence(), start, copied_to))
        if not self._polls_device:
            self._polls_device = True
            self._give_back()

    def _give_back(self) -> None:
        while self._returning and not self._closed and self._driver.passed(self._returning[0][0]):
            start = self._returning.popleft()[1]
            self._write([_FRAME.pack(_GIVEN_BACK_KIND, _START.size), _START.pack(start)])
        self._polls_device = bool(self._returning) and not self._closed
        if self._polls_device:
            self._loop.call_later(GIVE_BACK_SECONDS, self._give_back)

    async def _shut(self) -> None:
        try:
            await super()._shut()
        finally:
            self._ranges = Ranges(0)
            with suppress(DriverError):
                self._driver.wait()
                while self._returning:
                    self._driver.passed(self._returning.popleft()[0])
                if self._peer_area:
                    self._driver.close(self._peer_area)


class CUDATransport(SocketTransport):
    """`cuda://name`, between processes of one user on one Linux host that see the same GPU."""

    scheme: ClassVar[str] = "cuda"
    capabilities: ClassVar[Capabilities] = Capabilities(device_memory=True)

    @classmethod
    def unavailable_reason(cls) -> str | None:
        return cuda_driver.unavailable_reason()

    def _accept(self, meeting: Meeting) -> CUDAChannel:
        needed = _area_bytes(meeting.limits)
        driver = cuda_driver.Driver()
        try:
            area = Area(driver, needed)
        except DriverError as error:
            raise UnavailableError(f"cuda cannot take {needed} bytes of the device ({error}); lower the limits of its edges") from error
        return CUDAChannel(meeting, driver, area)


def _area_bytes(limits: Limits) -> int:
    """Returns twice the bytes that may be in flight, because the receiver may hold as much again."""
    return 2 * aligned(limits.capacity_bytes)
