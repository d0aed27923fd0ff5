"""The `shm` transport: shared memory between two processes of one host.

The connector makes one sealed memfd with both rings, and two eventfds, and passes them over the authenticated socket. A memfd has no
name, so it leaves nothing behind and cannot be squatted. Its pages are allocated before use, so a full machine is an error and not a
SIGBUS. SHRINK and GROW seals keep either side from resizing it. A side without a message polls for one in some turns of its loop, unless
that was in vain lately (polling.py). Then it sleeps on its own eventfd, for messages and for room, and its peer wakes it with one system
call only when its flag says that it sleeps. The socket stays open: its end-of-file is the peer's end, orderly if the ring is marked
closed.
"""

from __future__ import annotations

import fcntl
import os
import sys
from contextlib import ExitStack, suppress
from functools import cache
from typing import ClassVar, NoReturn

from flowrt.transports.channel.peer_watch import PeerWatch
from flowrt.transports.channel.queued import QueuedChannel
from flowrt.transports.channel.rendezvous import Meeting, Offer
from flowrt.transports.channel.socket_transport import SocketTransport
from flowrt.transports.contract import Capabilities, ChannelStatistics
from flowrt.transports.errors import BrokenChannelError, TransportError, UnavailableError
from flowrt.transports.shared_memory.polling import Polling
from flowrt.transports.shared_memory.ring import PAGE_BYTES, RELEASED, WRITER_SLEEPS, Layout
from flowrt.transports.shared_memory.ring_reader import RingReader
from flowrt.transports.shared_memory.ring_writer import RingWriter
from flowrt.transports.wire.codec import WireError
from flowrt.transports.wire.message import Message

try:
    from flowrt.transports.native._words import Leases, Memory
except ImportError as error:
    _missing: str | None = str(error)
else:
    _missing = None

COMMON_BYTES = 16 << 20  # of a channel; a machine whose limits do not permit as much has no shm
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
RECHECK_SECONDS = 0.25  # a sleeping side checks this often by itself, and counts when that was needed
PATIENT_CHECKS = 20  # during which a wake-up may be on its way after the peer has lowered the flag: it may wait for a processor


class SharedMemoryChannel(QueuedChannel):
    """One end. Owns the eventfds and the socket; the mapping stays valid for the received tensors that alias it."""

    scheme = "shm"
    copies_at_once = True

    def __init__(self, meeting: Meeting, memory: Memory, layout: Layout, own_wake: int, peer_wake: int) -> None:
        super().__init__(meeting.limits, meeting.peer)
        side = int(meeting.handshake.role == "listener")  # also the number of the direction in which this end sends
        incoming = 1 - side
        self._own_wake = own_wake
        self._peer_wake = peer_wake
        self._leases = Leases(
            memory,
            layout.area(incoming),
            layout.area_bytes,
            layout.words(incoming) + RELEASED,
            layout.words(incoming) + WRITER_SLEEPS,
            peer_wake,
        )
        self._writer = RingWriter(memory, layout, side, meeting.limits, self._counters, peer_wake, own_wake)
        self._reader = RingReader(memory, self._leases, layout, incoming, meeting.limits, self._counters, peer_wake)
        self._unreadable = False
        self._polling, self._is_polling = Polling(), False  # `_poll` is due
        self._num_checks = 0  # in a row that found a message without a wake-up
        self._peer_watch = PeerWatch(meeting.sock, self._on_peer_end)
        self._loop.add_reader(own_wake, self._on_wake)
        self._timer = self._loop.call_later(RECHECK_SECONDS, self._recheck)

    def statistics(self) -> ChannelStatistics:
        self._counters.held_buffers = self._leases.held
        return super().statistics()

    def send_nowait(self, message: Message) -> bool:
        if self._closed or self._ended or self._broken is not None:
            self._check_sendable()
        try:
            return not self._num_senders and self._writer.send(message)
        except WireError as error:
            self._cannot_send(error)

    def _transmit(self, message: Message, *, in_parts: bool = False) -> bool:
        writer = self._writer
        try:
            sent = writer.advance(message) if in_parts else writer.send(message, True)
        except WireError as error:
            self._cannot_send(error)
        self._copying = writer.copying
        return sent

    def _advance(self, message: Message) -> bool:
        return self._transmit(message, in_parts=True)

    def _cannot_send(self, error: WireError) -> NoReturn:
        self._break(str(error), nonsense=True)
        self._check_sendable()
        raise BrokenChannelError(str(error))

    async def _settle(self) -> None:
        copy_threads = self._writer.copy_threads
        self._copying = self._writer.copying = False
        ticket = copy_threads.ticket()
        try:
            await self._until(lambda: copy_threads.settled(ticket))
        except TransportError:
            copy_threads.wait()  # the message has been sent
        except BaseException:
            copy_threads.wait()  # as long as a copy takes: the tensors are the caller's again when this returns
            raise

    def _abandon(self) -> None:
        if not self._closed:
            self._writer.abandon()

    def _take(self) -> Message | None:
        if self._unreadable:
            return None
        try:
            return self._reader.take()
        except WireError as error:
            self._unreadable = True
            self._break(str(error), nonsense=True)
            return None

    def _expect_message(self) -> bool:
        if not self._polling.begin():
            return self._reader.expect_message()
        if not self._is_polling:
            self._is_polling = True
            self._loop.call_soon(self._poll)
        return False

    def _poll(self) -> None:
        self._is_polling = False
        if self._receiver is None or self._closed or self._ended or self._broken is not None:
            return
        if self._reader.has_message():
            self._polling.found()
            self._num_checks = 0
            self._receive_now()
        elif self._polling.found_nothing():
            self._is_polling = True
            self._loop.call_soon(self._poll)
        elif self._reader.expect_message():
            self._receive_now()

    def _expect_room(self) -> bool:
        return self._writer.expect_room()

    def _on_wake(self) -> None:
        try:
            os.eventfd_read(self._own_wake)
        except BlockingIOError:
            return
        self._num_checks = 0
        if self._room is not None or self._waiting:
            self._wake_sender()
        self._receive_now()

    def _recheck(self) -> None:
        """Checks what a sleeping side waits for, in case that a wake-up was lost.

        Progress found by two checks in a row is a lost wake-up if the peer has not lowered this side's flag; found once, the peer may be
        between its store and its check of the flag. With the flag lowered, the wake-up is on its way, and PATIENT_CHECKS pass first.
        """
        if self._broken is not None or self._ended:
            return
        self._timer = self._loop.call_later(RECHECK_SECONDS, self._recheck)
        unread = self._receiver is not None and self._reader.has_message()
        room = self._room is not None and self._writer.has_more_room()
        self._num_checks = self._num_checks + 1 if unread or room else 0
        is_lost = (unread and self._reader.flag_is_up()) or (room and self._writer.flag_is_up())
        if self._num_checks > (1 if is_lost else PATIENT_CHECKS):
            self._counters.late_wakeups += 1
            self._num_checks = 0
            self._wake_receiver()
            self._wake_sender()

    def _on_peer_end(self, reason: str | None) -> None:
        if reason is None and self._reader.peer_has_closed():
            self._end()
        else:
            self._break(reason or self._cut_reason, nonsense=reason is not None)

    def _hang_up(self) -> None:
        self._peer_watch.close()

    async def _shut(self) -> None:
        self._timer.cancel()
        self._loop.remove_reader(self._own_wake)
        self._writer.close(in_order=self._broken is None)
        self._reader.close()
        self._peer_watch.close()  # after the ring has the mark of the end
        os.close(self._own_wake)
        os.close(self._peer_wake)


class SharedMemoryTransport(SocketTransport):
    """`shm://name`, between processes of one user on one Linux host."""

    scheme: ClassVar[str] = "shm"
    capabilities: ClassVar[Capabilities] = Capabilities()

    @classmethod
    def unavailable_reason(cls) -> str | None:
        if sys.platform != "linux":
            return "shm needs Linux (memfd, eventfd and abstract sockets); use zmq here"
        if _missing is not None:
            return (
                f"shm needs the compiled file transports/native/_words.c, which is not there ({_missing}); install a C compiler and "
                "the Python headers and install flowrt again, or use zmq"
            )
        return _memory_problem()

    def _offer(self, meeting: Meeting, on_failure: ExitStack) -> Offer:
        layout = Layout.of(meeting.limits)
        memfd = sealed_memory(layout.total_bytes, by_parts=can_populate())
        on_failure.callback(os.close, memfd)
        wakes = []
        for _ in range(2):
            wakes.append(os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC))
            on_failure.callback(os.close, wakes[-1])

        def make_channel(meeting: Meeting) -> SharedMemoryChannel:
            memory = Memory(memfd, layout.total_bytes)
            memory.populate(0, PAGE_BYTES)  # what every message needs; slots and areas are allocated as they are used
            for direction in range(2):
                memory.populate(layout.records(direction), layout.records_bytes)
            channel = SharedMemoryChannel(meeting, memory, layout, *wakes)
            os.close(memfd)
            return channel

        return Offer(b"", [memfd, *wakes], make_channel)

    def _accept(self, meeting: Meeting) -> SharedMemoryChannel:
        """Checks the descriptors that the connector has passed before it uses them."""
        layout = Layout.of(meeting.limits)
        if len(meeting.descriptors) != 3:
            raise WireError(f"{len(meeting.descriptors)} descriptors came instead of 3")
        memfd, peer_wake, own_wake = meeting.descriptors
        if fcntl.fcntl(memfd, fcntl.F_GET_SEALS) & SEALS != SEALS or os.fstat(memfd).st_size != layout.total_bytes:
            raise WireError("the memory is not sealed, or not of the size agreed on")
        for descriptor in (peer_wake, own_wake):
            if os.readlink(f"/proc/self/fd/{descriptor}") != "anon_inode:[eventfd]" or os.get_blocking(descriptor):
                raise WireError("a descriptor that is not a non-blocking eventfd")
        channel = SharedMemoryChannel(meeting, Memory(memfd, layout.total_bytes), layout, own_wake, peer_wake)
        os.close(memfd)
        return channel


@cache
def can_populate() -> bool:
    """Whether this kernel allocates mapped memory on request and reports failure, instead of a signal at first use (Linux 5.14)."""
    memfd = os.memfd_create("flowrt-probe", os.MFD_CLOEXEC)
    try:
        os.ftruncate(memfd, PAGE_BYTES)
        return Memory(memfd, PAGE_BYTES).populate(0, PAGE_BYTES)
    except OSError:
        return False
    finally:
        os.close(memfd)


def _memory_problem() -> str | None:
    """Why no memory can be shared here, under the limits of this process; nothing is allocated."""
    memfd = os.memfd_create("flowrt", os.MFD_CLOEXEC)
    try:
        os.ftruncate(memfd, COMMON_BYTES)
    except OSError as error:
        return f"shm cannot share {COMMON_BYTES >> 20} MiB of memory here ({error.strerror}); raise the limit (ulimit -f), or use zmq"
    finally:
        os.close(memfd)
    return None


def sealed_memory(nbytes: int, *, by_parts: bool = False) -> int:
    """A memfd of `nbytes`, sealed against resizing, all of it allocated, unless the caller allocates `by_parts`.

    Raises UnavailableError when there is no memory.
    """
    available = available_bytes()
    if nbytes > available // 2:  # the kernel would use the machine's last page before it fails
        raise UnavailableError(
            f"no memory for {nbytes} bytes to share with another process, only {available} are available; lower the limits of the edges"
        )
    memfd = os.memfd_create("flowrt", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        if by_parts:
            os.ftruncate(memfd, nbytes)
        else:
            os.posix_fallocate(memfd, 0, nbytes)
        fcntl.fcntl(memfd, fcntl.F_ADD_SEALS, SEALS)
    except (OSError, OverflowError) as error:
        os.close(memfd)
        raise UnavailableError(
            f"no memory for {nbytes} bytes to share with another process ({error}); lower the limits of the edges"
        ) from error
    return memfd


def available_bytes() -> int:
    """What the kernel thinks can be allocated without swapping."""
    with suppress(OSError), open("/proc/meminfo") as lines:
        for line in lines:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
