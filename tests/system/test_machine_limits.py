"""The cores and the memory that control groups leave to a process: both versions, its own group and those above it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from flowrt.errors import UserError
from flowrt.processes import fork_server_client
from flowrt.system import machine_limits
from flowrt.system.machine_limits import available_memory_bytes, available_tasks, cpu_quota, memory_limit_bytes, usable_cores, visible_cores

V1_CPU = "32 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw,relatime shared:9 - cgroup cgroup rw,cpu,cpuacct"
V2 = "31 23 0:28 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate"
MEMORY = "MemTotal: 9000000 kB\nMemAvailable:    4000000 kB\n"


def tree(root: Path, cgroup: str, mounts: str, files: Mapping[str, str]) -> Path:
    """A file system with these control groups."""
    for name, text in {"proc/self/cgroup": cgroup, "proc/self/mountinfo": mounts, "proc/meminfo": MEMORY, **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.mark.parametrize(
    ("cgroup", "mounts", "files", "quota"),
    [
        pytest.param("0::/", V2, {"sys/fs/cgroup/cpu.max": "150000 100000\n"}, 1.5, id="the root of a container's own hierarchy"),
        pytest.param("0::/", V2, {"sys/fs/cgroup/cpu.max": "max 100000\n"}, None, id="no limit"),
        pytest.param("0::/", V2, {}, None, id="no files"),
        pytest.param("", "", {"sys/fs/cgroup/cpu.max": "50000 100000\n"}, 0.5, id="files that the table of mounts does not show"),
        pytest.param("0::/a/b", V2, {"sys/fs/cgroup/a/b/cpu.max": "50000 100000"}, 0.5, id="its own group"),
        pytest.param(
            "0::/a/b",
            V2,
            {"sys/fs/cgroup/a/b/cpu.max": "400000 100000", "sys/fs/cgroup/a/cpu.max": "300000 100000", "sys/fs/cgroup/c/cpu.max": "1 100"},
            3.0,
            id="a group above has less",
        ),
        pytest.param(
            "0::/docker/1", V2.replace("0:28 / ", "0:28 /docker "), {"sys/fs/cgroup/1/cpu.max": "70000 100000"}, 0.7, id="a part is mounted"
        ),
        pytest.param("0::/../other", V2, {"sys/fs/cgroup/cpu.max": "70000 100000"}, 0.7, id="a group outside the namespace"),
        pytest.param("0::/a", V2.replace("/sys/fs/cgroup ", r"/c\040g "), {"c g/a/cpu.max": "20000 10000"}, 2.0, id="mounted elsewhere"),
        pytest.param(
            "4:cpu,cpuacct:/a\n0::/x",
            V1_CPU,
            {"sys/fs/cgroup/cpu,cpuacct/a/cpu.cfs_quota_us": "250000\n", "sys/fs/cgroup/cpu,cpuacct/a/cpu.cfs_period_us": "100000\n"},
            2.5,
            id="version 1",
        ),
        pytest.param(
            "4:cpu,cpuacct:/a",
            V1_CPU,
            {
                "sys/fs/cgroup/cpu,cpuacct/a/cpu.cfs_quota_us": "-1",
                "sys/fs/cgroup/cpu,cpuacct/a/cpu.cfs_period_us": "100000",
                "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "-1",
                "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000",
            },
            None,
            id="version 1 without a limit",
        ),
        pytest.param("nonsense", "nonsense - cgroup2\n - \n\n", {"sys/fs/cgroup/cpu.max": "nonsense"}, None, id="nonsense"),
    ],
)
def test_quota_of_the_control_groups(tmp_path: Path, cgroup: str, mounts: str, files: Mapping[str, str], quota: float | None) -> None:
    assert cpu_quota(tree(tmp_path, f"{cgroup}\n", f"{mounts}\n", files)) == quota


@pytest.mark.parametrize(("quota", "cores"), [(None, 8), (0.5, 1), (1.0, 1), (1.5, 1), (2.9, 2), (4.0, 4), (100.0, 8)])
def test_usable_cores_are_the_whole_ones_within_the_quota(monkeypatch: pytest.MonkeyPatch, quota: float | None, cores: int) -> None:
    monkeypatch.setattr(machine_limits, "visible_cores", lambda: 8)
    monkeypatch.setattr(machine_limits, "cpu_quota", lambda: quota)
    assert usable_cores() == cores


@pytest.mark.parametrize(
    ("cgroup", "mounts", "files", "available"),
    [
        ("0::/", V2, {}, 4_096_000_000),
        ("0::/a", V2, {"sys/fs/cgroup/a/memory.max": "max", "sys/fs/cgroup/a/memory.current": "5"}, 4_096_000_000),
        ("0::/a/b", V2, {"sys/fs/cgroup/a/memory.max": "2000", "sys/fs/cgroup/a/memory.current": "500"}, 1500),
        ("0::/a", V2, {"sys/fs/cgroup/a/memory.max": "2000", "sys/fs/cgroup/a/memory.current": "2500"}, 0),
        (
            "6:memory:/a",
            V1_CPU.replace("cpu,cpuacct", "memory"),
            {"sys/fs/cgroup/memory/a/memory.limit_in_bytes": "9223372036854771712", "sys/fs/cgroup/memory/a/memory.usage_in_bytes": "5"},
            4_096_000_000,
        ),
        (
            "6:memory:/a",
            V1_CPU.replace("cpu,cpuacct", "memory"),
            {"sys/fs/cgroup/memory/a/memory.limit_in_bytes": "3000", "sys/fs/cgroup/memory/a/memory.usage_in_bytes": "1000"},
            2000,
        ),
    ],
)
def test_memory_that_the_control_groups_leave(tmp_path: Path, cgroup: str, mounts: str, files: Mapping[str, str], available: int) -> None:
    assert available_memory_bytes(tree(tmp_path, f"{cgroup}\n", f"{mounts}\n", files)) == available


@pytest.mark.parametrize(
    ("cgroup", "mounts", "files", "left"),
    [
        ("0::/a", V2, {}, None),
        ("0::/a", V2, {"sys/fs/cgroup/a/pids.max": "max", "sys/fs/cgroup/a/pids.current": "5"}, None),
        ("0::/a", V2, {"sys/fs/cgroup/a/pids.max": "20", "sys/fs/cgroup/a/pids.current": "5"}, 15),
        (
            "8:pids:/a",
            V1_CPU.replace("cpu,cpuacct", "pids"),
            {"sys/fs/cgroup/pids/a/pids.max": "max", "sys/fs/cgroup/pids/pids.max": "7", "sys/fs/cgroup/pids/pids.current": "9"},
            0,
        ),
    ],
)
def test_tasks_that_the_control_groups_leave(tmp_path: Path, cgroup: str, mounts: str, files: Mapping[str, str], left: int | None) -> None:
    assert available_tasks(tree(tmp_path, f"{cgroup}\n", f"{mounts}\n", files)) == left


def test_too_few_tasks_are_one_line_before_a_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fork_server_client, "available_tasks", lambda: 13)
    fork_server_client.check_tasks(4)
    with pytest.raises(UserError, match=r"^too few processes and threads are allowed \(pids\.max of the container leaves 13, at least 14"):
        fork_server_client.check_tasks(5)
    monkeypatch.setattr(fork_server_client, "available_tasks", lambda: None)
    fork_server_client.check_tasks(5000)


def test_this_machine_has_cores_and_memory() -> None:
    assert 1 <= usable_cores() <= visible_cores() <= (os.cpu_count() or 1)
    assert (available_memory_bytes() or 1) > 0
    assert memory_limit_bytes() >= (available_memory_bytes() or 0)


def test_the_memory_that_the_control_groups_ever_allow(tmp_path: Path) -> None:
    assert memory_limit_bytes(tree(tmp_path / "free", "0::/a\n", f"{V2}\n", {})) == memory_limit_bytes(tmp_path / "none")
    files = {"sys/fs/cgroup/a/memory.max": "2000", "sys/fs/cgroup/a/memory.current": "1500"}
    assert memory_limit_bytes(tree(tmp_path / "limited", "0::/a\n", f"{V2}\n", files)) == 2000


@pytest.mark.skipif(os.geteuid() != 0 or not os.access("/sys/fs/cgroup/cpu/cpu.cfs_quota_us", os.W_OK), reason="needs a cgroup of its own")
def test_quota_of_a_real_control_group() -> None:
    group = Path("/sys/fs/cgroup/cpu") / f"flowrt-test-{os.getpid()}"
    group.mkdir()
    try:
        (group / "cpu.cfs_quota_us").write_text("50000")
        if (pid := os.fork()) == 0:
            (group / "cgroup.procs").write_text(str(os.getpid()))
            os._exit(10 * (cpu_quota() == 0.5) + usable_cores())
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 11
    finally:
        group.rmdir()
