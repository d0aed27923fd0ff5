"""Defines the handles, tasks and futures of the virtual loop, whose names and hashes are the same in every process."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from contextvars import Context, ContextVar
from typing import Any, TypeVar

T = TypeVar("T")

OUTSIDE = "outside"  # the node of whatever runs before a node is named: the test itself

current_node: ContextVar[str] = ContextVar("current_node", default=OUTSIDE)


class VirtualHandle(asyncio.TimerHandle):
    """A scheduled callback. A cancelled handle stays in its queue, and the loop skips it."""

    __slots__ = ("_args_given", "_call", "_node", "_run_context")

    def __init__(self, when: float, node: str, callback: Callable[..., object], args: tuple[object, ...], context: Context) -> None:
        self._when = when
        self._node = node
        self._call: Callable[..., object] | None = callback
        self._args_given = args
        self._run_context = context

    def cancel(self) -> None:
        self._call = None
        self._args_given = ()

    def cancelled(self) -> bool:
        return self._call is None

    def when(self) -> float:
        return self._when

    def __repr__(self) -> str:
        return f"<VirtualHandle of {self._node} at {self._when:.6f}: {'cancelled' if self._call is None else name_of(self._call)}>"

    def __hash__(self) -> int:
        return id(self)

    def __eq__(self, other: object) -> bool:
        return self is other


class VirtualTask(asyncio.Task[T]):
    """A task whose hash is its number. Task groups and `asyncio.wait` iterate over sets of tasks. With hashes by address, the
    order of cancellation would depend on memory addresses."""

    def __init__(self, number: int, *arguments: Any, **options: Any) -> None:
        self.number = number  # first, since asyncio's constructor puts the task into a set
        super().__init__(*arguments, **options)

    def __hash__(self) -> int:
        return self.number

    def __eq__(self, other: object) -> bool:
        return self is other


class VirtualFuture(asyncio.Future[T]):
    """A future whose hash is its number, for the same reason."""

    def __init__(self, number: int, loop: asyncio.AbstractEventLoop) -> None:
        self.number = number
        super().__init__(loop=loop)

    def __hash__(self) -> int:
        return self.number

    def __eq__(self, other: object) -> bool:
        return self is other


def name_of(callback: Callable[..., object]) -> str:
    """A name that is the same in every process: a task's name, or the function's."""
    while isinstance(callback, functools.partial):
        callback = callback.func
    owner = getattr(callback, "__self__", None)
    if isinstance(owner, asyncio.Task):
        return f"task {owner.get_name()}"
    return getattr(callback, "__qualname__", None) or type(callback).__name__


def chain_of(coroutine: Any) -> str:
    places = []
    while coroutine is not None:
        frame = getattr(coroutine, "cr_frame", None) or getattr(coroutine, "gi_frame", None) or getattr(coroutine, "ag_frame", None)
        if frame is None:
            break
        places.append(f"{frame.f_code.co_qualname} ({frame.f_code.co_filename.rsplit('/', 1)[-1]}:{frame.f_lineno})")
        coroutine = getattr(coroutine, "cr_await", None) or getattr(coroutine, "gi_yieldfrom", None) or getattr(coroutine, "ag_await", None)
    return " > ".join(places) or "not started"
