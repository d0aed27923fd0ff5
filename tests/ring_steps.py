"""Runs the two ends of a shared-memory ring step by step and explores every interleaving of their steps.

The C files are built with FLOWRT_STEPS: before each access to a shared word, before bytes of a record are written or read, and at each
wake-up they call a hook. Each end runs in a thread that waits in the hook until the search lets it go on. A stored word lies in a store
buffer first, as on x86 (TSO): its owner sees it at once, the other end after a step of its own that writes the oldest one to memory; a
fence or an exchange waits until the buffer is empty. So a missing fence shows. The bytes of a record are one step for the envelope and
payload, written to memory at once. Reorderings that x86 does not do are not explored.

The search is depth first and without snapshots: each run restarts, repeats the choices so far, and goes on until both ends are done or
the state was seen before. A state is the memory, the store buffers, pending wake-ups, and what each end knows: its own cursors when its
call began, and what it has read since. Steps that the other end cannot notice (a store into the buffer, a fence that need not wait, a word
that it never reads) are made at once.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import os
import re
import shlex
import subprocess
import sysconfig
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from types import ModuleType
from typing import Any

NATIVE = Path(__file__).parents[1] / "transports" / "native"
SOURCES = ["_words.c", "_records.c", "_envelopes.c", "_copy_thread.c", "_loans.c"]


class Step(IntEnum):
    """As in _words.h; WAIT is an end that sleeps until it is woken."""

    LOAD = 0
    STORE = 1
    FENCE = 2
    EXCHANGE = 3
    BYTES = 4
    WAKE = 5
    WAIT = 6
    START = 7


def build_words(directory: Path, edit: Callable[[str, str], str] = lambda name, text: text) -> ModuleType:
    """The module of the shared words with step points; `edit` may change a source file, given its name and text, to plant a fault."""
    for path in NATIVE.glob("_*.[ch]"):
        (directory / path.name).write_text(edit(path.name, path.read_text()))
    library = directory / "_words.so"
    compiler = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")
    flags = ["-shared", "-fPIC", "-pthread", "-std=gnu11", "-O1", "-DFLOWRT_STEPS", f"-I{sysconfig.get_path('include')}"]
    subprocess.run([*compiler, *flags, *SOURCES, "-o", str(library)], cwd=directory, check=True)
    spec = importlib.util.spec_from_file_location("_words", library)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def unscheduled(kind: int, at: int, value: int) -> int | None:
    """The hook outside of a search: accesses are made as they come, and the numbers of ends are no descriptors to be woken."""
    return 0 if kind == Step.WAKE else None


class Abandoned(BaseException):
    """The search needs this run no more."""


class End:
    """One end of the ring, in a thread of its own, which stands still but for one step at a time."""

    def __init__(self, run: Run, name: str, body: Callable[[End], None]) -> None:
        self.run, self.name = run, name
        self.pending: tuple[Step, int, int] | None = (Step.START, 0, 0)  # None: it is done
        self.buffer: list[tuple[int, int]] = []  # (offset, value) of stores that the other end does not see yet, oldest first
        self.seen: list[object] = []  # its own state when `begin` was called, and what it has read since: it knows no more
        self.error: BaseException | None = None
        self._result: int | None = None
        self._go = threading.Lock()
        self._go.acquire()
        self._body = body
        self._thread = threading.Thread(target=self._main, daemon=True)
        self._thread.start()

    def _main(self) -> None:
        self._go.acquire()
        try:
            if not self.run.abandoned:
                self._body(self)
        except Abandoned:
            pass
        except BaseException as error:
            self.error = error
        self.pending = None
        if not self.run.abandoned:
            self.run.stopped.release()

    def begin(self, *state: object) -> None:
        """Only `state` keeps what it has read before."""
        self.seen = [state]

    def wait(self) -> None:
        """Sleep until the other end wakes this one."""
        if not self.run.abandoned:
            self.stop_at(Step.WAIT, 0, 0)
        if self.run.abandoned:
            raise Abandoned

    def stop_at(self, kind: Step, at: int, value: int) -> int | None:
        """Called in the end's thread: wait until the search has made this step; its result."""
        self.pending = kind, at, value
        self.run.stopped.release()
        self._go.acquire()
        return unscheduled(kind, at, value) if self.run.abandoned else self._result

    def resume(self, result: int | None) -> None:
        """Called by the search: let it go on with the result of its step, until the next."""
        self._result = result
        self._go.release()
        self.run.stopped.acquire()

    def leave(self) -> None:
        self._go.release()
        self._thread.join()

    def is_current(self) -> bool:
        return threading.current_thread() is self._thread


Choice = tuple[int, bool]  # which end; whether its oldest store becomes visible, or else it makes its step


@dataclass
class Run:
    """One execution: the shared memory and the two ends."""

    words: Any
    memory: Any
    bodies: tuple[Callable[[End], None], Callable[[End], None]]
    shared: frozenset[int]  # offsets of the words that both ends use
    wakes: list[int] = field(default_factory=lambda: [0, 0])  # pending wake-ups of each end
    abandoned: bool = False
    stopped: threading.Lock = field(default_factory=threading.Lock)  # released by the end that has reached its next step
    trace: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.stopped.acquire()
        self.view = memoryview(self.memory)
        self.base = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        self.words.set_step_hook(self._hook)
        self.ends = tuple(End(self, name, body) for name, body in zip(("writer", "reader"), self.bodies, strict=True))

    def _hook(self, kind: int, at: int, value: int) -> int | None:
        for end in self.ends:
            if end.is_current() and not self.abandoned:  # relative to the mapping, which may lie elsewhere in every run
                return end.stop_at(Step(kind), at - self.base if at else 0, value)
        return unscheduled(kind, at, value)

    def choices(self) -> list[Choice]:
        """Steps that can be made now; one alone where it is invisible to the other end and so may as well come first."""
        for number, end in enumerate(self.ends):
            kind = end.pending[0] if end.pending is not None else None
            if end.buffer and end.buffer[0][0] not in self.shared:
                return [(number, True)]
            if kind in (Step.START, Step.STORE) or (kind == Step.FENCE and not end.buffer):
                return [(number, False)]
        found: list[Choice] = []
        for number, end in enumerate(self.ends):
            if end.buffer:
                found.append((number, True))
            if end.pending is None:
                continue
            kind = end.pending[0]
            if kind in (Step.FENCE, Step.EXCHANGE) and end.buffer:
                continue
            if kind == Step.WAIT and not self.wakes[number]:
                continue
            found.append((number, False))
        return found

    def make(self, choice: Choice) -> None:
        number, is_flush = choice
        end = self.ends[number]
        if is_flush:
            at, value = end.buffer.pop(0)
            self._store(at, value)
            self.trace.append(f"{end.name}: word {at} = {value} is visible")
            return
        assert end.pending is not None
        kind, at, value = end.pending
        self.trace.append(f"{end.name}: {kind.name} {at or ''} {value}")
        result = 0
        if kind == Step.LOAD:
            own = [stored for offset, stored in end.buffer if offset == at]
            result = own[-1] if own else self._load(at)
        elif kind == Step.STORE:
            end.buffer.append((at, value))
        elif kind == Step.EXCHANGE:
            result = self._load(at)
            self._store(at, value)
        elif kind == Step.WAKE:
            self.wakes[value] += 1
        elif kind == Step.WAIT:
            result, self.wakes[number] = self.wakes[number], 0
        end.seen.append(result)
        end.resume(result)
        if end.error is not None:
            raise end.error

    def state(self) -> bytes:
        ends = [(end.pending, end.buffer, end.seen) for end in self.ends]
        return hashlib.sha256(repr((ends, self.wakes)).encode() + self.view).digest()

    def _load(self, at: int) -> int:
        return int.from_bytes(self.view[at : at + 8], "little")

    def _store(self, at: int, value: int) -> None:
        self.view[at : at + 8] = value.to_bytes(8, "little")

    def close(self) -> None:
        self.abandoned = True
        for end in self.ends:
            end.leave()
        self.words.set_step_hook(unscheduled)


class FoundError(AssertionError):
    """What went wrong, and the steps that lead to it."""


@dataclass
class Explored:
    runs: int = 0
    states: int = 0
    steps: int = 0


def explore(start: Callable[[], Run], max_states: int = 1_000_000) -> Explored:
    """Make every sequence of steps from `start`, but for those that lead to a state seen before.

    FoundError when an end fails, or when both stand still and one is not done. AssertionError when there are more than `max_states`.
    """
    found = Explored()
    seen: set[bytes] = set()
    path: list[tuple[Choice, list[Choice]]] = []  # the choice made, and those still to be made there
    while True:
        run = start()
        found.runs += 1
        try:
            for choice, _ in path:
                run.make(choice)
            while True:
                state = run.state()
                if state in seen:
                    break
                seen.add(state)
                assert len(seen) <= max_states, "too many states"
                choices = run.choices()
                if not choices:
                    asleep = [end.name for end in run.ends if end.pending is not None]
                    assert not asleep, f"{' and '.join(asleep)} asleep for ever"
                    break
                path.append((choices[0], choices[1:]))
                found.steps += 1
                run.make(choices[0])
        except Exception as error:
            raise FoundError("\n".join([f"{type(error).__name__}: {error}", *run.trace])) from error
        finally:
            run.close()
        while path and not path[-1][1]:
            path.pop()
        if not path:
            found.states = len(seen)
            return found
        _, rest = path.pop()
        path.append((rest[0], rest[1:]))


def replace_in_function(text: str, function: str, old: str, new: str) -> str:
    """The C source with `old`, which must occur once in the body of `function`, replaced there."""
    definition = re.search(rf"^[^\n;]*\b{function}\([^;{{]*\)\n{{", text, re.MULTILINE)
    assert definition is not None, f"no function {function}"
    begin = definition.start()
    end = text.index("\n}\n", begin)
    body = text[begin:end]
    assert body.count(old) == 1, f"{function} has {body.count(old)} of {old!r}"
    return text[:begin] + body.replace(old, new) + text[end:]
