"""The report of `flowrt doctor`: its checks, their texts and remedies."""

import io
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from rich.console import Console

from flowrt.cli.doctor import (
    Check,
    collect,
    detector_check,
    emulation_checks,
    files_check,
    leftover_check,
    products_check,
    report,
    rows_check,
    transport_checks,
)
from flowrt.graph.model import Edge, Graph, Node
from flowrt.graph.settings import Emulation
from flowrt.processes.leftover import MARKER, PARENT_MARKER, Marked, marked_processes
from flowrt.system.process_status import Activity, ProcessTimes


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
    assert {"gpu", "cpus", "memory", "uvloop", "pidfd", "memfd", "transport inproc", "transport zmq", "detector", "leftovers"} <= set(
        checks
    )
    fine, text = printed(list(checks.values()))
    assert fine
    assert text.splitlines()[-1] == "flowrt can run here"


def test_what_the_detector_sees_here() -> None:
    assert detector_check(ProcessTimes(1.0, 1.0, 0.0), Activity.ASLEEP).ok
    blind = detector_check(None, None)
    assert not blind.ok
    assert not blind.needed
    assert "only closed connections and operations beyond their bounds" in blind.text


def test_what_auto_takes_and_why() -> None:
    works = {"inproc": None, "shm": None, "zmq": None}
    assert transport_checks(works)[-1].text == "takes shm between processes, and continues over zmq when that breaks; inproc inside one"
    checks = transport_checks(works | {"shm": "flowrt was installed without a C compiler"})
    assert [check.ok for check in checks] == [True, False, True, True]
    assert checks[1].text == "flowrt was installed without a C compiler"
    assert checks[-1].text == "takes zmq between processes, because shm does not work; inproc inside one"
    nothing = transport_checks({"inproc": None, "shm": "no compiler", "zmq": "not installed"})[-1]
    assert (nothing.ok, nothing.needed) == (False, True)
    assert nothing.remedy is not None


def test_doctor_reports_whether_fused_kernels_are_used() -> None:
    assert rows_check(True).text == "flowrt's own kernels compute norms, attention over pages and routing"
    not_built = rows_check(False)
    assert not not_built.ok
    assert "_rows.c was not built" in not_built.text
    assert "gcc" in (not_built.remedy or "")


def test_doctor_reports_which_products_are_native() -> None:
    forms = {"float32": "panels", "bfloat16": "packed", "float16": "wide panels"}
    assert products_check(forms).text == "flowrt's own kernels compute matrix products in float32 (panels), float16 (wide panels)"
    assert products_check({"float32": "packed"}).text == "torch computes matrix products: this processor has no AVX2"
    not_built = products_check(None)
    assert (not_built.ok, not_built.needed) == (False, False)
    assert "gcc" in str(not_built.remedy)


def test_the_report_names_what_is_missing_and_the_remedy() -> None:
    fine, text = printed([Check("torch", False, "not installed [cpu]", "pip install torch", needed=True), Check("gpu", False, "none")])
    assert not fine
    assert text.splitlines() == [
        "bad  torch  not installed [cpu]",
        "            pip install torch",
        "no   gpu    none",
        "missing for a run: torch",
    ]


def test_the_smallest_dilation_by_link_and_for_a_graph() -> None:
    own = "latency_seconds=0.0,bandwidth_bytes_per_second=1e9,message_seconds=1e-05"
    nodes = {"a": Node("a", "ops:a", "left"), "b": Node("b", "ops:b", "right")}
    graph = Graph.of(nodes.values(), [Edge("a", "y", "b", "x", link=own)], emulation=Emulation(100.0))
    emulation, emulate = emulation_checks(50e-6, True, graph)
    assert emulation.ok
    assert "off by 50 us; smallest dilation: ub 67, nvlink 63," in emulation.text  # 20 x 50 us / 15 us, and 16 us
    assert emulate.ok
    assert emulate.text.startswith("100 is the smallest dilation for this graph")
    too_small = emulation_checks(51e-6, True, graph)[1]
    assert (too_small.ok, too_small.remedy) == (False, "write emulate: {dilation: 110, ..} or more")
    assert emulation_checks(50e-6, True, graph.replace(emulation=None))[1].text == "the graph emulates nothing"
    assert not emulation_checks(1e-3, False)[0].ok


def test_leftovers_are_those_whose_launcher_is_gone() -> None:
    alive, dead = Marked(71, "a", os.getpid(), "flowrt:one"), Marked(2**22 + 2, "b", 2**22 + 1, "flowrt:two")
    assert leftover_check([alive]).ok
    check = leftover_check([alive, dead])
    assert not check.ok
    assert check.remedy == "end them: kill -9 4194306"
    assert check.text.endswith("flowrt:two (4194306)"), "it has ended meanwhile"
    text = leftover_check([Marked(os.getpid(), "b", 2**22 + 1, "own")]).text
    assert re.search(rf"own \({os.getpid()}, for [0-9.]+ (us|ms|s|min [0-9]+ s), started in {re.escape(os.getcwd())}\)", text)


def test_a_marked_process_is_found() -> None:
    environment = {**os.environ, MARKER: "cafe", PARENT_MARKER: "123"}
    code = "print(flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()  # the system shows its environment only once the program runs
            found = [marked for marked in marked_processes() if marked.run_id == "cafe"]
        finally:
            process.kill()
    assert [(marked.pid, marked.launcher_pid) for marked in found] == [(process.pid, 123)]
    assert [marked for marked in marked_processes() if marked.run_id == "cafe"] == []


def test_doctor_reports_model_files_that_cannot_be_loaded(model: Path, tmp_path: Path) -> None:
    assert files_check(model) == Check("model files", True, "all tensors are there")
    folder = shutil.copytree(model, tmp_path / "cut")
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    check = files_check(folder)
    assert not check.ok
    assert check.needed
    assert f"{file}: tensor" in check.text
