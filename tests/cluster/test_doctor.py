"""The doctor's report."""

import io
import os
import subprocess
import sys

from rich.console import Console

from flowrt.cluster.leftover import MARKER, PARENT_MARKER, Marked, marked_processes
from flowrt.doctor import Check, collect, leftover_check, report, transport_checks


def printed(checks: list[Check]) -> tuple[bool, str]:
    out = io.StringIO()
    fine = report(checks, Console(file=out, width=200))
    return fine, out.getvalue()


async def test_this_machine_can_run() -> None:
    checks = {check.name: check for check in await collect()}
    assert checks["python"].ok
    assert checks["torch"].ok
    assert checks["torch"].text.startswith("2.")
    assert checks["transport auto"].ok
    assert {"gpu", "cpus", "memory", "uvloop", "pidfd", "memfd", "transport inproc", "transport zmq", "leftovers"} <= set(checks)
    fine, text = printed(list(checks.values()))
    assert fine
    assert text.splitlines()[-1] == "flowrt can run here"


def test_what_auto_takes_and_why() -> None:
    works = {"inproc": None, "shm": None, "zmq": None}
    assert transport_checks(works)[-1].text == "takes shm between processes; inproc inside one"
    checks = transport_checks(works | {"shm": "flowrt was installed without a C compiler"})
    assert [check.ok for check in checks] == [True, False, True, True]
    assert checks[1].text == "flowrt was installed without a C compiler"
    assert checks[-1].text == "takes zmq between processes, because shm does not work; inproc inside one"
    nothing = transport_checks({"inproc": None, "shm": "no compiler", "zmq": "not installed"})[-1]
    assert (nothing.ok, nothing.needed) == (False, True)
    assert nothing.remedy is not None


def test_the_report_names_what_is_missing_and_the_remedy() -> None:
    fine, text = printed([Check("torch", False, "not installed [cpu]", "pip install torch", needed=True), Check("gpu", False, "none")])
    assert not fine
    assert text.splitlines() == [
        "bad  torch  not installed [cpu]",
        "            pip install torch",
        "no   gpu    none",
        "missing for a run: torch",
    ]


def test_leftovers_are_those_whose_launcher_is_gone() -> None:
    alive, dead = Marked(71, "a", os.getpid(), "flowrt:one"), Marked(72, "b", 2**22 + 1, "flowrt:two")
    assert leftover_check([alive]).ok
    check = leftover_check([alive, dead])
    assert not check.ok
    assert check.remedy == "end them: kill -9 72"


def test_a_marked_process_is_found() -> None:
    environment = {**os.environ, MARKER: "cafe", PARENT_MARKER: "123"}
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, env=environment) as process:
        try:
            found = [marked for marked in marked_processes() if marked.run_id == "cafe"]
        finally:
            process.kill()
    assert [(marked.pid, marked.launcher_pid) for marked in found] == [(process.pid, 123)]
    assert [marked for marked in marked_processes() if marked.run_id == "cafe"] == []
