"""Defines the handles, tasks and futures of the virtual loop, whose names and hashes are the same in every process."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Sequence
from contextvars import Context, ContextVar
from typing import Any, TypeVar

import msgspec

T = TypeVar("T")

OUTSIDE = "outside"  # the node of code that runs before a node is named: the test itself

current_node: ContextVar[str] = ContextVar("current_node", default=OUTSIDE)


class VirtualHandle(msgspec.Struct):
    """A scheduled callback of a node. A cancelled handle stays in its queue, and the loop skips it.

    It has what asyncio and the code under test use of asyncio.TimerHandle, whose constructor would take most of the time of a step.
    """

    callback: Callable[..., object]
    args: Sequence[object]
    context: Context
    node: str
    time: float
    is_cancelled: bool = False

    def cancel(self) -> None:
        self.is_cancelled = True
        self.callback, self.args = bool, ()  # drop what they hold

    def cancelled(self) -> bool:
        return self.is_cancelled

    def when(self) -> float:
        return self.time


class _Numbered:
    """A waitable whose hash is its number. Task groups and `asyncio.wait` iterate over sets; with hashes by address, the order of
    cancellation would depend on memory addresses."""

    __slots__ = ()

    number: int

    def __hash__(self) -> int:
        return self.number

    def __eq__(self, other: object) -> bool:
        return self is other


class VirtualTask(_Numbered, asyncio.Task[T]):
    """`label`: its name in the digest."""

    def __init__(self, number: int, node: str, coro: Any, *, name: str, **options: Any) -> None:
        self.number, self.node = number, node  # first, since asyncio's constructor puts the task into a set
        self.label = f"task {name}"
        super().__init__(coro, name=name, **options)

    def set_name(self, name: object) -> None:
        self.label = f"task {name}"
        super().set_name(name)


class VirtualFuture(_Numbered, asyncio.Future[T]):
    """The loop sets the number of a new one: a constructor would cost as much as the rest."""

    __slots__ = ("number",)


def set_result(future: asyncio.Future[T], result: T) -> None:
    """Set the result of a future, unless it is done: its waiter may have been cancelled."""
    if not future.done():
        future.set_result(result)


def set_error(future: asyncio.Future[Any], error: Exception) -> None:
    """Set the exception of a future, unless it is done."""
    if not future.done():
        future.set_exception(error)


def name_of(callback: Callable[..., object]) -> str:
    """A name that is the same in every process: a task's name, or the function's."""
    while isinstance(callback, functools.partial):
        callback = callback.func
    owner = getattr(callback, "__self__", None)
    if isinstance(owner, VirtualTask):
        return owner.label
    return getattr(callback, "__qualname__", None) or type(callback).__name__


def chain_of(coroutine: Any) -> str:
    """The chain of calls that a coroutine waits in, with file and line of each."""
    places = []
    while coroutine is not None:
        frame = getattr(coroutine, "cr_frame", None) or getattr(coroutine, "gi_frame", None) or getattr(coroutine, "ag_frame", None)
        if frame is None:
            break
        places.append(f"{frame.f_code.co_qualname} ({frame.f_code.co_filename.rsplit('/', 1)[-1]}:{frame.f_lineno})")
        coroutine = getattr(coroutine, "cr_await", None) or getattr(coroutine, "gi_yieldfrom", None) or getattr(coroutine, "ag_await", None)
    return " > ".join(places) or "not started"
