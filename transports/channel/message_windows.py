"""Implements one-sided windows for transports without shared memory, by messages to which the channel itself responds.

A call is a message `~window` with a `Call` as its header. The owner's end responds in order with a message whose `op` is "done". An owner
sends the values of its flags to the peer once the peer has attached, so both ends know them; the owner's value is authoritative. At most
MAX_CALLS calls of one end wait for responses, so an end keeps a bounded amount for its peer. Bytes are sent in pieces within the channel's
limits and credits. The channel passes each message whose kind begins with RESERVED to `arrived` as soon as it arrives.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable

import msgspec

from flowrt.transports.channel.window_base import (
    CheckedEnd,
    CheckedRemoteWindow,
    CheckedWindow,
    WindowKey,
    check_flag,
    check_range,
    check_window,
    flat,
)
from flowrt.transports.contract import Channel, Limits, RemoteWindow, Window
from flowrt.transports.errors import InvalidMessageError, TransportError, UnavailableError, WindowError
from flowrt.transports.wire.codec import WireError
from flowrt.transports.wire.message import Message, Tensor, TensorSpec

RESERVED = "~"  # first character of the kinds of the channel's own messages
KIND = "~window"
MAX_CALLS = 64


class Call(msgspec.Struct, frozen=True, array_like=True):
    """The header of a window message. The owner's peer sends `op` attach, write, read or flag; the owner sends done or changed."""

    op: str
    token: bytes
    number: int = -1  # of the call, counted by the caller; -1: no response is expected
    offset: int = 0
    nbytes: int = 0
    flag: int = -1
    value: int = 0
    error: str = ""


class MessageWindows:
    """The windows of `channel`. `until` is QueuedChannel._until, `wake` is QueuedChannel._wake_sender, `new_token` makes tokens.
    This object owns the task that responds to the peer; `close` ends the task."""

    def __init__(
        self,
        channel: Channel,
        limits: Limits,
        until: Callable[[Callable[[], bool]], Awaitable[None]],
        wake: Callable[[], None],
        new_token: Callable[[], bytes] | None = None,
    ) -> None:
        self.until = until
        self.wake = wake
        self.owned: dict[bytes, _MessageWindow] = {}
        self.attached: dict[bytes, _RemoteMessageWindow] = {}
        self._channel = channel
        self._limits = limits
        self._new_token = new_token
        self._responses: deque[Message] = deque()  # to the peer's calls
        self._changed_flags: set[tuple[bytes, int]] = set()  # flags whose new value the peer does not have yet
        self._responder: asyncio.Task[None] | None = None
        self._calls: set[int] = set()  # pending calls of this end
        self._results: dict[int, tuple[Call, memoryview]] = {}  # of pending calls, once they have arrived
        self._num_calls = 0

    @property
    def piece_bytes(self) -> int:
        limits = self._limits
        if limits.max_tensors < 1 or limits.max_message_bytes < 1:
            raise UnavailableError("a channel that carries no tensors has no windows")
        return min(limits.max_message_bytes, max(limits.capacity_bytes // 4, 1))

    def open(self, nbytes: int, num_flags: int) -> Window:
        check_window(nbytes, num_flags, len(self.owned))
        _ = self.piece_bytes
        window = _MessageWindow(self, WindowKey.new(nbytes, num_flags, None if self._new_token is None else self._new_token()))
        self.owned[window.token] = window
        return window

    async def attach(self, key: bytes) -> RemoteWindow:
        wanted = WindowKey.read(key)
        window = self.attached[wanted.token] = self.attached.get(wanted.token) or _RemoteMessageWindow(self, wanted)
        try:
            await self.call(Call("attach", wanted.token, nbytes=wanted.nbytes, flag=wanted.num_flags))
        except BaseException:
            self.attached.pop(wanted.token, None)
            raise
        return window

    async def call(self, call: Call, data: memoryview | None = None) -> memoryview:
        """Sends a call and returns the bytes of the response. Raises WindowError when the owner refuses the call."""
        await self.until(lambda: len(self._calls) < MAX_CALLS)
        self._num_calls += 1
        number = self._num_calls
        self._calls.add(number)
        try:
            await self.post(msgspec.structs.replace(call, number=number), data)
            await self.until(lambda: number in self._results)
            response, found = self._results[number]
        finally:
            self._calls.discard(number)
            self._results.pop(number, None)
            self.wake()
        if response.error:
            raise WindowError(response.error)
        return found

    async def post(self, call: Call, data: memoryview | None = None) -> None:
        """Sends a call without waiting for a response."""
        await self._channel.send(_message(call, data))

    def on_message(self, message: Message) -> None:
        """Processes an arrived window message. Raises WireError when it is invalid."""
        try:
            call = message.decode_header(Call)
        except (msgspec.DecodeError, RecursionError) as error:
            raise WireError(f"a window message that cannot be read: {error}") from error
        data = flat(message.tensors[0].data) if message.tensors else memoryview(b"")
        if call.op == "done":
            if call.number in self._calls:  # otherwise the call was cancelled
                self._results[call.number] = call, data
        elif call.op == "changed":
            window = self.attached.get(call.token)
            if window is not None and 0 <= call.flag < len(window.flags):
                window.flags[call.flag] = call.value
        else:
            self._serve(call, data)
        self.wake()

    def announce_flag(self, token: bytes, flag: int) -> None:
        """Sends the new value of a flag, set by this owner, to the peer."""
        self._changed_flags.add((token, flag))
        self._start_responder()
        self.wake()

    async def close(self) -> None:
        """Ends the response task and closes all windows; called when the channel closes."""
        task, self._responder = self._responder, None
        if task is not None:
            task.cancel()
            await asyncio.wait([task])
        self._responses.clear()
        self.owned.clear()
        self.attached.clear()

    def _serve(self, call: Call, data: memoryview) -> None:
        window = self.owned.get(call.token)
        value, error, found = 0, "", None
        try:
            if window is None:
                raise WindowError("no window of this channel has that key, or it was closed")
            if call.op == "attach":
                if (call.nbytes, call.flag) != (window.nbytes, window.num_flags):
                    raise WindowError("no window of this channel has that key")
                window.is_attached = True
                self._changed_flags.update((call.token, flag) for flag, value in enumerate(window.flags) if value)
            elif call.op == "read":
                check_range(call.offset, call.nbytes, window.nbytes)
                if call.nbytes > self.piece_bytes:
                    raise WireError(f"a read of {call.nbytes} bytes of a window at once; {self.piece_bytes} are allowed")
                found = memoryview(bytes(window.buffer[call.offset : call.offset + call.nbytes]))
            elif call.op == "write":
                check_range(call.offset, len(data), window.nbytes)
                window.buffer[call.offset : call.offset + len(data)] = data
            elif call.op != "flag":
                raise WireError(f"a call of a window of kind {call.op[:32]!r}")
            if call.flag >= 0 and call.op in ("write", "flag"):
                check_flag(call.flag, window.num_flags, call.value)
                window.flags[call.flag] = value = call.value
                self._changed_flags.add((call.token, call.flag))
        except WindowError as refused:
            error = str(refused)
        if call.number >= 0:
            if len(self._responses) >= MAX_CALLS:
                raise WireError(f"more than {MAX_CALLS} calls of windows at once")
            self._responses.append(_message(Call("done", call.token, call.number, value=value, error=error), found))
        self._start_responder()

    def _start_responder(self) -> None:
        if self._responder is None and (self._responses or self._changed_flags) and not self._channel.closed:
            self._responder = asyncio.get_running_loop().create_task(self._respond(), name="responses to calls of windows")

    async def _respond(self) -> None:
        try:
            while self._responses or self._changed_flags:
                for token, flag in sorted(self._changed_flags):
                    self._changed_flags.discard((token, flag))
                    window = self.owned.get(token)
                    if window is not None and window.is_attached:
                        await self.post(Call("changed", token, flag=flag, value=window.flags[flag]))
                if self._responses:
                    await self._channel.send(self._responses[0])
                    self._responses.popleft()
        except TransportError:
            pass  # waiting calls fail too
        finally:
            if self._responder is asyncio.current_task():
                self._responder = None


def _message(call: Call, data: memoryview | None) -> Message:
    tensors = (Tensor(TensorSpec("uint8", (len(data),)), data),) if data is not None else ()
    return Message(KIND, header=call, tensors=tensors)


class _MessageEnd(CheckedEnd):
    def __init__(self, windows: MessageWindows, key: WindowKey) -> None:
        super().__init__(key)
        self._windows = windows
        self.flags = [0] * key.num_flags

    def _load(self, flag: int) -> int:
        return self.flags[flag]

    async def _until(self, changed: Callable[[], bool]) -> None:
        await self._windows.until(changed)


class _MessageWindow(_MessageEnd, CheckedWindow):
    def __init__(self, windows: MessageWindows, key: WindowKey) -> None:
        super().__init__(windows, key)
        self.is_attached = False
        try:
            self.buffer = memoryview(bytearray(key.nbytes))
        except MemoryError as error:
            raise UnavailableError(f"no memory for a window of {key.nbytes} bytes") from error

    def _store(self, flag: int, value: int) -> None:
        self.flags[flag] = value
        self._windows.announce_flag(self.token, flag)

    async def aclose(self) -> None:
        self._is_closed = True
        self._windows.owned.pop(self.token, None)
        self._windows.wake()


class _RemoteMessageWindow(_MessageEnd, CheckedRemoteWindow):
    async def _write(self, offset: int, view: memoryview, flag: int | None, value: int) -> None:
        size = self._windows.piece_bytes
        last = max(0, -(-len(view) // size) - 1) * size
        for start in range(0, last, size):
            await self._windows.post(Call("write", self.token, offset=offset + start), view[start : start + size])
        call = Call("write", self.token, offset=offset + last, flag=-1 if flag is None else flag, value=value)
        await self._windows.call(call, view[last:])

    async def _read(self, offset: int, target: memoryview) -> None:
        size = self._windows.piece_bytes
        for start in range(0, len(target), size):
            piece = target[start : start + size]
            data = await self._windows.call(Call("read", self.token, offset=offset + start, nbytes=len(piece)))
            if len(data) != len(piece):
                raise InvalidMessageError(f"{len(data)} bytes of a window came instead of {len(piece)}")
            piece[:] = data

    async def _set(self, flag: int, value: int) -> None:
        await self._windows.call(Call("flag", self.token, flag=flag, value=value))

    async def aclose(self) -> None:
        self._is_closed = True
        self._windows.attached.pop(self.token, None)
