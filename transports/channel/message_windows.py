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
from typing import Protocol

import msgspec

from flowrt.transports.channel.window_memory import WindowKey, check_flag, check_range, check_window, flat
from flowrt.transports.contract import MAX_WINDOWS, Limits, RemoteWindow, Window
from flowrt.transports.errors import InvalidMessageError, TransportError, UnavailableError, WindowError
from flowrt.transports.wire.codec import WireError
from flowrt.transports.wire.message import Message, Tensor, TensorSpec

RESERVED = "~"  # first character of the kinds of the channel's own messages
KIND = "~window"
MAX_CALLS = 64


class Call(msgspec.Struct, frozen=True, array_like=True):
    """The header of a window message. The owner's peer sends `op` attach, write, read or flag; the owner sends done or told."""

    op: str
    token: bytes
    number: int = -1  # of the call, counted by the caller; -1: no response is wanted
    offset: int = 0
    nbytes: int = 0
    flag: int = -1
    value: int = 0
    error: str = ""


class MessageChannel(Protocol):
    """The channel interface that message windows use."""

    limits: Limits

    @property
    def closed(self) -> bool: ...

    async def send(self, message: Message) -> None: ...


class MessageWindows:
    """The windows of `channel`. `until` is QueuedChannel._until, `wake` is QueuedChannel._wake_sender, `new_token` makes tokens.
    This object owns the task that responds to the peer; `close` ends the task."""

    def __init__(
        self,
        channel: MessageChannel,
        until: Callable[[Callable[[], bool]], Awaitable[None]],
        wake: Callable[[], None],
        new_token: Callable[[], bytes] | None = None,
    ) -> None:
        self._channel = channel
        self._until = until
        self._wake = wake
        self._new_token = new_token
        self._owned: dict[bytes, _MessageWindow] = {}
        self._attached: dict[bytes, _RemoteMessageWindow] = {}
        self._answers: deque[Message] = deque()
        self._telling: set[tuple[bytes, int]] = set()  # flags whose new value the peer does not have yet
        self._answering: asyncio.Task[None] | None = None
        self._calls: dict[int, tuple[Call, memoryview] | None] = {}  # pending calls of this end, and the response once it has arrived
        self._num_calls = 0
        self.num_posted = 0  # window messages sent by this end so far

    @property
    def piece_bytes(self) -> int:
        limits = self._channel.limits
        if limits.max_tensors < 1 or limits.max_message_bytes < 1:
            raise UnavailableError("a channel that carries no tensors has no windows")
        return min(limits.max_message_bytes, max(limits.capacity_bytes // 4, 1))

    def open(self, nbytes: int, num_flags: int) -> Window:
        check_window(nbytes, num_flags, len(self._owned), MAX_WINDOWS)
        _ = self.piece_bytes
        window = _MessageWindow(self, WindowKey.new(nbytes, num_flags, None if self._new_token is None else self._new_token()))
        self._owned[window.token] = window
        return window

    async def attach(self, key: bytes) -> RemoteWindow:
        wanted = WindowKey.read(key)
        window = self._attached[wanted.token] = self._attached.get(wanted.token) or _RemoteMessageWindow(self, wanted)
        try:
            await self.call("attach", wanted.token, nbytes=wanted.nbytes, flag=wanted.num_flags)
        except BaseException:
            self._attached.pop(wanted.token, None)
            raise
        return window

    async def call(self, op: str, token: bytes, data: memoryview | None = None, **words: int) -> tuple[Call, memoryview]:
        """Sends a call and returns the response. Raises WindowError when the owner refuses the call."""
        await self._until(lambda: len(self._calls) < MAX_CALLS)
        self._num_calls += 1
        number = self._num_calls
        self._calls[number] = None
        try:
            await self.post(op, token, data, number=number, **words)
            await self._until(lambda: self._calls[number] is not None)
            answer = self._calls[number]
        finally:
            self._calls[number] = None
            if self._calls.pop(number) is None:
                self._wake()
        assert answer is not None
        if answer[0].error:
            raise WindowError(answer[0].error)
        return answer

    async def post(
        self,
        op: str,
        token: bytes,
        data: memoryview | None = None,
        *,
        number: int = -1,
        offset: int = 0,
        nbytes: int = 0,
        flag: int = -1,
        value: int = 0,
    ) -> None:
        await self._channel.send(_message(Call(op, token, number, offset, nbytes, flag, value), data))
        self.num_posted += 1

    def arrived(self, message: Message) -> None:
        """Processes an arrived window message. Raises WireError when it is invalid."""
        try:
            call = message.decode_header(Call)
        except (msgspec.DecodeError, RecursionError) as error:
            raise WireError(f"a message about windows that cannot be read: {error}") from error
        data = flat(message.tensors[0].data) if message.tensors else memoryview(b"")
        if call.op == "done":
            if call.number in self._calls:  # otherwise the call was cancelled
                self._calls[call.number] = call, data
        elif call.op == "told":
            window = self._attached.get(call.token)
            if window is not None and 0 <= call.flag < len(window.flags):
                window.flags[call.flag] = call.value
        else:
            self._serve(call, data)
        self._wake()

    def tell(self, token: bytes, flag: int) -> None:
        """Sends the new value of a flag, set by this owner, to the peer."""
        self._telling.add((token, flag))
        self._answer_soon()
        self._wake()

    def forget(self, token: bytes) -> None:
        self._owned.pop(token, None)
        self._wake()

    def detach(self, token: bytes) -> None:
        self._attached.pop(token, None)

    def owns(self, token: bytes) -> bool:
        return token in self._owned

    async def wait(self, ready: Callable[[], bool]) -> None:
        await self._until(ready)

    async def close(self) -> None:
        """Ends the response task and closes all windows; called when the channel closes."""
        task, self._answering = self._answering, None
        if task is not None:
            task.cancel()
            await asyncio.wait([task])
        self._answers.clear()
        self._owned.clear()
        self._attached.clear()

    def _serve(self, call: Call, data: memoryview) -> None:
        window = self._owned.get(call.token)
        value, error, found = 0, "", None
        try:
            if window is None:
                raise WindowError("no window of this channel has that key, or it was closed")
            if call.op == "attach":
                if (call.nbytes, call.flag) != (window.nbytes, window.num_flags):
                    raise WindowError("no window of this channel has that key")
                window.attached = True
                self._telling.update((call.token, flag) for flag, value in enumerate(window.flags) if value)
            elif call.op == "read":
                check_range(call.offset, call.nbytes, window.nbytes)
                if call.nbytes > self.piece_bytes:
                    raise WireError(f"{call.nbytes} bytes of a window are asked for at once; {self.piece_bytes} are allowed")
                found = memoryview(bytes(window.buffer[call.offset : call.offset + call.nbytes]))
            elif call.op == "write":
                check_range(call.offset, len(data), window.nbytes)
                window.buffer[call.offset : call.offset + len(data)] = data
            elif call.op != "flag":
                raise WireError(f"a call of a window of kind {call.op[:32]!r}")
            if call.flag >= 0 and call.op in ("write", "flag"):
                check_flag(call.flag, window.num_flags, call.value)
                window.flags[call.flag] = value = call.value
                self._telling.add((call.token, call.flag))
        except WindowError as refused:
            error = str(refused)
        if call.number >= 0:
            if len(self._answers) >= MAX_CALLS:
                raise WireError(f"more than {MAX_CALLS} calls of windows at once")
            self._answers.append(_message(Call("done", call.token, call.number, value=value, error=error), found))
        self._answer_soon()

    def _answer_soon(self) -> None:
        if self._answering is None and (self._answers or self._telling) and not self._channel.closed:
            self._answering = asyncio.get_running_loop().create_task(self._answer(), name="answers to calls of windows")

    async def _answer(self) -> None:
        try:
            while self._answers or self._telling:
                for token, flag in sorted(self._telling):
                    self._telling.discard((token, flag))
                    window = self._owned.get(token)
                    if window is not None and window.attached:
                        await self.post("told", token, flag=flag, value=window.flags[flag])
                if self._answers:
                    await self._channel.send(self._answers[0])
                    self.num_posted += 1
                    self._answers.popleft()
        except TransportError:
            pass  # waiting calls fail too
        finally:
            if self._answering is asyncio.current_task():
                self._answering = None


def _message(call: Call, data: memoryview | None) -> Message:
    tensors = (Tensor(TensorSpec("uint8", (len(data),)), data),) if data is not None else ()
    return Message(KIND, header=call, tensors=tensors)


class _MessageWindow(Window):
    def __init__(self, windows: MessageWindows, key: WindowKey) -> None:
        self._windows = windows
        self.token = key.token
        self.key = key.packed()
        self.nbytes, self.num_flags = key.nbytes, key.num_flags
        try:
            self.buffer = memoryview(bytearray(key.nbytes))
        except MemoryError as error:
            raise UnavailableError(f"no memory for a window of {key.nbytes} bytes") from error
        self.flags = [0] * key.num_flags
        self.attached = False

    def flag(self, flag: int) -> int:
        check_flag(flag, self.num_flags)
        return self.flags[flag]

    def set_flag(self, flag: int, value: int) -> None:
        check_flag(flag, self.num_flags, value)
        self._expect_open()
        self.flags[flag] = value
        self._windows.tell(self.token, flag)

    async def wait_flag(self, flag: int, seen: int = 0) -> int:
        check_flag(flag, self.num_flags)
        await self._windows.wait(lambda: self.flags[flag] != seen or not self._windows.owns(self.token))
        self._expect_open()
        return self.flags[flag]

    async def aclose(self) -> None:
        self._windows.forget(self.token)

    def _expect_open(self) -> None:
        if not self._windows.owns(self.token):
            raise WindowError("this window was closed")


class _RemoteMessageWindow(RemoteWindow):
    def __init__(self, windows: MessageWindows, key: WindowKey) -> None:
        self._windows = windows
        self._token = key.token
        self.nbytes, self.num_flags = key.nbytes, key.num_flags
        self.flags: list[int] = [0] * key.num_flags
        self._closed = False

    async def write(self, offset: int, data: object, flag: int | None = None, value: int = 1) -> None:
        self._expect_open()
        view = flat(data)
        check_range(offset, len(view), self.nbytes)
        if flag is not None:
            check_flag(flag, self.num_flags, value)
        size = self._windows.piece_bytes
        for start in range(0, max(len(view) - size, 0), size):
            await self._windows.post("write", self._token, view[start : start + size], offset=offset + start)
        last = max(0, -(-len(view) // size) - 1) * size
        flag = -1 if flag is None else flag
        await self._windows.call("write", self._token, view[last:], offset=offset + last, flag=flag, value=value)

    async def read(self, offset: int, nbytes: int) -> memoryview:
        self._expect_open()
        check_range(offset, nbytes, self.nbytes)
        found = memoryview(bytearray(nbytes))
        size = self._windows.piece_bytes
        for start in range(0, nbytes, size):
            end = min(start + size, nbytes)
            _, data = await self._windows.call("read", self._token, offset=offset + start, nbytes=end - start)
            if len(data) != end - start:
                raise InvalidMessageError(f"{len(data)} bytes of a window came instead of {end - start}")
            found[start:end] = data
        return found

    async def set_flag(self, flag: int, value: int) -> None:
        self._expect_open()
        check_flag(flag, self.num_flags, value)
        await self._windows.call("flag", self._token, flag=flag, value=value)

    def flag(self, flag: int) -> int:
        self._expect_open()
        check_flag(flag, self.num_flags)
        return self.flags[flag]

    async def wait_flag(self, flag: int, seen: int = 0) -> int:
        self._expect_open()
        check_flag(flag, self.num_flags)
        await self._windows.wait(lambda: self.flags[flag] != seen or self._closed)
        self._expect_open()
        return self.flags[flag]

    async def aclose(self) -> None:
        self._closed = True
        self._windows.detach(self._token)

    def _expect_open(self) -> None:
        if self._closed:
            raise WindowError("this end has let go of the window")
