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
and its receiver holds at most what the limits allow, besides the channel below.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Coroutine
from typing import Any, ClassVar

import msgspec

from flowrt.transports.channel.message_windows import RESERVED
from flowrt.transports.channel.queued import QueuedChannel
from flowrt.transports.contract import LINGER_SECONDS, Channel, ChannelStatistics, Limits
from flowrt.transports.emulation.frames import ASK, PASSED, TAKEN, HeldMessage, Passed, Stamp, disguised, undisguised
from flowrt.transports.emulation.nic import Cancellable, Nic
from flowrt.transports.errors import BrokenChannelError, ClosedChannelError, EndOfChannel, InvalidMessageError, LimitError, TransportError
from flowrt.transports.wire.codec import WireError
from flowrt.transports.wire.message import Message


class EmulatedChannel(QueuedChannel):
    """One end of an emulated link over `inner`, which it owns. It conforms to transports/contract.py."""

    scheme: ClassVar[str] = "emulated"
    windows_by_message = True

    def __init__(self, inner: Channel, nic: Nic, limits: Limits) -> None:
        super().__init__(limits, inner.peer)
        self._inner = inner
        self._nic = nic
        self._tasks: set[asyncio.Task[None]] = set()
        # Out.
        self._number = self._acknowledged = -1  # number of the last data frame; number of the last one known to be taken by the peer's user
        self._busy = False  # the NIC serves a message of this end, or is about to
        self._asked: tuple[float, float] | None = None  # since when the head of the queue waits, and its work
        self._granted: float | None = None  # when the service of the head began; the head must be sent now
        self._early: float | None = None  # when the service of the head ended, if before it was sent
        self._is_ghost = False  # the message in service was cancelled before it was sent
        self._untold: float | None = None  # when message `_number` had passed the NIC, if not reported yet
        self._unsent: deque[Message] = deque()  # control frames for which `inner` had no room
        self._writing = False
        self._below: tuple[Message, int, float | None] | None = (
            None  # the head's frame, waiting for room, with the previous `_number` and `_untold`
        )
        # In.
        self._held: deque[HeldMessage] = deque()
        self._held_bytes = 0
        self._inbox: deque[HeldMessage] = deque()
        self._taken_number = self._reported_number = self._requested_number = -1  # of messages: taken; reported as taken; requested
        self._taken: asyncio.Future[None] | None = None  # the reader waits for room
        self._alarm: Cancellable | None = None
        self._final: str | None = None  # reason why `inner` ended; "" for an orderly end
        self._reader = self._spawn(self._read(), "reader")

    def statistics(self) -> ChannelStatistics:
        below = self._inner.statistics()
        return msgspec.structs.replace(
            self._counters,
            late_wakeups=below.late_wakeups,
            held_buffers=below.held_buffers,
            messages_dropped=below.messages_dropped,
        )

    async def send_acknowledged(self, message: Message) -> None:
        await self.send(message)
        number = self._number  # still the number of `message`: the next sender has not run yet
        self._queue(Message(ASK, header=Passed(number, self._nic.timer.now())))
        await self._until(lambda: self._acknowledged >= number)

    # Out: QueuedChannel's queue of senders, whose head requests the NIC.

    def _transmit(self, message: Message) -> bool:
        if self._busy or self._unsent:
            return False
        start = self._nic.timer.now()
        if not self._put(message, start):
            return False
        self._serve(message, start)
        return True

    def _advance(self, message: Message) -> bool:
        """Returns True once the message is sent, or is in `_below` and only waits for room in `inner`."""
        granted = self._granted
        if (granted is None and self._busy) or self._unsent:
            if self._asked is None and granted is None:
                self._asked = self._nic.timer.now(), self._nic.work(message)
            return False
        start = self._nic.timer.now() if granted is None else granted
        if not self._put(message, start):
            self._below = self._next_frame(message, start), self._number, self._untold
            self._number, self._untold = self._number + 1, None
        self._asked = self._granted = None
        if granted is None:
            self._serve(message, start)
        elif self._early is not None:
            passed, self._early = self._early, None
            self._on_passed(passed)
        return True

    async def _send_at_head(self, message: Message) -> None:
        await super()._send_at_head(message)
        if self._below is not None:
            await self._inner.send(self._below[0])
            self._below = None
            self._count_sent(message)
            self._tell()

    def _abandon(self) -> None:
        self._asked = None
        if self._granted is not None:
            self._is_ghost = self._busy = self._early is None
            self._granted = self._early = None
            self._tell()
        elif self._below is not None:
            _, number, untold = self._below
            self._below, self._is_ghost, self._untold = None, self._busy, None
            if untold is not None:
                self._queue(Message(PASSED, header=Passed(number, untold)))

    def _put(self, message: Message, start: float) -> bool:
        if not self._inner.send_nowait(self._next_frame(message, start)):
            return False
        self._number, self._untold = self._number + 1, None
        self._count_sent(message)
        return True

    def _next_frame(self, message: Message, start: float) -> Message:
        header = message.header
        if header is not None and not isinstance(header, bytes):
            try:
                header = bytes(header) if isinstance(header, bytearray | memoryview) else msgspec.msgpack.encode(header)
            except (TypeError, ValueError, OverflowError, RecursionError) as error:
                raise InvalidMessageError(f"the header of a {message.kind!r} message cannot be encoded: {error}") from error
        if header is not None and len(header) > self.limits.max_header_bytes:
            raise LimitError(f"the header of a {message.kind!r} message takes {len(header)} bytes of {self.limits.max_header_bytes}")
        stamp = Stamp(self._number + 1, start, self._untold, header)
        return Message(disguised(message.kind), message.tag, message.edge, stamp, message.tensors)

    def _count_sent(self, message: Message) -> None:
        self._counters.messages_sent += 1
        self._counters.bytes_sent += message.payload_bytes

    def _serve(self, message: Message, start: float) -> None:
        self._busy = True
        self._nic.sending.add(self._on_passed, start, self._nic.work(message))

    def _on_passed(self, time: float) -> None:
        """Handles the end of service of a message on the sender's NIC. A waiting head of the queue is served from the same moment."""
        if self._granted is not None:
            self._early = time
            return
        if self._is_ghost:
            self._is_ghost = False
        else:
            self._untold = time
        if self._closed or self._asked is None:
            self._busy = False
            self._tell()
        else:
            since, work = self._asked
            self._asked, self._granted = None, max(time, since)
            self._nic.sending.add(self._on_passed, self._granted, work)
        self._wake_sender()

    def _tell(self) -> None:
        """Sends an unreported time in a separate frame, behind its message."""
        if self._untold is not None and self._below is None and not self._closed:
            frame = Message(PASSED, header=Passed(self._number, self._untold))
            self._untold = None
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
        self._let_go(head)
        self._taken_number = head.number
        if self._requested_number > self._reported_number:
            self._tell_taken()
        return head.message

    def _let_go(self, held: HeldMessage) -> None:
        self._held_bytes -= held.size
        self._counters.messages_received += 1
        self._counters.bytes_received += held.size
        if self._taken is not None and not self._taken.done():
            self._taken.set_result(None)

    def _tell_taken(self) -> None:
        if self._taken_number > self._reported_number and self._final is None:
            self._reported_number = self._taken_number
            self._queue(Message(TAKEN, header=Passed(self._reported_number, self._nic.timer.now())))

    def _on_acknowledged(self, number: int) -> None:
        self._acknowledged = max(self._acknowledged, number)
        self._wake_sender()

    async def _read(self) -> None:
        try:
            while True:
                self._hear(await self._inner.recv())
                while self._is_full():
                    self._taken = self._loop.create_future()
                    await self._taken
        except EndOfChannel:
            self._over("")
        except BrokenChannelError as error:
            self._over(str(error) or "broken")
        except ClosedChannelError:
            pass
        except msgspec.ValidationError as error:
            self._break(f"a frame that is none of an emulated link: {error}")

    def _is_full(self) -> bool:
        """Whether the receiver is at its limits. Always False while every message here waits for its PASSED frame, which arrives later."""
        if not self._inbox and (not self._held or self._held[0].sent is None):
            return False
        limits = self.limits
        return len(self._held) + len(self._inbox) >= limits.capacity_messages or self._held_bytes >= limits.capacity_bytes

    def _hear(self, frame: Message) -> None:
        if frame.kind == PASSED:
            passed = frame.decode_header(Passed)
            self._has_passed(passed.number, passed.seconds)
        elif frame.kind == ASK:
            self._requested_number = max(self._requested_number, frame.decode_header(Passed).number)
            self._tell_taken()
        elif frame.kind == TAKEN:
            taken, latency = frame.decode_header(Passed), self._nic.latency_seconds
            self._nic.timer.call_at(taken.seconds + latency, lambda: self._on_acknowledged(taken.number))
        else:
            stamp = frame.decode_header(Stamp)
            if stamp.before_seconds is not None:
                self._has_passed(stamp.number - 1, stamp.before_seconds)
            message = Message(undisguised(frame.kind), frame.tag, frame.edge, stamp.header, frame.tensors)
            size, work, nic = message.payload_bytes, self._nic.work(message), self._nic
            held = HeldMessage(message, stamp.number, size, stamp.start_seconds, work)
            self._held.append(held)
            self._held_bytes += size
            held.moved = nic.receiving.add(self._on_received, stamp.start_seconds + nic.latency_seconds, work)
        self._give_out()

    def _has_passed(self, number: int, seconds: float) -> None:
        for held in self._held:
            if held.number <= number and held.sent is None:
                held.sent = seconds

    def _on_received(self, time: float) -> None:
        first = next((held for held in self._held if held.received is None), None)
        if first is not None:  # None: closed meanwhile
            first.received = time
            self._give_out()

    def _give_out(self) -> None:
        """Delivers all due messages in order and sets the alarm for the next one."""
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
        nic, num_before = self._nic, len(self._inbox)
        while self._held:
            head = self._held[0]
            if head.sent is None or head.received is None:
                break
            due, now = max(head.received, head.sent + nic.latency_seconds), nic.timer.now()
            if due > now:
                self._alarm = nic.timer.call_at(due, self._give_out)
                break
            self._held.popleft()
            if head.message.kind[:1] == RESERVED:
                self._hear_of_windows(head)
            else:
                self._inbox.append(head)
            nic.note(due - head.start, now - due + head.moved)
        if len(self._inbox) > num_before:
            self._wake_receiver()
        if self._final is not None and not self._held:
            if self._final:
                self._break(self._final)
            else:
                self._end()

    def _hear_of_windows(self, held: HeldMessage) -> None:
        """Processes a window message, which took its time on the link like any other message."""
        self._let_go(held)
        try:
            if not self._closed:
                self._message_windows().on_message(held.message)
        except WireError as error:
            self._break(str(error), nonsense=True)

    def _over(self, reason: str) -> None:
        """Handles the end of `inner`: arrived messages are still delivered at their times, then the end is reported."""
        self._final = reason
        for held in self._held:
            if held.sent is None:
                held.sent = held.start + held.work
        self._give_out()

    # Closing.

    def _hang_up(self) -> None:
        self._spawn(self._inner.aclose(), "closer")

    async def _shut(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
        self._reader.cancel()
        if self._busy and not self._is_ghost and self._granted is None and self._final is None:
            passed = self._nic.sending.line.finish_if_nothing_came(self._on_passed)
            self._queue(Message(PASSED, header=Passed(self._number, passed or self._nic.timer.now())))
        try:
            if self._tasks:
                await asyncio.wait(self._tasks, timeout=LINGER_SECONDS)  # the writer's last frames
        finally:
            for task in self._tasks:
                task.cancel()
            self._unsent.clear()
            self._held.clear()
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
