"""Defines the handles, tasks and futures of the virtual loop, whose names and hashes are the same in every process."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Sequence
from contextvars import Context, ContextVar, copy_context
from typing import Any, TypeVar

T = TypeVar("T")

OUTSIDE = "outside"  # the node of code that runs before a node is named: the test itself

current_node: ContextVar[str] = ContextVar("current_node", default=OUTSIDE)


class VirtualHandle(asyncio.TimerHandle):
    """A scheduled callback of a node. A cancelled handle stays in its queue, and the loop skips it."""

    __slots__ = ("node",)

    def __init__(
        self,
        when: float,
        callback: Callable[..., object],
        args: Sequence[object],
        loop: asyncio.AbstractEventLoop,
        context: Context | None,
        node: str | None = None,
    ) -> None:
        """`node`: None for the node of the context."""
        # In place of the constructors of asyncio, which take most of the time of a step: nothing of a run is debugged with tracebacks.
        self._when, self._callback, self._args, self._loop = when, callback, args, loop
        self._context = context = copy_context() if context is None else context
        self._cancelled = self._scheduled = False
        self._repr = self._source_traceback = None
        self.node = context.get(current_node, OUTSIDE) if node is None else node

    def cancel(self) -> None:
        self._cancelled = True
        self._callback = self._args = None  # type: ignore[assignment]


class _Numbered:
    """A waitable whose hash is its number. Task groups and `asyncio.wait` iterate over sets; with hashes by address, the order of
    cancellation would depend on memory addresses."""

    number: int

    def __hash__(self) -> int:
        return self.number

    def __eq__(self, other: object) -> bool:
        return self is other


class VirtualTask(_Numbered, asyncio.Task[T]):
    def __init__(self, number: int, node: str, *arguments: Any, **options: Any) -> None:
        self.number, self.node = number, node  # first, since asyncio's constructor puts the task into a set
        super().__init__(*arguments, **options)


class VirtualFuture(_Numbered, asyncio.Future[T]):
    def __init__(self, number: int, loop: asyncio.AbstractEventLoop) -> None:
        self.number = number
        super().__init__(loop=loop)


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
    if isinstance(owner, asyncio.Task):
        return f"task {owner.get_name()}"
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
