"""The request log of a simulated run, which outlives the death of its launcher, and when the launcher dies.

The files are in memory. A death may cut a write off at any byte; a power loss takes what was not synced, too. What the code of a dead
launcher still writes does not reach them.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, cast

from flowrt.errors import UserError
from flowrt.gateway.log_contents import LogContents, read_log
from flowrt.gateway.log_writer import LogWriter, open_log
from flowrt.seams import Seams
from flowrt.simulation.errors import InvariantError
from flowrt.simulation.waitables import current_node, set_result
from flowrt.simulation.world import World
from flowrt.system.log_files import LogFolder, LogSegment

PATH = Path("log")
WRITE_SECONDS = 0.05  # a death that cuts a write off comes this late if there is none

DeathKind = Literal["death", "torn write", "power loss", "full disk"]


@dataclass(frozen=True)
class LauncherDeath:
    """The launcher dies so long after the first request, or in its next write; or the disk is full from then on, which ends the run."""

    at_seconds: float
    kind: DeathKind = "death"


@dataclass(frozen=True)
class LogConditions:
    """A request log, and one death for each launcher but the last. `segment_bytes`: see LogWriter."""

    deaths: tuple[LauncherDeath, ...] = ()
    segment_bytes: int = 1 << 20
    is_synced: bool = False


class LogDisk:
    """The files of a log. One launcher has them at a time."""

    def __init__(self, seed: int) -> None:
        self.files: dict[str, bytearray] = {}
        self.holder: SimulatedLogFolder | None = None
        self._synced: dict[str, int] = {}  # bytes of each file that survive a power loss
        self._random = random.Random(f"disk {seed}")

    def open(self) -> SimulatedLogFolder:
        if self.holder is not None:
            raise UserError("the request log is in use by another launcher (simulated)")
        self.holder = SimulatedLogFolder(self)
        return self.holder

    def create(self, name: str) -> None:
        if name in self.files:
            raise FileExistsError(17, "File exists")
        self.files[name] = bytearray()
        self.sync(name)

    def append(self, name: str, data: bytes, is_torn: bool) -> None:
        self.files[name] += data[: self._random.randrange(len(data))] if is_torn else data

    def truncate(self, name: str, num_bytes: int) -> None:
        del self.files[name][num_bytes:]
        self.sync(name)

    def sync(self, name: str) -> None:
        self._synced[name] = len(self.files[name])

    def lose_power(self) -> None:
        for name, data in self.files.items():
            del data[self._random.randint(self._synced[name], len(data)) :]

    def check_closed(self) -> None:
        """The last launcher was closed: the log can be read, and each request in it has ended (I8)."""
        try:
            requests = read_log(self.open()).requests
        except UserError as error:
            raise InvariantError("I8", str(error)) from None
        if left := [number for number, request in requests.items() if request.end is None]:
            raise InvariantError("I8", f"requests {left} are open in the request log of a run that was closed")


class SimulatedLogFolder:
    """See flowrt.system.log_files.LogFolder."""

    path = str(PATH)

    def __init__(self, disk: LogDisk) -> None:
        self.disk = disk
        self.on_torn: Callable[[], None] | None = None  # the next write is cut off, and this is called
        self.is_full = False

    @property
    def is_held(self) -> bool:
        return self.disk.holder is self

    def names(self) -> list[str]:
        return sorted(self.disk.files)

    def read(self, name: str) -> bytes:
        return bytes(self.disk.files[name])

    def create(self, name: str) -> LogSegment:
        if self.is_held:
            self.disk.create(name)
        return _SimulatedSegment(self, name)

    def truncate(self, name: str, num_bytes: int) -> None:
        if self.is_held:
            self.disk.truncate(name, num_bytes)

    def remove(self, name: str) -> None:
        if self.is_held:
            del self.disk.files[name]

    def close(self) -> None:
        if self.is_held:
            self.disk.holder = None


class _SimulatedSegment:
    def __init__(self, folder: SimulatedLogFolder, name: str) -> None:
        self._folder, self._name = folder, name

    def append(self, data: bytes) -> None:
        folder = self._folder
        if folder.is_full:
            raise OSError(28, "No space left on device")
        if folder.is_held:
            folder.disk.append(self._name, data, is_torn=folder.on_torn is not None)
            if folder.on_torn is not None:
                folder.on_torn()

    def sync(self) -> None:
        if self._folder.is_held:
            self._folder.disk.sync(self._name)

    def close(self) -> None:
        pass


class LauncherLog:
    """The request log as one launcher has it, and the death of this launcher. Made on a node that survives, where `died` is set.
    `number`: of earlier launchers."""

    def __init__(self, world: World, disk: LogDisk, conditions: LogConditions, number: int) -> None:
        self.died: asyncio.Future[None] = world.loop.create_future()
        self._death = conditions.deaths[number] if number < len(conditions.deaths) else None
        self._world, self._disk, self._conditions, self._resumes = world, disk, conditions, number > 0
        self._node, self._folder = current_node.get(), cast("SimulatedLogFolder | None", None)

    @property
    def is_full(self) -> bool:
        return self._folder is not None and self._folder.is_full

    def open_folder(self, path: Path) -> LogFolder:
        self._folder = self._disk.open()
        return self._folder

    def open(self, seams: Seams, identity: Mapping[str, str]) -> tuple[LogWriter, LogContents]:
        compute = seams.new_compute("request log") if self._conditions.is_synced else None
        return open_log(seams.open_log_folder(PATH), identity, self._resumes, compute, self._conditions.segment_bytes)

    def begin(self) -> None:
        """The first request comes now."""
        if self._death is not None:
            self._call_later(self._death.at_seconds, partial(self._end, self._death.kind))

    def _end(self, kind: DeathKind) -> None:
        folder = self._folder
        if folder is None or not folder.is_held:  # the run was over before
            return
        self._world.num_faults[f"launcher: {kind}"] += 1
        if kind == "full disk":
            folder.is_full = True
        elif kind == "torn write":
            folder.on_torn = self._die
            self._call_later(WRITE_SECONDS, self._die)
        else:
            if kind == "power loss":
                self._disk.lose_power()
            self._die()

    def _die(self) -> None:
        """No code of the run runs any more, and what its last callback still writes is lost."""
        if not self.died.done():
            self._disk.holder = None
            self._world.loop.kill_all(but=self._node)
            set_result(self.died, None)

    def _call_later(self, seconds: float, call: Callable[[], None]) -> None:
        loop = self._world.loop
        loop.call_at_node(loop.time() + seconds, self._node, call, context=self._world.context(self._node))
