"""Runs the conformance checks of one scheme, each in its own event loop, on each kind of event loop, with leak checks.

For a transport of another package:

    from flowrt.transports.conformance.suite import run_suite
    assert all(result.ok for result in run_suite("its-scheme"))
"""

from __future__ import annotations

import asyncio
import gc
import importlib.util
import os
import sys
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, NamedTuple

from flowrt.transports.conformance.channel_checks import CHANNEL_CHECKS, TRANSPORT_CHECKS
from flowrt.transports.conformance.connection_checks import PROCESS_CHECKS, pair_maker
from flowrt.transports.conformance.kit import BrokenPromiseError, expect, num_descriptors
from flowrt.transports.conformance.long_checks import LONG_CHANNEL_CHECKS, LONG_TRANSPORT_CHECKS, NEEDED_BYTES
from flowrt.transports.conformance.window_checks import WINDOW_CHECKS
from flowrt.transports.registry import get_transport

LoopKind = Literal["asyncio", "uvloop"]
Verdict = Literal["kept", "broken", "not promised", "left out"]
_SETTLE_SECONDS = 20.0  # time limit for resources that end by themselves soon after a check: a killed process, a library's thread


class Planned(NamedTuple):
    """A check, ready to be called in a fresh loop."""

    name: str
    promise: str
    needs_processes: bool
    call: Callable[[], Coroutine[Any, Any, None]]


class Result(NamedTuple):
    """The result of one check. `why` is empty when the check passed."""

    name: str
    promise: str
    loop: LoopKind
    verdict: Verdict
    seconds: float
    why: str = ""

    @property
    def ok(self) -> bool:
        return self.verdict != "broken"


class _OpenResources(NamedTuple):
    """Counts of the resources that a check can leak."""

    descriptors: int
    threads: int
    mapped_memory: int
    children: int


def plan(scheme: str, *, full: bool = True) -> list[Planned]:
    """Returns all checks for `scheme`; `full` adds the checks that take minutes and gibibytes."""
    on_channels = (*CHANNEL_CHECKS, *WINDOW_CHECKS, *(LONG_CHANNEL_CHECKS if full else ()))
    on_schemes = (*TRANSPORT_CHECKS, *(LONG_TRANSPORT_CHECKS if full else ()))
    planned = [Planned(check.__name__, _promise(check), False, _bound(check, pair_maker(scheme))) for check in on_channels]
    planned += [Planned(check.__name__, _promise(check), check in PROCESS_CHECKS, _bound(check, scheme)) for check in on_schemes]
    return planned


def usable_loops() -> tuple[LoopKind, ...]:
    """Returns the kinds of event loop that are installed; workers use the last one."""
    return ("asyncio", "uvloop") if importlib.util.find_spec("uvloop") else ("asyncio",)


def run_suite(
    scheme: str, *, full: bool = True, loops: Sequence[LoopKind] | None = None, only: str = "", begin: Callable[[str], None] | None = None
) -> Iterator[Result]:
    """Runs the checks of `scheme` whose names contain `only`, and yields each result as the check ends.

    `begin(name)` is called before each check. Call this function outside any event loop. Raises AddressError for an unknown scheme, and
    UnavailableError for a scheme that does not work on this machine.
    """
    capabilities = get_transport(scheme).capabilities
    planned = [check for check in plan(scheme, full=full) if only in check.name]
    for loop in loops or usable_loops():
        with suppress(
            Exception
        ):  # warm-up: resources that libraries open once must not count as leaks; a failure is reported by the check itself below
            _in_new_loop(loop, plan(scheme, full=False)[0].call)
        for check in planned:
            if begin is not None:
                begin(check.name)
            if check.needs_processes and not capabilities.between_processes:
                yield Result(check.name, check.promise, loop, "not promised", 0.0, "it stays within a process")
            elif (lacking := NEEDED_BYTES.get(check.name, 0)) > _free_memory():
                yield Result(check.name, check.promise, loop, "left out", 0.0, f"it takes {lacking >> 30} GiB of free memory")
            else:
                yield _run(check, loop)


def _run(check: Planned, loop: LoopKind) -> Result:
    before = _held()
    start = time.perf_counter()
    verdict: Verdict = "broken"
    try:
        _in_new_loop(loop, check.call)
        _expect_nothing_left(before)
        verdict, why = "kept", ""
    except BrokenPromiseError as error:
        why = str(error)
    except Exception as error:  # any unexpected exception is a failed check
        cause: BaseException = error
        while isinstance(cause, BaseExceptionGroup):
            cause = cause.exceptions[0]
        why = str(cause) if isinstance(cause, BrokenPromiseError) else f"{type(cause).__name__}: {cause}"
    return Result(check.name, check.promise, loop, verdict, time.perf_counter() - start, why)


def _in_new_loop(kind: LoopKind, call: Callable[[], Coroutine[Any, Any, None]]) -> None:
    with asyncio.Runner(loop_factory=_loop_factory(kind)) as runner:
        runner.run(_and_no_task_left(call))


async def _and_no_task_left(call: Callable[[], Coroutine[Any, Any, None]]) -> None:
    await call()
    left = asyncio.all_tasks() - {asyncio.current_task()}
    if left:
        _, left = await asyncio.wait(left, timeout=_SETTLE_SECONDS)
    expect(not left, f"no task is left running: {left}")


def _loop_factory(kind: LoopKind) -> Callable[[], asyncio.AbstractEventLoop]:
    if kind == "uvloop":
        import uvloop

        factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
        return factory
    return asyncio.new_event_loop


def _expect_nothing_left(before: _OpenResources) -> None:
    deadline = time.monotonic() + _SETTLE_SECONDS
    while more := [f"{name} {was} -> {now}" for name, was, now in zip(_OpenResources._fields, before, _held(), strict=True) if now > was]:
        gc.collect()  # only after a difference was found: a collection is slow in a large process
        expect(time.monotonic() < deadline, f"nothing is left behind, but: {', '.join(more)}")
        time.sleep(0.02)


def _held() -> _OpenResources:
    if not sys.platform.startswith("linux"):
        return _OpenResources(0, 0, 0, 0)
    tasks = os.listdir("/proc/self/task")
    children = 0
    for task in tasks:
        with suppress(OSError):
            children += len(Path(f"/proc/self/task/{task}/children").read_text().split())
    mapped = sum("/memfd:" in line or "/dev/shm/" in line for line in Path("/proc/self/maps").read_text().splitlines())
    return _OpenResources(num_descriptors(), len(tasks), mapped, children)


def _free_memory() -> int:
    with suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return 1 << 62


def _bound(check: Callable[[Any], Coroutine[Any, Any, None]], argument: object) -> Callable[[], Coroutine[Any, Any, None]]:
    return lambda: check(argument)


def _promise(check: Callable[..., object]) -> str:
    return " ".join((check.__doc__ or check.__name__).split())
