"""Runs the conformance checks of one scheme, each in its own event loop, on each kind of event loop, with leak checks.

For a transport of another package:

    from flowrt.transports.conformance.suite import run_suite
    assert all(result.is_ok() for result in run_suite("its-scheme"))
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
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any, Literal, NamedTuple

from flowrt.transports.conformance.channel_checks import CHANNEL_CHECKS
from flowrt.transports.conformance.connection_checks import CONNECTION_CHECKS, pair_maker
from flowrt.transports.conformance.kit import ContractViolationError, expect, num_descriptors
from flowrt.transports.conformance.long_checks import LONG_CHECKS, NEEDED_BYTES
from flowrt.transports.conformance.process_checks import PROCESS_CHECKS
from flowrt.transports.registry import get_transport
from flowrt.transports.shared_memory.transport import available_bytes

LoopKind = Literal["asyncio", "uvloop"]
Outcome = Literal["passed", "failed", "not applicable", "skipped"]
_SETTLE_SECONDS = 20.0  # time limit for resources that end by themselves soon after a check: a killed process, a library's thread


GROUPS = {
    "channels": CHANNEL_CHECKS,
    "other processes": PROCESS_CHECKS,
    "listening, connecting": CONNECTION_CHECKS,
    "very long, very many": LONG_CHECKS,
}


class PlannedCheck(NamedTuple):
    """A check, ready to be called in a fresh loop. `property` is what it checks, `group` one of GROUPS."""

    name: str
    property: str
    group: str
    call: Callable[[], Coroutine[Any, Any, None]]


class CheckResult(NamedTuple):
    """The result of one check on one kind of event loop. `why` is empty when the check passed."""

    name: str
    property: str
    group: str
    loop: LoopKind
    outcome: Outcome
    seconds: float
    why: str = ""

    def is_ok(self) -> bool:
        return self.outcome != "failed"


class _OpenResources(NamedTuple):
    """Counts of the resources that a check can leak."""

    descriptors: int
    threads: int
    mapped_memory: int
    children: int


def plan(scheme: str, *, full: bool = True) -> list[PlannedCheck]:
    """Returns all checks for `scheme`; `full` adds the checks that take minutes and gibibytes."""
    make_pair, planned = pair_maker(scheme), []
    for group, checks in GROUPS.items():
        for check in checks if full or checks is not LONG_CHECKS else ():
            argument = scheme if "scheme" in signature(check).parameters else make_pair
            text = " ".join((check.__doc__ or check.__name__).split())
            planned.append(PlannedCheck(check.__name__, text, group, partial(check, argument)))
    return planned


def usable_loops() -> tuple[LoopKind, ...]:
    """Returns the kinds of event loop that are installed; workers use the last one."""
    return ("asyncio", "uvloop") if importlib.util.find_spec("uvloop") else ("asyncio",)


def run_suite(
    scheme: str, *, full: bool = True, loops: Sequence[LoopKind] | None = None, only: str = "", begin: Callable[[str], None] | None = None
) -> Iterator[CheckResult]:
    """Runs the checks of `scheme` whose names contain `only`, and yields each result as the check ends.

    `begin(name)` is called before each check. Call this function outside any event loop. Raises AddressError for an unknown scheme, and
    UnavailableError for a scheme that does not work on this machine.
    """
    capabilities = get_transport(scheme).capabilities
    planned = [check for check in plan(scheme, full=full) if only in check.name]
    for loop in loops or usable_loops():
        with suppress(Exception):  # a failure is reported by the check itself below
            _in_new_loop(loop, plan(scheme, full=False)[0].call)  # resources that libraries open once must not count as leaks
        for check in planned:
            if begin is not None:
                begin(check.name)
            if check.group == "other processes" and not capabilities.between_processes:
                yield CheckResult(*check[:3], loop, "not applicable", 0.0, "it stays within a process")
            elif (needed := NEEDED_BYTES.get(check.name, 0)) > available_bytes():
                yield CheckResult(*check[:3], loop, "skipped", 0.0, f"it takes {needed >> 30} GiB of free memory")
            else:
                yield _run(check, loop)


def _run(check: PlannedCheck, loop: LoopKind) -> CheckResult:
    before, start = _open_resources(), time.perf_counter()
    outcome: Outcome = "failed"
    try:
        _in_new_loop(loop, check.call)
        _expect_no_leak(before)
        outcome, why = "passed", ""
    except Exception as error:  # any unexpected exception is a failed check
        cause: BaseException = error
        while isinstance(cause, BaseExceptionGroup):
            cause = cause.exceptions[0]
        why = str(cause) if isinstance(cause, ContractViolationError) else f"{type(cause).__name__}: {cause}"
    return CheckResult(*check[:3], loop, outcome, time.perf_counter() - start, why)


def _in_new_loop(kind: LoopKind, call: Callable[[], Coroutine[Any, Any, None]]) -> None:
    factory = asyncio.new_event_loop
    if kind == "uvloop":
        import uvloop

        factory = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(_call_and_expect_no_task(call))


async def _call_and_expect_no_task(call: Callable[[], Coroutine[Any, Any, None]]) -> None:
    await call()
    running = asyncio.all_tasks() - {asyncio.current_task()}
    if running:
        _, running = await asyncio.wait(running, timeout=_SETTLE_SECONDS)
    expect(not running, f"no task is left running: {running}")


def _expect_no_leak(before: _OpenResources) -> None:
    deadline = time.monotonic() + _SETTLE_SECONDS
    while more := [
        f"{name} {was} -> {now}" for name, was, now in zip(_OpenResources._fields, before, _open_resources(), strict=True) if now > was
    ]:
        gc.collect()  # only after a difference was found: a collection is slow in a large process
        expect(time.monotonic() < deadline, f"no resource is left open, but: {', '.join(more)}")
        time.sleep(0.02)


def _open_resources() -> _OpenResources:
    if not sys.platform.startswith("linux"):
        return _OpenResources(0, 0, 0, 0)
    tasks = os.listdir("/proc/self/task")
    children = 0
    for task in tasks:
        with suppress(OSError):
            children += len(Path(f"/proc/self/task/{task}/children").read_text().split())
    mapped = sum("/memfd:" in line or "/dev/shm/" in line for line in Path("/proc/self/maps").read_text().splitlines())
    return _OpenResources(num_descriptors(), len(tasks), mapped, children)
