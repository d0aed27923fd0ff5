"""Shared fixtures, and the check after each test that nothing is left behind.

Here: the leak checks (asyncio tasks, processes, descriptors, shared memory, compute threads, environment variables), the choice of
event loop, skipping of tests that need a GPU. Not here: checkpoints (checkpoints.py), fixtures of a single room (that room's folder).
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import functools
import gc
import importlib.util
import inspect
import os
import signal
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import zygote
from hypothesis import HealthCheck, settings

# Before anything imports torch: two cores are shared by many processes, and results must not depend on how many there are.
for _name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(_name, "1")

GRACE_SECONDS = 20.0  # for what ends by itself soon: a killed process, a stopping task or thread
# Objects between two collections of the garbage collector: a suite creates many that stay, and each collection would look at them again.
GC_THRESHOLDS = (100_000, 50, 1000)
LONG_FOLDERS = ("docs", "chaos", "repository", "simulation", "end_to_end", "cli", "bench")
_PR_SET_CHILD_SUBREAPER = 36
_SHARED_MEMORY_PREFIXES = ("flowrt", "torch_", "psm_", "sem.")  # names of others (a browser's) are not our business
_IGNORED_DESCRIPTORS = ("/dev/nvidia", "/dev/urandom")  # opened once by libraries and kept until the process ends

# The duration of an example proves nothing on a shared machine. The same examples on every machine: a failure can be met again.
settings.register_profile("flowrt", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("flowrt")

LoopFactory = Callable[[], asyncio.AbstractEventLoop]


def pytest_configure(config: pytest.Config) -> None:
    gc.set_threshold(*GC_THRESHOLDS)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as of a shell's background job: what tests start would never see a Ctrl-C
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if sys.platform == "linux":
        # Orphans (children of a process that a test has killed) come to us instead of to init, where no check would see them.
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        zygote.install()
    if importlib.util.find_spec("uvloop") is not None:
        import uvloop

        uvloop.new_event_loop().close()  # libuv keeps the signal pipe of its first loop: no test leaves it behind


def pytest_asyncio_loop_factories(config: pytest.Config, item: pytest.Item) -> Mapping[str, LoopFactory]:
    """A test with the fixture `loop_kind` runs once on the standard loop and once on uvloop, which workers use."""
    factories: dict[str, LoopFactory] = {"asyncio": asyncio.new_event_loop}
    if "loop_kind" in getattr(item, "fixturenames", ()) and importlib.util.find_spec("uvloop") is not None:
        import uvloop

        factories["uvloop"] = uvloop.new_event_loop
    return factories


@pytest.fixture
async def loop_kind() -> str:
    """ "asyncio" or "uvloop": the loop this test runs on. A test with this fixture runs on both."""
    return "uvloop" if type(asyncio.get_running_loop()).__module__.startswith("uvloop") else "asyncio"


@functools.cache
def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    items.sort(key=_place_in_run)
    for item in items:
        if item.get_closest_marker("gpu") and not _has_gpu():
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))
        if isinstance(item, pytest.Function) and inspect.iscoroutinefunction(inspect.unwrap(item.function)):
            # Right after the autouse fixtures: set up before, and so torn down after, every fixture of the test itself.
            item.fixturenames.insert(0, "no_task_left")


def _place_in_run(item: pytest.Item) -> int:
    """Folders of files that take long come first, so that no process runs one of them alone at the end."""
    folder = item.nodeid.partition("/")[2].partition("/")[0]
    return LONG_FOLDERS.index(folder) if folder in LONG_FOLDERS else len(LONG_FOLDERS)


@pytest.fixture
async def no_task_left() -> AsyncIterator[None]:
    """Fails a test whose tasks still run once it and its fixtures are done."""
    before = asyncio.all_tasks()
    yield
    left = {task for task in asyncio.all_tasks() - before if task is not asyncio.current_task()}
    if left:
        _, left = await asyncio.wait(left, timeout=GRACE_SECONDS)  # a task cancelled at the last moment needs a few turns
    assert not left, f"tasks left running: {left}"


@pytest.fixture(scope="module", autouse=True)
def frozen_garbage_collector() -> None:
    """No later collection traverses what stays for the whole run (tests, libraries, caches): each would take half a second."""
    gc.collect()
    gc.freeze()


@dataclass(frozen=True)
class _Held:
    """The resources of this process that a test could fail to release."""

    processes: frozenset[tuple[int, float]]
    descriptors: frozenset[tuple[int, str]]
    threads: frozenset[int]
    shared_memory: frozenset[str]
    variables: frozenset[str]


def _descriptors() -> frozenset[tuple[int, str]]:
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{name}")
            ignored = target.startswith((*_IGNORED_DESCRIPTORS, f"/proc/{os.getpid()}/fd")) or int(name) == zygote.descriptor()
            if not ignored:
                found.add((int(name), target))
    return frozenset(found)


def _shared_memory() -> frozenset[str]:
    """Named segments, and the memfds this process still maps (a map keeps the memory when the descriptor is long closed)."""
    found = set()
    with contextlib.suppress(OSError):
        found |= {f"/dev/shm/{name}" for name in os.listdir("/dev/shm") if name.startswith(_SHARED_MEMORY_PREFIXES)}
    with contextlib.suppress(OSError):
        maps = Path("/proc/self/maps").read_bytes()  # thousands of lines, read twice for each test
        for line in maps.splitlines() if b"/memfd:" in maps else ():
            if b"/memfd:" in line:
                fields = line.decode().split(maxsplit=5)
                found.add(f"{fields[5]} inode {fields[4]}")
    return frozenset(found)


def _living_children() -> frozenset[tuple[int, float]]:
    """Descendants that still run, with their start times. (One that is dead but not waited for holds nothing.)"""
    living, pids = set(), _children(os.getpid()) - zygote.pids()
    while pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            child = psutil.Process(pids.pop())
            pids |= _children(child.pid)
            if child.status() != psutil.STATUS_ZOMBIE:
                living.add((child.pid, child.create_time()))
    return frozenset(living)


def _children(pid: int) -> set[int]:
    """Those of a living process. From /proc, where psutil would look at every process of the machine."""
    if not sys.platform.startswith("linux"):
        return {child.pid for child in psutil.Process(pid).children()}
    found: set[int] = set()
    with contextlib.suppress(OSError):  # it has ended
        for task in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError):  # its thread has ended
                found |= set(map(int, Path(f"/proc/{pid}/task/{task}/children").read_text().split()))
    return found


def _held() -> _Held:
    threads = frozenset(thread.ident or 0 for thread in threading.enumerate() if thread.name.startswith("compute"))
    # With one more, whatever later tests start is an interpreter and no fork.
    variables = frozenset(zygote.significant(os.environ))
    if not sys.platform.startswith("linux"):
        return _Held(_living_children(), frozenset(), threads, frozenset(), variables)
    return _Held(_living_children(), _descriptors(), threads, _shared_memory(), variables)


def _leaks(before: _Held) -> list[str]:
    now = _held()
    leaks = [f"descriptor {number} -> {target}" for number, target in sorted(now.descriptors - before.descriptors)]
    leaks += [f"shared memory {name}" for name in sorted(now.shared_memory - before.shared_memory)]
    leaks += [f"compute thread {ident}" for ident in sorted(now.threads - before.threads)]
    leaks += [f"environment variable {name}" for name in sorted(now.variables - before.variables)]
    for pid, _ in sorted(now.processes - before.processes):
        with contextlib.suppress(psutil.NoSuchProcess):
            leaks.append(f"process {pid}: {' '.join(psutil.Process(pid).cmdline())[:200]}")
    return leaks


@pytest.fixture(autouse=True)
def leaves_nothing_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """After each test: no process, descriptor, shared memory, compute thread or environment variable more than before it."""
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)
    before = _held()
    yield
    leaks = _leaks(before)
    if not leaks:
        return
    gc.collect()
    deadline = time.monotonic() + GRACE_SECONDS
    while (leaks := _leaks(before)) and time.monotonic() < deadline:
        time.sleep(0.02)
    for pid, created in _held().processes - before.processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            if process.create_time() == created:
                process.kill()  # so that the next test starts clean
    assert not leaks, "left behind:\n  " + "\n  ".join(leaks)
