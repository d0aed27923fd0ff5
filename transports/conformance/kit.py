"""Provides the helpers of the conformance checks: numbered messages, expectations, and channel pairs that are closed after use."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from functools import cache
from typing import Any, TypeAlias, TypeVar

import msgspec

from flowrt.transports.contract import Channel, Limits
from flowrt.transports.errors import TransportError
from flowrt.transports.wire.message import Lent, Message, Tag, Tensor, TensorSpec

MakePair: TypeAlias = Callable[[Limits], Awaitable[tuple[Channel, Channel]]]
Check: TypeAlias = Callable[[Any], Coroutine[Any, Any, None]]  # of a MakePair, or of a scheme

PATIENCE_SECONDS = 20.0  # time limit for an event that must happen
_LOOK_SECONDS = 0.002  # polling interval for conditions that wake no task
SMALL = Limits(max_message_bytes=1 << 20, capacity_messages=8, capacity_bytes=1 << 20)


class ContractViolationError(AssertionError):
    """A transport violates the contract."""


def checks_of(module: str) -> tuple[Check, ...]:
    """The checks that a module defines, in their order: its functions whose names begin with `check_`."""
    return tuple(found for name, found in vars(sys.modules[module]).items() if name.startswith("check_") and found.__module__ == module)


class Header(msgspec.Struct, frozen=True):
    """The message header that the checks send."""

    number: int
    texts: list[str]


def expect(condition: object, requirement: str) -> None:
    """Raises ContractViolationError with the text `requirement` unless `condition` is true."""
    if not condition:
        raise ContractViolationError(requirement)


def pattern(nbytes: int, seed: int = 0) -> bytes:
    """Returns `nbytes` bytes that differ by position and by seed."""
    block = _block(seed % 256)
    return (block * (nbytes // len(block) + 1))[:nbytes]


@cache
def _block(seed: int) -> bytes:
    return bytes((seed * 31 + index * 7 + index // 251) % 256 for index in range(4093))


def numbered(number: int, nbytes: int = 0) -> Message:
    """Returns message `number`, with one tensor of `nbytes` bytes, or without tensors when `nbytes` is 0."""
    tensors = (Tensor(TensorSpec("uint8", (nbytes,)), pattern(nbytes, number)),) if nbytes else ()
    return Message("data", Tag("source@1", step=number), number % 3, Header(number, ["a", "b"]), tensors)


def lent(number: int, nbytes: int) -> tuple[Message, bytearray]:
    """Returns `numbered(number, nbytes)` with a lent tensor and a header that its copy gives, and the buffer from which it is copied."""
    message, buffer = numbered(number, nbytes), bytearray(pattern(nbytes, number))

    def copy_into(buffers: Sequence[memoryview]) -> Header:
        (copy,) = buffers
        copy[:] = buffer
        return Header(number, ["a", "b"])

    message.lent = Lent(copy_into)
    message.header, message.tensors = None, (Tensor(message.tensors[0].spec, None),)
    return message, buffer


def check_numbered(message: Message, number: int, nbytes: int = 0) -> None:
    """Raises ContractViolationError unless `message` equals `numbered(number, nbytes)`."""
    expect(message.tag is not None and message.tag.step == number, f"order: message {number} was due, {message.tag} came")
    expect(message.kind == "data" and message.edge == number % 3, "kind and edge arrive as sent")
    expect(message.decode_header(Header) == Header(number, ["a", "b"]), "the header arrives as sent")
    received = [received_bytes(tensor) for tensor in message.tensors]
    expect(received == ([pattern(nbytes, number)] if nbytes else []), f"the tensors of message {number} arrive as sent")


def received_bytes(tensor: Tensor) -> bytes:
    """Returns a copy of the bytes of `tensor`."""
    data: Any = tensor.data
    return bytes(data)


T = TypeVar("T")


async def within(awaitable: Awaitable[T], what: str) -> T:
    """Returns the result of `awaitable`. Raises ContractViolationError after PATIENCE_SECONDS."""
    try:
        async with asyncio.timeout(PATIENCE_SECONDS):
            return await awaitable
    except TimeoutError:
        raise ContractViolationError(f"{what}: nothing happened for {PATIENCE_SECONDS} s") from None


async def expect_error(kind: type[TransportError], awaitable: Awaitable[object], requirement: str) -> None:
    """Raises ContractViolationError unless `awaitable` raises `kind` within PATIENCE_SECONDS."""
    try:
        await within(awaitable, requirement)
    except kind:
        return
    except TransportError as error:
        raise ContractViolationError(f"{requirement}: {kind.__name__} expected, {error!r} came") from error
    raise ContractViolationError(f"{requirement}: {kind.__name__} expected, nothing was raised")


@asynccontextmanager
async def opened(make_pair: MakePair, limits: Limits = SMALL) -> AsyncIterator[tuple[Channel, Channel]]:
    """Yields two connected ends and closes them afterwards. Raises ContractViolationError when either end counted a late wake-up."""
    one, two = await within(make_pair(limits), "connect")
    try:
        yield one, two
    finally:
        for channel in (one, two):
            await within(channel.aclose(), "aclose")
    for channel in (one, two):
        expect(channel.statistics().late_wakeups == 0, "no wake-up is lost and found only by the bounded re-check")


async def send_all(channel: Channel, first: int, last: int, nbytes: int = 0) -> None:
    for number in range(first, last):
        await channel.send(numbered(number, nbytes))


async def receive_all(channel: Channel, first: int, last: int, nbytes: int = 0) -> None:
    for number in range(first, last):
        check_numbered(await within(channel.recv(), f"message {number}"), number, nbytes)


async def carry(sender: Channel, receiver: Channel, number: int, nbytes: int = 0) -> None:
    """Sends message `number`, then receives it."""
    await sender.send(numbered(number, nbytes))
    await receive_all(receiver, number, number + 1, nbytes)


async def until(condition: Callable[[], object], requirement: str) -> None:
    """Polls until `condition` holds, for conditions that wake no task. Raises ContractViolationError after PATIENCE_SECONDS."""

    async def look() -> None:
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(_LOOK_SECONDS)

    await within(look(), requirement)


def fill(channel: Channel, nbytes: int = 0) -> int:
    """Sends numbered messages until the channel is full. Returns their number."""
    count = 0
    while channel.send_nowait(numbered(count, nbytes)):
        count += 1
    return count


async def skip_turns(turns: int) -> None:
    """Lets the event loop turn `turns` times."""
    for _ in range(turns):
        await asyncio.sleep(0)


async def cancelled_after(call: Coroutine[Any, Any, Any] | asyncio.Task[Any], turns: int = 0) -> asyncio.Task[Any]:
    """Runs `call` as a task, cancels it after `turns` turns of the loop, and returns the task once it has ended."""
    task = asyncio.ensure_future(call)
    await skip_turns(turns)
    task.cancel()
    await asyncio.wait([task])
    return task


async def carry_one(sender: Channel, receiver: Channel) -> None:
    """Sends message 0 to a waiting `recv`. After its arrival, every earlier call on this channel has taken effect."""
    async with asyncio.TaskGroup() as group:
        group.create_task(receive_all(receiver, 0, 1))
        await asyncio.sleep(0)
        await within(sender.send(numbered(0)), "send")


async def until_waiting(channel: Channel, count: int) -> None:
    """Waits until `count` sends of `channel` have found it full since it was opened."""
    await until(lambda: channel.statistics().sends_waited >= count, f"{count} sends wait in a full channel")


def num_descriptors() -> int:
    """The number of open descriptors of this process; 0 on systems without /proc/self/fd."""
    return len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
