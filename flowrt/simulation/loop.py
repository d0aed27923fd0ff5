"""Implements an event loop with virtual time whose scheduling choices come from a seed.

Code under test sees an ordinary asyncio loop.

Every handle belongs to a node: one simulated process. Within a node handles run in the order they became ready, as asyncio promises;
which node goes next is drawn from the seed, since nothing orders processes. Timers fire by (time, insertion). Time stands still while
anything is ready and then jumps to the next timer. The digest covers every step (time, node, what ran) and every message's bytes.

Written against AbstractEventLoop, so that nothing of the real loop (selector, self-pipe, signals, executor) can slip in: what is not
here raises NotImplementedError.
"""

from __future__ import annotations

import asyncio
import hashlib
import heapq
import math
import random
import sys
import threading
import weakref
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Iterator
from concurrent.futures import Executor
from contextlib import contextmanager
from contextvars import Context, copy_context
from typing import Any, TypeVar

from flowrt.simulation.errors import DeadlockError, ForeignThreadError, LivelockError, UnhandledError
from flowrt.simulation.waitables import OUTSIDE, VirtualFuture, VirtualHandle, VirtualTask, chain_of, current_node, name_of

T = TypeVar("T")

_CLOSING = "close a generator"  # nobody's fault when it is left: a generator dropped in the last step
WATCH_EVERY = 8  # moves of time; every single one would cost more than the run
START_SECONDS = 1000.0  # not 0, so that code which takes 0 for "never" is caught


class VirtualLoop(asyncio.AbstractEventLoop):
    """See the file's docstring. One run each: `run_until_complete` once, then `close`."""

    def __init__(
        self, seed: int, *, max_steps: int = 20_000_000, max_steps_at_instant: int = 50_000, max_seconds: float = 24 * 3600.0
    ) -> None:
        self.num_steps = 0
        self.tick_seconds = 0.0  # timers fire at multiples of this, so that much falls on the same instant; 0: each at its own
        self._random = random.Random(f"schedule {seed}")
        self._now = START_SECONDS
        self._ready: dict[str, deque[VirtualHandle]] = {}
        self._timers: list[tuple[float, int, VirtualHandle]] = []
        self._num_timers = 0
        self._num_waitables = 0
        self._num_tasks: dict[str, int] = {}
        self._tasks: list[tuple[str, weakref.ref[asyncio.Task[Any]]]] = []
        self._trace: list[str] = []  # steps that are not in the digest yet
        self._instant = self._now.hex()
        self._digest = hashlib.blake2b(digest_size=16)
        self._failures: list[str] = []
        self._thread = threading.get_ident()
        self._max_steps, self._max_steps_at_instant, self._max_seconds = max_steps, max_steps_at_instant, max_seconds
        self._instant_began = 0  # num_steps when time last moved
        self._running = self._closed = False
        self._generators: list[weakref.ref[AsyncGenerator[Any, Any]]] = []
        self._parked: dict[str, deque[VirtualHandle]] = {}  # of nodes that do not run now
        self._dead: dict[str, list[asyncio.Task[Any]]] = {}  # nodes that never run again, and their tasks, which must not be collected
        self._watchers: list[Callable[[], None]] = []
        self._num_jumps = 0
        self.accounts: list[Callable[[], list[str]]] = []  # lines on what waits for what, for the text of a deadlock or livelock
        self._from_thread: list[VirtualHandle] | None = None  # what a call that passes for another thread's has handed over

    # what callers of a run ask

    def digest(self) -> str:
        """Of all steps and messages so far; equal runs have equal digests, whatever the process or its hash seed."""
        self._digest_trace()
        return self._digest.hexdigest()

    def note(self, *parts: bytes | bytearray | memoryview) -> None:
        """Take `parts` (a message on its way) into the digest."""
        self._digest_trace()
        for part in parts:
            self._digest.update(len(part).to_bytes(8, "little"))
            self._digest.update(part)

    def _digest_trace(self) -> None:
        self._digest.update("".join(self._trace).encode())
        self._trace.clear()

    def time(self) -> float:
        return self._now

    def watch(self, watcher: Callable[[], None]) -> None:
        """Call `watcher` whenever time has moved WATCH_EVERY times: it may look at everything and raise, but change nothing."""
        self._watchers.append(watcher)

    # nodes that stop

    def park(self, node: str) -> None:
        """Stop `node` until `unpark`; its handles that become ready meanwhile wait in order. Idempotent."""
        if node not in self._parked:
            self._parked[node] = self._ready.pop(node, deque())

    def unpark(self, node: str) -> None:
        """Resume `node`. No-op for a dead node. Idempotent."""
        if node not in self._dead and node in self._parked:
            self._revive(node)

    def is_parked(self, node: str) -> bool:
        return node in self._parked

    def kill(self, node: str) -> None:
        """Like a power cut, no code of `node` runs again: no `finally`, no cancellation. Its tasks are kept until `bury`, so that no
        destructor runs either."""
        self.park(node)
        tasks = [task for of, reference in self._tasks if of == node and (task := reference()) is not None and not task.done()]
        self._dead.setdefault(node, tasks)

    def is_dead(self, node: str) -> bool:
        return node in self._dead

    def bury(self) -> None:
        """After the run: let the tasks of dead nodes end, and ignore their failures."""
        tasks = [task for node in self._dead for task in self._dead[node]]
        for node in list(self._parked):
            self._revive(node)
        self._dead.clear()
        self.accounts.clear()
        self._watchers.clear()
        if tasks:
            self._end(tasks)
        self._failures.clear()

    def _revive(self, node: str) -> None:
        if handles := self._parked.pop(node):
            self._ready[node] = handles

    # scheduling; the signatures say less of `args` than asyncio's, which no caller sees

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> VirtualHandle:
        context = copy_context() if context is None else context
        handle = VirtualHandle(self._now, context.get(current_node, OUTSIDE), callback, args, context)
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
        handle = VirtualHandle(self._now, context.get(current_node, OUTSIDE), callback, args, context)
        self._from_thread.append(handle)
        return handle

    @contextmanager
    def on_a_thread(self) -> Iterator[list[VirtualHandle]]:
        """What is called within passes for another thread's: what it hands to the loop is kept in the list given, for `hand_over`."""
        given: list[VirtualHandle] = []
        self._from_thread = given
        try:
            yield given
        finally:
            self._from_thread = None

    def hand_over(self, handle: VirtualHandle) -> None:
        """Make a handle of the thread ready on the loop, unless it is cancelled."""
        if not handle.cancelled():
            self._make_ready(handle)

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> VirtualHandle:
        return self.call_at(self._now + delay, callback, *args, context=context)

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> VirtualHandle:
        context = copy_context() if context is None else context
        return self.call_at_node(when, context.get(current_node, OUTSIDE), callback, *args, context=context)

    def call_at_node(
        self, when: float, node: str, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> VirtualHandle:
        """As call_at, for a callback that belongs to another node: what arrives there."""
        if self.tick_seconds:
            when = math.ceil(when / self.tick_seconds) * self.tick_seconds
        handle = VirtualHandle(when, node, callback, args, copy_context() if context is None else context)
        self._num_timers += 1
        heapq.heappush(self._timers, (when, self._num_timers, handle))
        return handle

    def create_future(self) -> asyncio.Future[Any]:
        self._num_waitables += 1
        return VirtualFuture(self._num_waitables, self)

    def create_task(
        self, coro: Coroutine[Any, Any, T] | Generator[Any, None, T], *, name: object = None, context: Context | None = None, **options: Any
    ) -> asyncio.Task[T]:
        """As asyncio's, but an unnamed task is named after its node: asyncio's counter is shared by all loops of the process."""
        node = (context or copy_context()).get(current_node, OUTSIDE)
        if name is None:
            self._num_tasks[node] = number = self._num_tasks.get(node, 0) + 1
            name = f"{node}/{number}"
        self._num_waitables += 1
        task: VirtualTask[T] = VirtualTask(self._num_waitables, coro, loop=self, name=str(name), context=context, **options)
        self._tasks.append((node, weakref.ref(task)))
        if len(self._tasks) % 1024 == 0:
            self._tasks = [(node, reference) for node, reference in self._tasks if reference() is not None]
        return task

    def run_in_executor(self, executor: Executor | None, func: Callable[..., T], *args: Any) -> asyncio.Future[T]:  # type: ignore[override]
        """Runs the call at once on the loop, because the seed does not determine the timing of threads."""
        future: asyncio.Future[T] = asyncio.Future(loop=self)
        try:
            future.set_result(func(*args))
        except Exception as error:
            future.set_exception(error)
        return future

    # running

    def run_until_complete(self, future: Coroutine[Any, Any, T]) -> T:  # type: ignore[override]
        """Run until `future` is done. Raises what it raises, DeadlockError, LivelockError, UnhandledError."""
        if self._running or self._closed or asyncio._get_running_loop() is not None:
            raise RuntimeError("a virtual loop runs once, and not inside another loop")
        hooks = sys.get_asyncgen_hooks()
        sys.set_asyncgen_hooks(firstiter=lambda made: self._generators.append(weakref.ref(made)), finalizer=self._finish_generator)
        asyncio._set_running_loop(self)
        self._running = True
        try:
            main = self.create_task(future, name="main")
            self._run(main)
            return main.result()
        finally:
            self._running = False
            asyncio._set_running_loop(None)
            sys.set_asyncgen_hooks(*hooks)

    def finish(self) -> list[str]:
        """Cancel what is left, in the order of its making, and let it end. Returns the names of the tasks that had to be cancelled.

        Not part of the digest's promise. Raises UnhandledError when a task or callback failed unseen during the run or here.
        """
        for node in [node for node in self._parked if node not in self._dead]:
            self._revive(node)
        left = [task for task in self._unfinished() if task.get_name() != _CLOSING]
        names = [task.get_name() for task in left]
        self._watchers.clear()
        self._end(self._unfinished())
        return names

    def _unfinished(self) -> list[asyncio.Task[Any]]:
        """Tasks that are not done, of living nodes, oldest first."""
        tasks = ((node, reference()) for node, reference in self._tasks)
        return [task for node, task in tasks if task is not None and not task.done() and node not in self._dead]

    def _end(self, tasks: list[asyncio.Task[Any]]) -> None:
        async def end() -> None:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for reference in self._generators:
                if not self._dead and (generator := reference()) is not None:
                    await generator.aclose()

        self._instant_began = self.num_steps  # a run that went on for too long still gets its time to end
        self._max_steps += self.num_steps
        self._max_seconds += self._now
        self.run_until_complete(end())

    def raise_failures(self) -> None:
        """Raise UnhandledError if a task or callback failed without being handled."""
        if self._failures:
            raise UnhandledError("; ".join(self._failures))

    def close(self) -> None:
        self._closed = True
        self._ready.clear()
        self._timers.clear()

    def is_running(self) -> bool:
        return self._running

    def is_closed(self) -> bool:
        return self._closed

    def get_debug(self) -> bool:
        return False

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        error = context.get("exception")
        self._failures.append(
            f"{context.get('message')}: {type(error).__name__}: {error}" if error is not None else str(context.get("message"))
        )

    async def shutdown_asyncgens(self) -> None:
        return None

    async def shutdown_default_executor(self, timeout: float | None = None) -> None:
        return None

    def _run(self, main: asyncio.Task[Any]) -> None:
        while not main.done():
            if not self._ready:
                self._jump(main)
            elif self._timers and self._timers[0][0] <= self._now and self._random.random() < 0.5:
                self._release_timer()  # what falls on this instant comes while other callbacks run, as the world's events do
            if not self._ready:
                continue
            nodes = list(self._ready)
            node = nodes[0] if len(nodes) == 1 else nodes[self._random.randrange(len(nodes))]
            queue = self._ready[node]
            handle = queue.popleft()
            if not queue:
                del self._ready[node]
            callback = handle._call
            if callback is not None:
                self._step(node, callback, handle)

    def _step(self, node: str, callback: Callable[..., object], handle: VirtualHandle) -> None:
        self.num_steps += 1
        if self.num_steps - self._instant_began > self._max_steps_at_instant:
            where = f"now {node}: {name_of(callback)}\n{self.describe_waiting()}"
            raise LivelockError(f"{self._max_steps_at_instant} steps at {self._now:.6f} s; {where}")
        if self.num_steps > self._max_steps:
            raise LivelockError(f"{self._max_steps} steps and no end; at {self._now:.6f} s")
        self._trace.append(f"{self._instant} {node} {name_of(callback)}\n")
        try:
            handle._run_context.run(callback, *handle._args_given)
        except Exception as error:
            self.call_exception_handler({"message": f"callback {name_of(callback)} of {node}", "exception": error})

    def _jump(self, main: asyncio.Task[Any]) -> None:
        """Nothing is ready: move time to the next timer and make it ready. Others of that instant follow, in order."""
        while self._timers and self._timers[0][2].cancelled():
            heapq.heappop(self._timers)
        if not self._timers:
            raise DeadlockError(f"at {self._now:.6f} s nothing is ready and no timer is set:\n{self.describe_waiting()}")
        if self._timers[0][0] > self._now:
            self._now = self._timers[0][0]
            self._instant = self._now.hex()
            self._instant_began = self.num_steps
        if self._now - START_SECONDS > self._max_seconds:
            raise LivelockError(f"no end within {self._max_seconds} virtual seconds:\n{self.describe_waiting()}")
        self._release_timer()
        self._num_jumps += 1
        if self._watchers and self._num_jumps % WATCH_EVERY == 0:
            for watcher in self._watchers:
                watcher()

    def _release_timer(self) -> None:
        handle = heapq.heappop(self._timers)[2]
        if not handle.cancelled():
            self._make_ready(handle)

    def describe_waiting(self) -> str:
        """One line per task that is not done: its node and name, and the chain of calls it waits in; then what each of `accounts` says,
        and which nodes stand still."""
        lines = [f"  {node} is dead" if node in self._dead else f"  {node} stands still" for node in self._parked]
        lines += [f"  {line}" for account in self.accounts for line in account()]
        for node, reference in self._tasks:
            task = reference()
            if task is not None and not task.done() and node not in self._dead:
                lines.append(f"  {node} {task.get_name()}: {chain_of(task.get_coro())}")
        return "\n".join(lines)

    def _make_ready(self, handle: VirtualHandle) -> None:
        node = handle._node
        if self._parked and node in self._parked:
            self._parked[node].append(handle)
        elif (queue := self._ready.get(node)) is not None:
            queue.append(handle)
        else:
            self._ready[node] = deque((handle,))

    def _finish_generator(self, generator: AsyncGenerator[Any, Any]) -> None:
        if not self._closed:
            self.create_task(generator.aclose(), name=_CLOSING)
