"""What this process may use of the machine: processor cores, memory and tasks, within its affinity mask and its control groups (cgroups).

A container or a service manager limits a group of processes; the machine's own numbers do not show that. Both versions of cgroups are read,
the group of this process and all above it: the smallest limit holds.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_MOUNTED_AT = Path("sys/fs/cgroup")  # where container engines mount the files of the group, whatever the table of mounts shows
_UNLIMITED_BYTES = 1 << 60  # version 1 writes "no limit" as the largest multiple of a page
_ESCAPES = (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\"))


def usable_cores() -> int:
    """Cores that the compute threads of all processes of a run share: those of the affinity mask, or the whole cores within the quota of
    the control groups if these are fewer. Threads beyond a quota stop all others of the group until its next period."""
    quota = cpu_quota()
    return visible_cores() if quota is None else max(1, min(visible_cores(), int(quota)))


def visible_cores() -> int:
    """Cores this process may run on (its affinity mask, not the machine's count)."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def cpu_quota(root: Path = Path("/")) -> float | None:
    """The processor time that the control groups allow, in cores; None without a limit. `root`: of the file system, for tests."""
    quotas = []
    for folder in _groups("cpu", root):
        with suppress(OSError, ValueError, ZeroDivisionError):
            quota, period = (folder / "cpu.max").read_text().split()
            quotas.append(int(quota) / int(period))  # ValueError: "max"
        with suppress(OSError, ValueError, ZeroDivisionError):
            quotas.append(int((folder / "cpu.cfs_quota_us").read_text()) / int((folder / "cpu.cfs_period_us").read_text()))
    return min((quota for quota in quotas if quota > 0), default=None)  # -1 in version 1: no limit


def available_memory_bytes(root: Path = Path("/")) -> int | None:
    """Memory that processes can still take: the machine's, or the rest of the limit of a control group if that is less. None where the
    system does not report it."""
    try:
        facts = dict(line.split(":", 1) for line in (root / "proc/meminfo").read_text().splitlines())
        available = int(facts["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return None
    return min((available, *(max(0, limit - used) for limit, used in _memory_limits(root))))


def memory_limit_bytes(root: Path = Path("/")) -> int:
    """Memory that processes can ever take: the machine's, or the limit of a control group if that is less."""
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min((machine, *(limit for limit, _ in _memory_limits(root))))


def _memory_limits(root: Path) -> Iterator[tuple[int, int]]:
    """The limit of each control group that has one, and the bytes in use."""
    for folder in _groups("memory", root):
        for limit, used in (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")):
            with suppress(OSError, ValueError):
                num_bytes = int((folder / limit).read_text())
                if num_bytes < _UNLIMITED_BYTES:
                    yield num_bytes, int((folder / used).read_text())


def available_tasks(root: Path = Path("/")) -> int | None:
    """Processes and threads that the control groups still allow; None without a limit. RLIMIT_NPROC is not counted."""
    left = []
    for folder in _groups("pids", root):
        with suppress(OSError, ValueError):  # ValueError: "max"
            left.append(max(0, int((folder / "pids.max").read_text()) - int((folder / "pids.current").read_text())))
    return min(left, default=None)


def _groups(controller: str, root: Path) -> Iterator[Path]:
    """The folders of this process's groups that may limit what `controller` controls, each followed by those above it."""
    own: dict[bool, str] = {}  # by whether the path is one of version 2
    with suppress(OSError, ValueError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            number, controllers, path = line.split(":", 2)
            if number == "0" or controller in controllers.split(","):
                own[number == "0"] = path
    seen: set[Path] = set()
    for is_v2, mounted_from, mounted_at in [*_mounts(controller, root), (True, "/", root / _MOUNTED_AT)]:
        path = own.get(is_v2, "/")
        inside = Path(path).relative_to(mounted_from) if Path(path).is_relative_to(mounted_from) else Path()  # else: of the host
        folder = mounted_at / inside
        while folder not in seen and folder.is_relative_to(mounted_at):
            seen.add(folder)
            yield folder
            folder = folder.parent


def _mounts(controller: str, root: Path) -> Iterator[tuple[bool, str, Path]]:
    """Of each mounted hierarchy of the controller: whether it is of version 2, which of its groups is mounted, and where."""
    with suppress(OSError, IndexError):
        for line in (root / "proc/self/mountinfo").read_text().splitlines():
            mount, _, kind = line.partition(" - ")
            fields, (name, _, *options) = mount.split(" "), (*kind.split(" "), "", "")[:4]
            if name == "cgroup2" or (name == "cgroup" and controller in ",".join(options).split(",")):
                yield name == "cgroup2", _unescaped(fields[3]), root / _unescaped(fields[4]).lstrip("/")


def _unescaped(path: str) -> str:
    for written, meant in _ESCAPES:
        path = path.replace(written, meant)
    return path
