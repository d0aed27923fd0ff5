"""Implements an event loop with virtual time whose scheduling choices come from a seed.

Code under test sees an ordinary asyncio loop.

Every handle belongs to a node: one simulated process. Handles of a node run in the order in which they became ready.
The seed decides which node runs next, because nothing orders processes. Timers fire by (time, insertion). Time does not pass while
a handle is ready; then it jumps to the next timer. The digest covers every step (time, node, callback) and every message's bytes.

asyncio.BaseEventLoop contains no selector, self-pipe, signals or sockets; their methods raise NotImplementedError.
"""

from __future__ import annotations

import asyncio
import hashlib
import heapq
import math
import random
import struct
import threading
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Iterator, Sequence
from contextlib import contextmanager
from contextvars import Context, copy_context
from typing import Any, TypeVar
from weakref import WeakSet

from flowrt.simulation.errors import DeadlockError, ForeignThreadError, LivelockError, UnhandledError
from flowrt.simulation.network_conditions import draw_below
from flowrt.simulation.waitables import OUTSIDE, VirtualFuture, VirtualHandle, VirtualTask, chain_of, current_node, name_of

T = TypeVar("T")

_pack_length = struct.Struct("<Q").pack
_CLOSING = "close a generator"  # a generator dropped in the last step: not an error
WATCH_EVERY = 16  # jumps of time between two calls of a watcher, which would otherwise cost more than the run
WATCH_SECONDS = 0.04  # at most, unless nothing happens in between
MAX_STEPS_AT_INSTANT = 50_000
START_SECONDS = 1000.0  # not 0, so that code which takes 0 for "never" is caught


class VirtualLoop(asyncio.BaseEventLoop):
    """One run each: `run_until_complete` once, then `finish` and `close`. Errors of a run: DeadlockError, LivelockError, UnhandledError."""

    _closed: bool  # of BaseEventLoop, as is the next: its method takes a call
    _stopping: bool

    def __init__(self, seed: int, *, max_seconds: float = 24 * 3600.0, max_steps: float = math.inf) -> None:
        super().__init__()
        self.num_steps = 0
        self.tick_seconds = 0.0  # timers fire at multiples of this, so that many share an instant; 0: each at its own
        self.accounts: list[Callable[[], list[str]]] = []  # lines on what waits for what, for the text of a deadlock or livelock
        self.watchers: list[Callable[[], None]] = []  # called now and then; they may raise, but change nothing
        self.ran: set[str] = set()  # the nodes with a step since the watchers were called
        self._random = random.Random(f"schedule {seed}")
        self._now = self._watched = START_SECONDS
        self._queues: dict[str, deque[VirtualHandle]] = {}  # the ready handles of each node
        self._parked: dict[str, deque[VirtualHandle]] = {}  # the same of nodes that do not run now
        self._parked_at: dict[str, float] = {}  # since when each of these does not run
        self._timers: list[tuple[float, int, VirtualHandle]] = []
        self._num_timers = self._num_waitables = self._num_jumps = 0
        self._tasks = WeakSet[VirtualTask[Any]]()  # asyncio.all_tasks() looks at those of all loops of this process
        self._trace: list[str] = []  # steps that are not in the digest yet
        self._instant = self._now.hex()
        self._instant_began = 0  # num_steps when time last moved
        self._digest = hashlib.blake2b(digest_size=16)
        self._failures: list[str] = []
        self._is_over = False
        self._thread = threading.get_ident()
        self._max_seconds, self._max_steps = max_seconds, max_steps
        self._dead: dict[str, list[asyncio.Task[Any]]] = {}  # nodes that never run again, and their tasks, which must not be collected
        self._from_thread: list[VirtualHandle] | None = None  # handles passed on within `on_a_thread`

    def digest(self) -> str:
        """The digest of all steps and messages so far; equal runs have equal digests, whatever the process or its hash seed."""
        self.note()
        return self._digest.hexdigest()

    def note(self, *parts: bytes | bytearray | memoryview) -> None:
        """Add `parts` (a message in flight) to the digest."""
        pieces: list[bytes | bytearray | memoryview] = ["".join(self._trace).encode()]
        self._trace.clear()
        for part in parts:
            pieces += (_pack_length(len(part)), part)
        self._digest.update(b"".join(pieces))

    def time(self) -> float:
        return self._now

    get_debug = bool  # False, without a Python call for each future

    # nodes that stop

    def park(self, node: str) -> None:
        """Stop `node` until `unpark`; its handles that become ready meanwhile wait in order. Idempotent."""
        if node not in self._parked:
            self._parked[node] = self._queues.pop(node, deque())
            self._parked_at[node] = self.time()

    def unpark(self, node: str) -> None:
        """Resume `node`. No-op for a dead node. Idempotent."""
        if node not in self._dead:
            self._parked_at.pop(node, None)
            if handles := self._parked.pop(node, None):
                self._queues[node] = handles

    def is_parked(self, node: str) -> bool:
        return node in self._parked

    def last_run_time(self, node: str) -> float:
        """Now, or when `node` was parked."""
        return self._parked_at[node] if node in self._parked else self.time()

    def kill(self, node: str) -> None:
        """Like a power cut, no code of `node` runs again: no `finally`, no cancellation. Its tasks are kept until `bury`, so that no
        destructor runs either."""
        if self._is_over:  # the tasks of a dead launcher end their processes, which must end by themselves
            return
        self.park(node)
        self._dead.setdefault(node, [task for task in self._unfinished() if task.node == node])

    def kill_all(self, but: str) -> None:
        """`kill` every node but one. Nothing is ready or due any more, unless that one is."""
        timers = (handle.node for _, _, handle in self._timers)
        for node in sorted({*self._queues, *self._parked, *timers, *(task.node for task in self._unfinished())} - {but, *self._dead}):
            self.kill(node)

    def is_dead(self, node: str) -> bool:
        return node in self._dead

    def bury(self) -> None:
        """After the run: let the tasks of dead nodes end, and ignore their failures."""
        tasks = [task for tasks in self._dead.values() for task in tasks]
        self._dead.clear()
        self._is_over = True
        self.accounts.clear()
        self._end(tasks)
        self._failures.clear()

    # scheduling

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> VirtualHandle:
        if self._closed:
            raise RuntimeError("this loop is closed")
        if context is None:
            context = copy_context()
        node = context.get(current_node, OUTSIDE)
        handle = VirtualHandle(callback, args, context, node, self._now)
        if (queue := self._queues.get(node)) is not None:  # then the node is not parked
            queue.append(handle)
        else:
            self._make_ready(handle)
        return handle

    def call_soon_threadsafe(  # type: ignore[override]
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> VirtualHandle:
        if threading.get_ident() != self._thread:
            raise ForeignThreadError(
                f"{name_of(callback)} from thread {threading.current_thread().name}: nothing orders it against the seed"
            )
        if self._from_thread is None:
            return self.call_soon(callback, *args, context=context)
        context = copy_context() if context is None else context
        handle = VirtualHandle(callback, args, context, context.get(current_node, OUTSIDE), self._now)
        self._from_thread.append(handle)
        return handle

    @contextmanager
    def on_a_thread(self) -> Iterator[list[VirtualHandle]]:
        """Calls within count as another thread's: what they pass to the loop is kept in the yielded list, for `accept`."""
        handles: list[VirtualHandle] = []
        self._from_thread = handles
        try:
            yield handles
        finally:
            self._from_thread = None

    def accept(self, handle: VirtualHandle) -> None:
        """Make a handle from `on_a_thread` ready on the loop, unless it is cancelled."""
        if not handle.is_cancelled:
            self._make_ready(handle)

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> VirtualHandle:
        return self.call_at_node(self._now + delay, None, callback, *args, context=context)

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> VirtualHandle:
        return self.call_at_node(when, None, callback, *args, context=context)

    def call_at_node(
        self, when: float, node: str | None, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> VirtualHandle:
        """As call_at, for a callback that belongs to another node: a message that arrives there."""
        if self.tick_seconds:
            when = math.ceil(when / self.tick_seconds) * self.tick_seconds
        if context is None:
            context = copy_context()
        handle = VirtualHandle(callback, args, context, context.get(current_node, OUTSIDE) if node is None else node, when)
        self._num_timers += 1
        heapq.heappush(self._timers, (when, self._num_timers, handle))
        return handle

    def create_future(self) -> asyncio.Future[Any]:
        future = VirtualFuture[Any](loop=self)
        self._num_waitables = future.number = self._num_waitables + 1
        return future

    def create_task(
        self, coro: Coroutine[Any, Any, T] | Generator[Any, None, T], *, name: object = None, context: Context | None = None, **options: Any
    ) -> asyncio.Task[T]:
        """As asyncio's, but an unnamed task is named after its node: asyncio's counter is shared by all loops of the process."""
        node = (context or copy_context()).get(current_node, OUTSIDE)
        self._num_waitables += 1
        number = self._num_waitables
        name = f"{node}/{number}" if name is None else str(name)
        task: VirtualTask[T] = VirtualTask(number, node, coro, loop=self, name=name, context=context, **options)
        self._tasks.add(task)
        return task

    # running

    def finish(self) -> list[str]:
        """Cancel all unfinished tasks, oldest first, and let them end. Returns their names. The digest does not cover this."""
        names = [task.get_name() for task in self._unfinished() if task.get_name() != _CLOSING]
        self._end(self._unfinished())
        return names

    def _unfinished(self) -> list[VirtualTask[Any]]:
        """Tasks that are not done, of living nodes, oldest first."""
        return sorted((task for task in self._tasks if not task.done() and task.node not in self._dead), key=hash)

    def _end(self, tasks: Sequence[asyncio.Task[Any]]) -> None:
        async def end() -> None:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            if not self._dead:
                await self.shutdown_asyncgens()

        for node in list(self._parked):
            self.unpark(node)
        self.watchers.clear()
        self._instant_began = self.num_steps  # a run that lasted too long may still end
        self._max_seconds += self._now
        self._max_steps = math.inf
        self.run_until_complete(end())

    def raise_failures(self) -> None:
        """Raise UnhandledError if a task or callback failed without being handled."""
        if self._failures:
            raise UnhandledError("; ".join(self._failures))

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        error = context.get("exception")
        text = "" if error is None else f": {type(error).__name__}: {error}"
        self._failures.append(f"{context.get('message')}{text}")

    def _run_once(self) -> None:
        """BaseEventLoop calls this until the main task is done: run callbacks until then. Most of a simulation's own time is spent here."""
        queues, timers, chance = self._queues, self._timers, self._random.random
        while True:
            if not queues:
                self._jump()
            elif timers and timers[0][0] <= self._now and chance() < 0.5:
                self._release_timer()  # timers of this instant fire while other callbacks run, as events of a real system do
            if queues:
                node = next(iter(queues)) if len(queues) == 1 else self._draw_node()
                queue = queues[node]
                handle = queue.popleft()
                if not queue:
                    del queues[node]
                if not handle.is_cancelled:
                    self._step(node, handle)
            if self._stopping:
                return

    def _draw_node(self) -> str:
        nodes = list(self._queues)
        return nodes[draw_below(self._random, len(nodes))]

    def _step(self, node: str, handle: VirtualHandle) -> None:
        callback = handle.callback
        owner = getattr(callback, "__self__", None)
        name = owner.label if type(owner) is VirtualTask else getattr(callback, "__qualname__", None) or name_of(callback)
        self.num_steps += 1
        self.ran.add(node)
        if self.num_steps - self._instant_began > MAX_STEPS_AT_INSTANT:
            where = f"now {node}: {name}\n{self.describe_waiting()}"
            raise LivelockError(f"{MAX_STEPS_AT_INSTANT} steps at {self._now:.6f} s; {where}")
        self._trace.append(f"{self._instant} {node} {name}\n")
        try:
            handle.context.run(callback, *handle.args)
        except Exception as error:
            self.call_exception_handler({"message": f"callback {name} of {node}", "exception": error})

    def _jump(self) -> None:
        """With no ready handle: move time to the next timer and make it ready. Others of that instant follow, in order."""
        while self._timers and self._timers[0][2].is_cancelled:
            heapq.heappop(self._timers)
        if not self._timers:
            raise DeadlockError(f"at {self._now:.6f} s nothing is ready and no timer is set:\n{self.describe_waiting()}")
        if self._timers[0][0] > self._watched + WATCH_SECONDS:
            self._watch()
        if self._timers[0][0] > self._now:
            self._now = self._timers[0][0]
            self._instant = self._now.hex()
            self._instant_began = self.num_steps
        if self._now - START_SECONDS > self._max_seconds or self.num_steps > self._max_steps:
            limit = f"{self._max_seconds} virtual seconds and {self._max_steps} steps"
            raise LivelockError(f"no end within {limit}:\n{self.describe_waiting()}")
        self._release_timer()
        self._num_jumps += 1
        if self._num_jumps % WATCH_EVERY == 0:
            self._watch()

    def _watch(self) -> None:
        for watcher in self.watchers:
            watcher()
        self.ran.clear()
        self._watched = self._now

    def _release_timer(self) -> None:
        handle = heapq.heappop(self._timers)[2]
        if not handle.is_cancelled:
            if (queue := self._queues.get(handle.node)) is not None:
                queue.append(handle)
            else:
                self._make_ready(handle)

    def describe_waiting(self) -> str:
        """One line per dead or paused node, the lines of `accounts`, and one line per unfinished task: node, name and chain of calls."""
        lines = [f"  {node} is {'dead' if node in self._dead else 'paused'}" for node in self._parked]
        lines += [f"  {line}" for account in self.accounts for line in account()]
        lines += [f"  {task.node} {task.get_name()}: {chain_of(task.get_coro())}" for task in self._unfinished()]
        return "\n".join(lines)

    def _make_ready(self, handle: VirtualHandle) -> None:
        queue = self._parked.get(handle.node) if self._parked else None
        if queue is None:
            queue = self._queues.setdefault(handle.node, deque())
        queue.append(handle)

    def _asyncgen_finalizer_hook(self, agen: AsyncGenerator[Any, Any]) -> None:
        if not self.is_closed():
            self.create_task(agen.aclose(), name=_CLOSING)
