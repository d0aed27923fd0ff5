"""Reads from /proc what a process of this machine is doing and how much processor time it has received."""

from __future__ import annotations

import enum
import os
from dataclasses import dataclass


class Activity(enum.Enum):
    """What the threads of a process are doing at one moment. The thread of its event loop is its main thread."""

    STOPPED = "stopped"  # by a signal: state T
    RUNNABLE = "runnable"  # the event loop's thread runs or waits for a processor
    OTHERS_RUNNABLE = "other threads runnable"  # another thread runs or waits for a processor; the event loop's thread sleeps
    DISK = "waiting for a disk"  # no thread is runnable and one is in uninterruptible sleep
    ASLEEP = "asleep"


@dataclass(frozen=True)
class ProcessTimes:
    """Totals since the start of a process."""

    cpu_seconds: float  # received by all threads
    loop_cpu_seconds: float  # received by the event loop's thread
    queued_seconds: float  # during which the event loop's thread was runnable without a processor


@dataclass(frozen=True)
class ProcessSample:
    activity: Activity
    times: ProcessTimes


def process_times(pid: int) -> ProcessTimes | None:
    """The processor time of a process. None when the system does not report it, or when there is no such process."""
    try:
        fields = _stat_fields(f"/proc/{pid}/stat")
        with open(f"/proc/{pid}/schedstat", "rb") as file:
            received, queued, _ = map(int, file.read().split())
        return ProcessTimes((int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK"), received / 1e9, queued / 1e9)
    except (OSError, ValueError, IndexError):
        return None


def process_age_seconds(pid: int) -> float | None:
    """How long ago a process started. None when the system does not report it, or when there is no such process."""
    try:
        started = int(_stat_fields(f"/proc/{pid}/stat")[19]) / os.sysconf("SC_CLK_TCK")  # since the boot, as the uptime
        with open("/proc/uptime", "rb") as file:
            return max(0.0, float(file.read().split()[0]) - started)
    except (OSError, ValueError, IndexError):
        return None


def process_activity(pid: int) -> Activity | None:
    """The activity of a process. None when the system does not report it, and for a process that has ended or is traced."""
    try:
        match _stat_fields(f"/proc/{pid}/stat")[0]:
            case b"T":
                return Activity.STOPPED
            case b"R":
                return Activity.RUNNABLE
            case b"S" | b"D" as state:
                states = {state, *_thread_states(str(pid))}
                if b"R" in states:
                    return Activity.OTHERS_RUNNABLE
                return Activity.DISK if b"D" in states else Activity.ASLEEP
    except (OSError, IndexError):
        pass
    return None


def exit_status(pid: int) -> int | None:
    """The exit status of a process that has begun to die, as in subprocess. The kernel sets it before it frees the process's memory. None
    where the system does not report it, and for status 0, which is also that of a living process."""
    try:
        return os.waitstatus_to_exitcode(int(_stat_fields(f"/proc/{pid}/stat")[49])) or None
    except (OSError, ValueError, IndexError):
        return None


def other_threads_want_processor() -> bool:
    """Whether another thread of this process runs, is runnable, or waits for a disk. True where the system does not report it.

    An operation may compute on several threads; its first thread sleeps while it waits for a slower one.
    """
    try:
        own = os.readlink("/proc/thread-self").rpartition("/")[2]
        return not _thread_states("self", but=own).isdisjoint((b"R", b"D"))
    except (OSError, IndexError):
        return True


def thread_queued_seconds(native_id: int) -> float:
    """The time that a thread of this process was runnable without a processor, in seconds; 0 where the system does not report it."""
    try:
        with open(f"/proc/self/task/{native_id}/schedstat", "rb") as file:
            return int(file.read().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0


def _thread_states(process: str, but: str = "") -> set[bytes]:
    return {_stat_fields(f"/proc/{process}/task/{thread}/stat")[0] for thread in os.listdir(f"/proc/{process}/task") if thread != but}


def _stat_fields(path: str) -> list[bytes]:
    """The fields of a stat file after the process name. The name may contain any character."""
    with open(path, "rb") as file:
        return file.read().rpartition(b") ")[2].split()
