"""Seams: time, random numbers, ids, compute threads and transports of a run in one object, which the simulation replaces.

Every package takes these from the Seams object that it is given; a lint forbids `time`, `random`, `uuid`, `threading` and `subprocess`
elsewhere. The simulated forms are in flowrt/simulation. Resident memory is measured here too (not simulated from a seed).
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import math
import random
import secrets
import threading
import time
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ParamSpec, Protocol, TypeVar

from flowrt.errors import NotRunningError
from flowrt.system.host_engine import OpenEngine
from flowrt.system.log_files import LogFolder, open_log_folder
from flowrt.system.process_backend import OpenBackend
from flowrt.system.process_status import (
    Activity,
    ProcessSample,
    ProcessTimes,
    other_threads_want_processor,
    process_activity,
    process_times,
    thread_queued_seconds,
)
from flowrt.timer import Timer, new_timer
from flowrt.transports.contract import HostAddress, Transport
from flowrt.transports.registry import get_transport

P = ParamSpec("P")
T = TypeVar("T")

KEY_BYTES = 32  # of a run's key
INLINE_SECONDS = 200e-6  # a call expected to be shorter than this is cheaper to run on the loop than in the compute thread
LONE_INLINE_SECONDS = 20e-3  # the same for a loop of one worker; heartbeats and control messages wait at most this long
# Load on the machine lengthens a measured call and never shortens it: so the expected time falls quickly and rises in bounded steps.
_WEIGHT_OF_SHORTER, _WEIGHT_OF_LONGER, _LONGEST_STEP = 0.5, 0.2, 4.0
_LONG_SECONDS = 5e-3  # the expected time takes a call of this length at once
# The rules for a hung call; docs/reliability.md has them in a table.
BOUND_SECONDS = 60.0  # bound of a call without a declared bound ...
_TIMES_LONGEST = 20.0  # ... or this many times the longest call of its label, if that is more
STILL_SECONDS = 0.75  # a computing call needs a processor: one that has been neither running nor runnable for this long is hung


class Clock(Protocol):
    """The source of time. `now` is monotonic and in seconds."""

    def now(self) -> float: ...
    async def sleep(self, seconds: float) -> None: ...


def _never() -> bool:
    return False


@dataclass(frozen=True)
class Running:
    """The call in progress: its label, its start (Clock.now), and the bound after which it counts as hung.

    `computed_seconds` is the processor time of the compute thread; it grows only while the thread computes. None: not measured.
    A call also counts as hung when `computed_seconds` has not grown for `still_seconds` and `wants_processor` returned False at every
    check meanwhile: on a busy machine a computing thread may wait for a processor. `queued_seconds` is the time that the thread has
    waited for a processor so far; it extends the bound.
    """

    label: str
    since_seconds: float
    bound_seconds: float
    computed_seconds: float | None = None
    still_seconds: float = math.inf
    wants_processor: Callable[[], bool] = _never
    queued_seconds: float = 0.0


class Compute(Protocol):
    """Runs one call at a time, off the event loop when it is long. Owned by one worker."""

    @property
    def running(self) -> Running | None:
        """The call in progress, or None. Readable while the call runs, so that the detector can recognise a hung call."""
        ...

    @property
    def slowness(self) -> float:
        """How many times as long as they should calls take now, by an injected fault; modelled times follow it. 1.0: no fault."""
        ...

    def is_short(self, label: str) -> bool:
        """Whether a call with this label would now run on the loop. If so, `run_inline` does the same as `run` without a coroutine."""
        ...

    def run_inline(self, label: str, call: Callable[[], T]) -> T:
        """Runs a call for which `is_short` is true, on the loop."""
        ...

    async def run(self, label: str, call: Callable[[], T], bound_seconds: float | None = None) -> T:
        """Run the call and return its result, or raise its exception. Calls with the same `label` are expected to take similar time.

        `bound_seconds` is the maximum duration of a call that may take long or wait. None: the call computes; its bounds are derived.
        """
        ...

    async def aclose(self) -> None:
        """End the thread after the call in progress, if there is one; `run` still waits for that call. Idempotent."""
        ...


class NewCompute(Protocol):
    def __call__(self, name: str, inline_seconds: float = ..., /) -> Compute:
        """`inline_seconds`: calls that are expected to be shorter run on the loop; 0: none does."""
        ...


class RealClock:
    now = staticmethod(time.monotonic)

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


class ThreadCompute:
    """Computes in one thread; a call whose label is expected to take less than `inline_seconds` runs on the loop instead."""

    beside_loop = True  # outputs of an unfinished call may be sent while it runs
    slowness = 1.0

    def __init__(self, name: str = "compute", inline_seconds: float = INLINE_SECONDS) -> None:
        self._inline_seconds, self._long_seconds = inline_seconds, max(_LONG_SECONDS, inline_seconds)
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name, initializer=self._note_thread)
        self._clock: int | None = None  # clock id of the thread's processor time
        self._thread_id = 0
        self._expected_seconds: dict[str, float] = {}
        self._longest_seconds: dict[str, float] = {}  # of calls in the thread
        self._label: str | None = None  # of the call in progress
        self._since_seconds = 0.0
        self._bound_seconds: float | None = None

    @property
    def running(self) -> Running | None:
        label, clock, declared = self._label, self._clock, self._bound_seconds
        if label is None:
            return None
        if declared is not None:
            return Running(label, self._since_seconds, declared, queued_seconds=thread_queued_seconds(self._thread_id))
        return Running(
            label,
            self._since_seconds,
            max(BOUND_SECONDS, _TIMES_LONGEST * self._longest_seconds.get(label, 0.0)),
            None if clock is None else time.clock_gettime(clock),
            STILL_SECONDS,
            other_threads_want_processor,
            thread_queued_seconds(self._thread_id),
        )

    def is_short(self, label: str) -> bool:
        return self._label is None and self._expected_seconds.get(label, 1.0) < self._inline_seconds

    def run_inline(self, label: str, call: Callable[[], T]) -> T:
        if self._label is not None:
            raise RuntimeError(f"{label} while {self._label} runs: a worker computes one call at a time")
        self._bound_seconds, self._label = None, label
        start = self._since_seconds = time.monotonic()
        try:
            return call()
        finally:
            self._learn(label, time.monotonic() - start)
            self._label = None

    async def run(self, label: str, call: Callable[[], T], bound_seconds: float | None = None) -> T:
        short = self.is_short(label)
        self._begin(label, bound_seconds)
        try:
            if short:
                return self.timed(label, call)
            future = asyncio.wrap_future(self._executor.submit(self.timed, label, call))  # run_in_executor inspects the function each time
            cancelled: asyncio.CancelledError | None = None
            while not future.done():  # a thread cannot be stopped: return only when it no longer uses our memory
                try:
                    await asyncio.wait([future])
                except asyncio.CancelledError as error:
                    cancelled = error
            if cancelled is not None:
                if not future.cancelled():
                    future.exception()  # retrieved, so that asyncio does not log it: the caller cancelled and does not need it
                raise cancelled
            return future.result()
        finally:
            self._label = None

    async def aclose(self) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _note_thread(self) -> None:
        self._thread_id = threading.get_native_id()
        if hasattr(time, "pthread_getcpuclockid"):
            self._clock = time.pthread_getcpuclockid(threading.get_ident())

    def _begin(self, label: str, bound_seconds: float | None) -> None:
        if self._label is not None:
            raise RuntimeError(f"{label} while {self._label} runs: a worker computes one call at a time")
        self._bound_seconds, self._since_seconds, self._label = bound_seconds, time.monotonic(), label

    def timed(self, label: str, call: Callable[[], T]) -> T:
        """Runs the call and measures it, in either place. The time to reach the thread is not included."""
        start = time.monotonic()
        try:
            return call()
        finally:
            seconds = time.monotonic() - start
            self._learn(label, seconds)
            if seconds > self._longest_seconds.get(label, -1.0):
                self._longest_seconds[label] = seconds

    def _learn(self, label: str, seconds: float) -> None:
        expected = self._expected_seconds.get(label, seconds)
        if seconds > self._long_seconds:
            expected = seconds  # taken at once, even if it is an outlier: another such call must not block the loop
        elif seconds > expected:
            expected += _WEIGHT_OF_LONGER * (min(seconds, _LONGEST_STEP * expected) - expected)
        else:
            expected += _WEIGHT_OF_SHORTER * (seconds - expected)
        self._expected_seconds[label] = expected


class LoopThread:
    """An event loop in a thread of its own, for as long as `context` is entered: other threads run coroutines in it.

    The constructor enters the context and `close` leaves it; both raise its exceptions. The thread does not keep the interpreter from
    exiting: the owner closes it then.
    """

    def __init__(self, name: str, context: AbstractAsyncContextManager[Any]) -> None:
        self._entered: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._leave = asyncio.Event()
        self._calls: set[asyncio.Task[Any] | None] = set()
        self._futures: set[concurrent.futures.Future[Any]] = set()  # of the calls, for the threads that wait
        self._failure: BaseException | None = None
        self._lock, self._is_closed, self._has_ended = threading.Lock(), False, False
        self._runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)  # without it the loop becomes the caller's too
        self._loop = self._runner.get_loop()
        self._task = self._loop.create_task(self._hold(context))
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()
        try:
            self._entered.result()
        except BaseException:
            self.close(at_once=True)
            raise

    def run(self, function: Callable[P, Coroutine[Any, Any, T]], *arguments: P.args, **keywords: P.kwargs) -> T:
        """Await the function's coroutine in the loop; return its result or raise its exception. KeyboardInterrupt in the caller cancels it.

        Raises NotRunningError after `close`, and where it would wait for ever: in the loop's own thread, and in a forked process.
        """
        future: concurrent.futures.Future[T] = concurrent.futures.Future()
        try:
            with self._lock:
                is_over = self._is_closed or self._has_ended
                if is_over or not self._thread.is_alive() or threading.current_thread() is self._thread:
                    elsewhere = "call it from the process that started it, and not from its own callbacks"
                    raise NotRunningError(f"the graph cannot be called: {'it was closed' if is_over else elsewhere}")
                self._futures.add(future)
                self._loop.call_soon_threadsafe(self._begin, future, partial(function, *arguments, **keywords))
            return future.result()
        except concurrent.futures.CancelledError:
            raise NotRunningError("the graph was closed during the call") from None
        except BaseException:  # KeyboardInterrupt comes at any line: the call may have begun
            future.cancel()
            raise
        finally:
            self._futures.discard(future)

    def close(self, at_once: bool = False) -> None:
        """Leave the context, or cancel it (`at_once`), and wait until the calls have returned and the thread has ended. Idempotent.

        The first call raises what leaving the context raises, but not `at_once`. It does not wait in the loop's own thread.
        """
        with self._lock:
            is_first, self._is_closed = not self._is_closed, True
        self._end(at_once)
        if threading.current_thread() is self._thread:
            return
        try:
            self._thread.join()
        except BaseException:  # KeyboardInterrupt
            self._end(at_once=True)
            self._thread.join()
            raise
        if is_first and not at_once and self._failure is not None:
            raise self._failure

    def end_soon(self) -> None:
        """Close at once, but wait for nothing: a finalizer runs in any thread, also in one whose event loop must not block."""
        self._is_closed = True  # no lock: no other thread can call what is finalized
        self._end(at_once=True)

    def _end(self, at_once: bool) -> None:
        if self._thread.is_alive():
            with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile
                self._loop.call_soon_threadsafe(self._task.cancel if at_once else self._leave.set)

    def _run(self) -> None:
        try:
            with self._runner:
                self._loop.run_until_complete(self._task)
        except BaseException as error:  # of the context, or of the loop itself, for example when its descriptors were closed
            self._failure = error
        with self._lock:
            self._has_ended = True
            futures = list(self._futures)
        if self._failure is not None and not self._entered.done():
            self._entered.set_exception(self._failure)
        for future in futures:  # those that a broken loop did not end
            with contextlib.suppress(concurrent.futures.InvalidStateError):
                future.set_exception(NotRunningError("the graph was closed during the call"))

    async def _hold(self, context: AbstractAsyncContextManager[Any]) -> None:
        try:
            async with context:
                self._entered.set_result(None)
                await self._leave.wait()
        finally:
            while self._calls:
                await asyncio.wait([call for call in self._calls if call is not None])

    def _begin(self, future: concurrent.futures.Future[T], function: Callable[[], Coroutine[Any, Any, T]]) -> None:
        """Start a call, unless its caller has been interrupted. In the loop's thread, so that no other one touches the coroutine."""
        if future.cancelled():
            return
        task = self._loop.create_task(self._call(function))

        def on_result(task: asyncio.Task[T]) -> None:
            with contextlib.suppress(concurrent.futures.InvalidStateError):  # its caller was interrupted
                if task.cancelled():
                    future.cancel()
                elif (error := task.exception()) is not None:
                    future.set_exception(error)
                else:
                    future.set_result(task.result())

        def on_interrupt(future: concurrent.futures.Future[T]) -> None:
            if future.cancelled():
                with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile
                    self._loop.call_soon_threadsafe(task.cancel)

        task.add_done_callback(on_result)
        future.add_done_callback(on_interrupt)

    async def _call(self, function: Callable[[], Coroutine[Any, Any, T]]) -> T:
        task = asyncio.current_task()
        self._calls.add(task)
        try:
            return await function()
        finally:
            self._calls.discard(task)


def resident_bytes(process: int | str = "self") -> int:
    """Anonymous and shared memory of a process in RAM, in bytes; 0 where the system does not report it.

    Pages of mapped files are not counted: a forked worker shares the mapped libraries with the fork server. Weights are counted, also
    those in memory that several processes map (operators/weight_memory.py): in each process from their first use.
    """
    try:
        with open(f"/proc/{process}/status") as file:
            lines = [line.split() for line in file]
    except OSError:
        return 0
    return sum(int(words[1]) << 10 for words in lines if words[0] in ("RssAnon:", "RssShmem:"))


@dataclass(frozen=True)
class Seams:
    """The external services of one process. `Seams()` provides the real ones."""

    clock: Clock = field(default_factory=RealClock)
    machine_now: Callable[[], float] = time.monotonic  # of the machine: the same in all its processes, in seconds
    wall_now: Callable[[], float] = time.time  # Unix time, for people: no decision depends on it
    new_incarnation: Callable[[], str] = lambda: secrets.token_hex(4)
    new_seed: Callable[[], int] = lambda: secrets.randbits(63)
    new_key: Callable[[], bytes] = lambda: secrets.token_bytes(KEY_BYTES)
    new_compute: NewCompute = ThreadCompute
    own_loop: bool = False  # the event loop serves exactly one worker
    transport: Callable[[str], Transport] = get_transport
    open_backend: OpenBackend | None = None  # starts worker processes; None: the backend of this host, which only the launcher imports
    open_engine: OpenEngine | None = None  # provides the other hosts of a run on several; None: the engine that the graph names
    open_log_folder: Callable[[Path], LogFolder] = open_log_folder  # of a request log
    name_process: Callable[[str], None] = lambda name: None  # sets the name of this process in `ps`
    new_timer: Callable[[], Timer] = new_timer  # a timer of the running loop, finer than the clock's sleep
    compiled: bool = True  # the commonest case of a runner runs in C
    host_address: HostAddress = HostAddress()  # by which other hosts reach this one
    descriptors: Mapping[str, int] = field(default_factory=dict)  # that the process was given: memory file of a weight set, or by name
    resident_bytes: Callable[..., int] = resident_bytes  # of this process, or of the one with this id
    process_times: Callable[[int], ProcessTimes | None] = process_times  # of the process with this id
    process_activity: Callable[[int], Activity | None] = process_activity
    random: random.Random = field(default_factory=random.Random)  # for jitter and choices that need no replay

    def process_sample(self, pid: int) -> ProcessSample | None:
        """What a process does now. None where the system does not report it, and for a process that has ended."""
        times, activity = self.process_times(pid), self.process_activity(pid)
        return ProcessSample(activity, times) if times is not None and activity is not None else None
