"""Implements `EmulatedChannel`, a channel whose messages take the time of a link profile, times a dilation, over any channel.

Both ends of a channel must be wrapped:

    sender                                              receiver
    send -> shares the sender's NIC ------------------> shares the receiver's NIC -> recv
            sends data at once, stamped with its start;  begins `latency` after that start;
            "passed" follows, with the exact time        delivers when both NICs have let it pass, `latency` after the first

Each process paces its own NIC. The sender sends exact times of its model, on the machine's monotonic clock, and the receiver derives the
delivery time from them. Timers only decide when to check, so their delays do not add up. A message delivered after its time is late; the
owner of the Nic gets the delay.

A channel serves one message at a time; the next one waits in `send`, in order. So the wrapper copies nothing, its sender holds nothing,
and its receiver holds at most what the limits allow, besides the channel underneath.

Messages for which `has_priority` is true do not wait: they have a queue of their own at both NICs, and are delivered before messages that
were sent earlier. The contract's order holds for all others.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

import msgspec

from flowrt.transports.channel.queued import QueuedChannel
from flowrt.transports.contract import LINGER_SECONDS, Channel, ChannelStatistics, Limits
from flowrt.transports.emulation.nic import Cancellable, Nic
from flowrt.transports.errors import BrokenChannelError, ClosedChannelError, EndOfChannel, LimitError, TransportError
from flowrt.transports.wire.codec import header_bytes
from flowrt.transports.wire.message import Message

PASSED = "link.passed"  # the time at which a message had passed the sender's NIC
OVERTAKING = "link.overtaking"  # a message that does not wait for those before it


class Stamp(msgspec.Struct, frozen=True, array_like=True):
    """The frame header of a message: its number, when its service began, when the service of the message before it ended (None when
    reported already or not ended), and its own header. Times are in seconds."""

    number: int
    start_seconds: float
    before_seconds: float | None
    header: bytes | None


class Passed(msgspec.Struct, frozen=True, array_like=True):
    """The header of a PASSED frame: message `number` and all before it had passed at `seconds`."""

    number: int
    seconds: float


class Overtaking(msgspec.Struct, frozen=True, array_like=True):
    """The header of an OVERTAKING frame: the kind and header of the message, its number (-1, -2, ..), when the service at the sender's NIC
    began, and when it had passed."""

    kind: str
    header: bytes | None
    number: int
    start_seconds: float
    passed_seconds: float


@dataclass
class ArrivingMessage:
    """An arriving message, and the times at which it passed each NIC."""

    message: Message
    number: int
    size: int
    start: float
    work: float
    moved: float = 0.0
    sent: float | None = None  # passed the sender's NIC
    received: float | None = None  # passed the receiver's NIC
    held: float = 0.0  # seconds by which an injected fault delays it further


def _never(message: Message) -> bool:
    return False


class EmulatedChannel(QueuedChannel):
    """One end of an emulated link over `inner`, which it owns. It conforms to transports/contract.py."""

    scheme = "emulated"

    def __init__(self, inner: Channel, nic: Nic, limits: Limits, has_priority: Callable[[Message], bool] = _never) -> None:
        super().__init__(limits, inner.peer)
        self.has_priority = has_priority
        self._inner = inner
        self._nic = nic
        self._num_overtaking = 0  # that were sent
        self._ahead: list[tuple[float, ArrivingMessage]] = []  # that have arrived, and when each is due
        self._tasks: set[asyncio.Task[None]] = set()
        # Out.
        self._number = -1  # of the last data frame
        self._busy = False  # the NIC serves a message of this end, or is about to
        self._service_request: tuple[float, float] | None = None  # since when the head of the queue waits, and its work
        self._service_begin: float | None = None  # when the service of the head began; the head must be sent now
        self._service_end: float | None = None  # when the service of the head ended, if before it was sent
        self._serves_cancelled = False  # the message in service was cancelled before it was sent
        self._unreported: float | None = None  # when message `_number` had passed the NIC, if not reported yet
        self._unsent: deque[Message] = deque()  # control frames for which `inner` had no room
        self._writing = False
        self._head_frame: tuple[Message, int, float | None] | None = (
            None  # the head's frame, waiting for room, with the previous `_number` and `_unreported`
        )
        # In.
        self._arriving: deque[ArrivingMessage] = deque()
        self._arriving_bytes = 0
        self._held_until = 0.0  # when the last message that an injected fault delayed is due
        self._inbox: deque[ArrivingMessage] = deque()
        self._room: asyncio.Future[None] | None = None  # the reader waits for room
        self._alarm: Cancellable | None = None
        self._final: str | None = None  # reason why `inner` ended; "" for an orderly end
        self._reader = self._spawn(self._read(), "reader")

    def statistics(self) -> ChannelStatistics:
        inner_counters = self._inner.statistics()
        return msgspec.structs.replace(
            self._counters,
            late_wakeups=inner_counters.late_wakeups,
            held_buffers=inner_counters.held_buffers,
            messages_dropped=inner_counters.messages_dropped,
        )

    # Out: QueuedChannel's queue of senders, whose head requests the NIC, and messages that overtake.

    def send_nowait(self, message: Message) -> bool:
        if not self.has_priority(message):
            return super().send_nowait(message)
        self._check_sendable()
        return self._overtake(message)

    async def send(self, message: Message) -> None:
        if not self.has_priority(message) or not self.send_nowait(message):  # without room it waits in order
            await super().send(message)

    def _overtake(self, message: Message) -> bool:
        """Sends a message of high priority now; its time at the sender's NIC depends on no later message. False: `inner` has no room."""
        nic, start = self._nic, self._nic.timer.now()
        work = nic.work(message)
        passed = nic.sending.passing(start, work)
        if not self._inner.send_nowait(self._overtaking_frame(message, passed - work, passed)):
            return False
        nic.sending.interrupt(start, work)
        self._num_overtaking += 1
        self._count_sent(message)
        return True

    def _overtaking_frame(self, message: Message, start: float, passed: float) -> Message:
        header = Overtaking(message.kind, header_bytes(message), -1 - self._num_overtaking, start, passed)
        return Message(OVERTAKING, message.tag, message.edge, header, message.tensors)

    def _transmit(self, message: Message) -> bool:
        if self._busy or self._unsent:
            return False
        start = self._nic.timer.now()
        if not self._send_frame(message, start):
            return False
        self._serve(message, start)
        return True

    def _advance(self, message: Message) -> bool:
        """Returns True once the message is sent, or is in `_head_frame` and only waits for room in `inner`."""
        granted = self._service_begin
        if (granted is None and self._busy) or self._unsent:
            if self._service_request is None and granted is None:
                self._service_request = self._nic.timer.now(), self._nic.work(message)
            return False
        start = self._nic.timer.now() if granted is None else granted
        if not self._send_frame(message, start):
            self._head_frame = self._next_frame(message, start), self._number, self._unreported
            self._number, self._unreported = self._number + 1, None
        self._service_request = self._service_begin = None
        if granted is None:
            self._serve(message, start)
        elif self._service_end is not None:
            passed, self._service_end = self._service_end, None
            self._on_passed(passed)
        return True

    async def _send_at_head(self, message: Message) -> None:
        await super()._send_at_head(message)
        if self._head_frame is not None:
            await self._inner.send(self._head_frame[0])
            self._head_frame = None
            self._count_sent(message)
            self._report_passed()

    def _abandon(self) -> None:
        self._service_request = None
        if self._service_begin is not None:
            self._serves_cancelled = self._busy = self._service_end is None
            self._service_begin = self._service_end = None
            self._report_passed()
        elif self._head_frame is not None:
            _, number, unreported = self._head_frame
            self._head_frame, self._serves_cancelled, self._unreported = None, self._busy, None
            if unreported is not None:
                self._queue(Message(PASSED, header=Passed(number, unreported)))

    def _send_frame(self, message: Message, start: float) -> bool:
        if not self._inner.send_nowait(self._next_frame(message, start)):
            return False
        self._number, self._unreported = self._number + 1, None
        self._count_sent(message)
        return True

    def _next_frame(self, message: Message, start: float) -> Message:
        header = header_bytes(message)
        if header is not None and len(header) > self.limits.max_header_bytes:
            raise LimitError(f"the header of a {message.kind!r} message takes {len(header)} bytes of {self.limits.max_header_bytes}")
        stamp = Stamp(self._number + 1, start, self._unreported, header)
        return Message(message.kind, message.tag, message.edge, stamp, message.tensors)

    def _count_sent(self, message: Message) -> None:
        self._counters.messages_sent += 1
        self._counters.bytes_sent += message.payload_bytes

    def _serve(self, message: Message, start: float) -> None:
        self._busy = True
        self._nic.sending.add(self._on_passed, start, self._nic.work(message))

    def _on_passed(self, time: float) -> None:
        """Handles the end of service of a message on the sender's NIC. A waiting head of the queue is served from the same moment."""
        if self._service_begin is not None:
            self._service_end = time
            return
        if self._serves_cancelled:
            self._serves_cancelled = False
        else:
            self._unreported = time
        if self._closed or self._service_request is None:
            self._busy = False
            self._report_passed()
        else:
            since, work = self._service_request
            self._service_request, self._service_begin = None, max(time, since)
            self._nic.sending.add(self._on_passed, self._service_begin, work)
        self._wake_sender()

    def _report_passed(self) -> None:
        """Sends an unreported time in a separate frame, behind its message."""
        if self._unreported is not None and self._head_frame is None and not self._closed:
            frame = Message(PASSED, header=Passed(self._number, self._unreported))
            self._unreported = None
            try:
                if self._unsent or not self._inner.send_nowait(frame):
                    self._queue(frame)
            except TransportError:
                pass  # the reader fails too

    def _queue(self, frame: Message) -> None:
        self._unsent.append(frame)
        if not self._writing:
            self._writing = True
            self._spawn(self._write(), "writer")

    async def _write(self) -> None:
        try:
            while self._unsent:
                await self._inner.send(self._unsent[0])
                self._unsent.popleft()
                self._wake_sender()
        except TransportError:
            pass  # the reader fails too
        finally:
            self._unsent.clear()
            self._wake_sender()
            self._writing = False

    # In.

    def _take(self) -> Message | None:
        if not self._inbox:
            return None
        head = self._inbox.popleft()
        self._release(head)
        return head.message

    def _release(self, arriving: ArrivingMessage) -> None:
        self._arriving_bytes -= arriving.size
        self._counters.messages_received += 1
        self._counters.bytes_received += arriving.size
        if self._room is not None and not self._room.done():
            self._room.set_result(None)

    async def _read(self) -> None:
        try:
            while True:
                self._read_frame(await self._inner.recv())
                while self._is_full():
                    self._room = self._loop.create_future()
                    await self._room
        except EndOfChannel:
            self._on_inner_end("")
        except BrokenChannelError as error:
            self._on_inner_end(str(error) or "broken")
        except ClosedChannelError:
            pass
        except msgspec.ValidationError as error:
            self._break(f"a frame that is none of an emulated link: {error}")

    def _is_full(self) -> bool:
        """Whether the receiver is at its limits. Always False while every message here waits for its PASSED frame, which arrives later."""
        if not self._inbox and (not self._arriving or self._arriving[0].sent is None):
            return False
        limits = self.limits
        return len(self._arriving) + len(self._inbox) >= limits.capacity_messages or self._arriving_bytes >= limits.capacity_bytes

    def _read_frame(self, frame: Message) -> None:
        if frame.kind == PASSED:
            passed = frame.decode_header(Passed)
            self._has_passed(passed.number, passed.seconds)
        elif frame.kind == OVERTAKING:
            self._read_overtaking(frame, frame.decode_header(Overtaking))
        else:
            stamp = frame.decode_header(Stamp)
            if stamp.before_seconds is not None:
                self._has_passed(stamp.number - 1, stamp.before_seconds)
            message = Message(frame.kind, frame.tag, frame.edge, stamp.header, frame.tensors)
            size, work, nic = message.payload_bytes, self._nic.work(message), self._nic
            arriving = ArrivingMessage(message, stamp.number, size, stamp.start_seconds, work, held=self._held_seconds(work))
            self._arriving.append(arriving)
            self._arriving_bytes += size
            arriving.moved = nic.receiving.add(self._on_received, stamp.start_seconds + nic.latency_seconds, work)
        self._deliver_due()

    def _read_overtaking(self, frame: Message, sent: Overtaking) -> None:
        message = Message(sent.kind, frame.tag, frame.edge, sent.header, frame.tensors)
        size, work, nic = message.payload_bytes, self._nic.work(message), self._nic
        received, moved = nic.receiving.interrupt(sent.start_seconds + nic.latency_seconds, work)
        arriving = ArrivingMessage(message, sent.number, size, sent.start_seconds, work, moved, sent.passed_seconds, received)
        self._arriving_bytes += size
        self._ahead.append((max(received, sent.passed_seconds + nic.latency_seconds) + self._held_seconds(work), arriving))

    def _held_seconds(self, work: float) -> float:
        """By which a slow link delays a message that arrives now, behind the NICs: other links are as fast as ever."""
        return (self._inner.slowness - 1.0) * (self._nic.latency_seconds + work)

    def _has_passed(self, number: int, seconds: float) -> None:
        for arriving in self._arriving:
            if arriving.number <= number and arriving.sent is None:
                arriving.sent = seconds

    def _on_received(self, time: float) -> None:
        first = next((arriving for arriving in self._arriving if arriving.received is None), None)
        if first is not None:  # None: closed meanwhile
            first.received = time
            self._deliver_due()

    def _deliver_due(self) -> None:
        """Delivers all due messages, those that overtake first and the others in order, and sets the alarm for the next one."""
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
        nic, num_before, alarms = self._nic, len(self._inbox), list[float]()
        while self._ahead:
            due, ahead = self._ahead[0]
            if due > nic.timer.now():
                alarms.append(due)
                break
            del self._ahead[0]
            self._deliver(ahead, due)
        while self._arriving:
            head = self._arriving[0]
            if head.sent is None or head.received is None:
                break
            due = max(head.received, head.sent + nic.latency_seconds) + head.held
            if head.held:
                self._held_until = max(self._held_until, due)
            due = max(due, self._held_until)  # behind those that were held
            if due > nic.timer.now():
                alarms.append(due)
                break
            self._arriving.popleft()
            self._deliver(head, due)
        if alarms:
            self._alarm = nic.timer.call_at(min(alarms), self._deliver_due)
        if len(self._inbox) > num_before:
            self._wake_receiver()
        if self._final is not None and not self._arriving and not self._ahead:
            if self._final:
                self._break(self._final)
            else:
                self._end()

    def _deliver(self, arrived: ArrivingMessage, due: float) -> None:
        self._inbox.append(arrived)
        self._nic.note(due - arrived.start, self._nic.timer.now() - due + arrived.moved)

    def _on_inner_end(self, reason: str) -> None:
        """Handles the end of `inner`: arrived messages are still delivered at their times, then the end is reported."""
        self._final = reason
        for arriving in self._arriving:
            if arriving.sent is None:
                arriving.sent = arriving.start + arriving.work
        self._deliver_due()

    # Closing.

    def _hang_up(self) -> None:
        if self._broken is not None:
            self._inner.abort(self._broken)
        self._spawn(self._inner.aclose(), "closer")

    async def _shut(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
        self._reader.cancel()
        if self._busy and not self._serves_cancelled and self._service_begin is None and self._final is None:
            passed = self._nic.sending.model.finish_without_arrivals(self._on_passed)
            self._queue(Message(PASSED, header=Passed(self._number, passed or self._nic.timer.now())))
        try:
            if self._tasks:
                await asyncio.wait(self._tasks, timeout=LINGER_SECONDS)  # the writer's last frames
        finally:
            for task in self._tasks:
                task.cancel()
            self._unsent.clear()
            self._arriving.clear()
            self._ahead.clear()
            self._inbox.clear()
            await self._inner.aclose()
            if self._tasks:
                await asyncio.wait(self._tasks)

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Starts a task, which `_shut` ends and awaits."""
        task = self._loop.create_task(work, name=f"{name} of the link to {self.peer.name}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
