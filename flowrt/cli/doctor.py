"""Implements `flowrt doctor`: checks what this machine offers a run, what is missing, and what would help.

`collect` returns the checks as data, `report` prints them. It changes nothing and starts no worker. Torch is imported in a separate
process, because that import may fail.
"""

from __future__ import annotations

import asyncio
import json
import os
import platform
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from flowrt.actors.emulated_links import modelled_seconds
from flowrt.api import read_graph
from flowrt.bench.measure.host_probe import HostReport, probe_hosts
from flowrt.costs.links import PROFILES
from flowrt.emulation import smallest_dilation
from flowrt.errors import TORCH_REMEDY, UserError
from flowrt.graph.default import folder_hint
from flowrt.graph.model import Graph
from flowrt.launcher.start_checks import check_engine
from flowrt.launcher.transport_choice import AUTO, BETWEEN, BETWEEN_HOSTS, WITHIN, tried_between
from flowrt.observe import duration_text, size_text
from flowrt.operators.checkpoint_files import check_files
from flowrt.operators.families.registry import read_model_config
from flowrt.operators.model_config import ModelError
from flowrt.processes.import_path import import_path
from flowrt.processes.leftover import Marked, marked_processes
from flowrt.seams import Seams
from flowrt.system.machine_limits import available_memory_bytes, cpu_quota, usable_cores, visible_cores
from flowrt.system.process_status import Activity, ProcessTimes, process_activity, process_age_seconds, process_times
from flowrt.timer import FineTimer, measure_lateness, new_timer
from flowrt.transports.registry import known_schemes, unavailable_reason

MIN_PYTHON = (3, 11)
MIN_MEMORY_BYTES = 1 << 30
_TORCH_SECONDS = 120.0
HOST_SECONDS = 120.0  # time limit for each host to start
_TORCH_PROBE = """
import json, torch
from flowrt.operators.products import form_for, has_panels, has_wide_panels
dtypes = ("float32", "bfloat16", "float16")
is_built = has_panels and has_wide_panels
products = {name: form_for(getattr(torch, name), "cpu", (32, 32)) for name in dtypes} if is_built else None
try:
    from flowrt.operators.kernels.cpu import _rows
    rows = True
except ImportError:
    rows = False
gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
threads = torch.get_num_threads()
facts = {"version": torch.__version__, "threads": threads, "cuda": torch.version.cuda, "gpus": gpus}
print(json.dumps(facts | {"products": products, "rows": rows}))
"""


_STRICT_PROBE = """
import torch
torch.set_num_threads(1)
from pathlib import Path
from flowrt.operators.model_config import ModelError
from flowrt.operators.proof import prove_model
from flowrt.operators.row_blocks import describe
try:
    print("ok", describe(prove_model(Path({path!r}), {dtype!r}).sizes))
except ModelError as error:
    print("no", error)
"""


@dataclass(frozen=True)
class Check:
    """One finding. `remedy` is what the user can do, or None. `needed`: a run fails without it."""

    name: str
    ok: bool
    text: str
    remedy: str | None = None
    needed: bool = False


async def collect(
    model: str | None = None, dtype: str | None = None, graph: str | None = None, overrides: Sequence[str] = ()
) -> list[Check]:
    """All checks, in the order of the report. It takes about as long as one import of torch.

    With a `model` directory, it includes the row blocks of strict numerics for this model on this machine. With a `graph` file, it
    includes the smallest dilation at which it can be emulated. Raises GraphError for a bad one, UserError for a bad model.
    """
    loaded = None if graph is None else read_graph(graph, overrides)
    if model is not None:
        try:
            read_model_config(Path(model), dtype)
        except ModelError as error:
            raise UserError(f"--model {model}: {folder_hint(Path(model)) or error}") from None
    available = {scheme: unavailable_reason(scheme) for scheme in known_schemes()}
    checks = [_python_check(), *await _torch_checks(), *_machine_checks()]
    checks += [_library_check("uvloop", "workers run on the standard loop, slower"), *transport_checks(available)]
    checks += [*_kernel_checks(), detector_check(process_times(os.getpid()), process_activity(os.getpid()))]
    checks.append(leftover_check(marked_processes()))
    checks += await _emulation_checks(loaded)
    if model is None:
        return checks
    files = files_check(Path(model))
    return [*checks, files, await _strict_check(model, dtype)] if files.ok else [*checks, files]


async def collect_hosts(graph: str, overrides: Sequence[str] = ()) -> list[Check]:
    """Checks of the hosts of a graph file: what each has, and the way from each to each other one. They are used as for a run. Raises
    GraphError, and UserError or WorkerDiedError for a host that cannot be used."""
    return host_checks(await probe_graph(graph, overrides))


async def probe_graph(graph: Path | str, overrides: Sequence[str] = ()) -> HostReport:
    """What each host of a graph file has, and the ways between them. Raises as `collect_hosts`."""
    loaded = read_graph(graph, overrides)
    check_engine(loaded)
    if loaded.hosts is None:
        raise UserError(f"--hosts {graph}: the graph has one host; write hosts: into it")
    return await probe_hosts(loaded.hosts, Seams(), BETWEEN_HOSTS[0], tried_between(loaded.hosts), HOST_SECONDS)


def host_checks(found: HostReport) -> list[Check]:
    """One check per host, and one per way from a host to another by each transport."""
    checks, first = [], next(iter(found.facts.values()))
    for host, facts in found.facts.items():
        is_same = facts.flowrt == first.flowrt and facts.missing == first.missing
        lacks = "".join(f"; not {scheme}: {reason}" for scheme, reason in facts.missing.items())
        listens = " and ".join(facts.addresses.values())
        text = f"flowrt {facts.flowrt or 'not installed'}, Python {facts.python}, {facts.system}, listens at {listens}{lacks}"
        remedy = None if is_same else "install the same packages as on the first host"
        checks.append(Check(host, facts.flowrt == first.flowrt, text, remedy, needed=True))
    for (source, target, scheme), way in found.ways.items():
        ends = f"from {found.facts[source].addresses[scheme]} to {found.facts[target].addresses[scheme]}"
        name = f"{source} to {target}, {scheme}"
        if way.error:
            remedy = "let TCP connections between these two pass (docs/hosts.md)"
            checks.append(Check(name, False, f"cannot connect {ends}: {way.error}", remedy, needed=True))
        else:
            text = f"{duration_text(way.one_way_seconds)} one way, {size_text(way.bytes_per_second)}/s"
            checks.append(Check(name, True, text, None, needed=True))
    return checks


def report(checks: Iterable[Check], console: Console | None = None) -> bool:
    """Print the checks, one line each outside a terminal. Returns whether this machine has everything that a run needs."""
    console = console or Console()
    checks = list(checks)
    if console.is_terminal:
        console.print(_grid(checks))
    else:
        _print_plain(checks, console)
    bad = [check.name for check in checks if check.needed and not check.ok]
    console.print(f"missing for a run: {', '.join(bad)}" if bad else "flowrt can run here", soft_wrap=True, highlight=False)
    return not bad


def _print_plain(checks: Sequence[Check], console: Console) -> None:
    """Prints one finding per line of any length, so that grep finds it."""
    width = max((len(check.name) for check in checks), default=0)
    for check in checks:
        for word, name, text in ((_mark(check)[0], check.name, check.text), ("", "", check.remedy)):
            if text is not None:
                console.print(Text(f"{word:<4} {name:<{width}}  {text}"), soft_wrap=True, highlight=False)


def _grid(checks: Sequence[Check]) -> Table:
    """A table of the checks; long texts wrap between words within their column."""
    grid = Table.grid(Column(no_wrap=True), Column(no_wrap=True), Column(overflow="fold"), padding=(0, 2, 0, 0))
    for check in checks:
        remedy = Text(f"\n{check.remedy}" if check.remedy is not None else "", "dim")
        grid.add_row(Text(*_mark(check)), check.name, Text.assemble(check.text, remedy))
    return grid


def _mark(check: Check) -> tuple[str, str]:
    """The word before a finding, and its colour."""
    return ("ok", "green") if check.ok else (("bad", "red") if check.needed else ("no", "yellow"))


def transport_checks(available: Mapping[str, str | None]) -> list[Check]:
    """One check per scheme, and the scheme that `auto` chooses between processes. `available`: scheme -> None, or why not."""
    checks = [
        Check(f"transport {scheme}", reason is None, "works" if reason is None else reason, None, needed=scheme == WITHIN)
        for scheme, reason in available.items()
    ]
    works = [scheme for scheme in BETWEEN if scheme in available and available[scheme] is None]
    if not works:
        remedy = "install a C compiler or pyzmq, then flowrt again; `processes: one` needs neither"
        return [*checks, Check(f"transport {AUTO}", False, "nothing works between processes", remedy, needed=True)]
    text = f"takes {works[0]} between processes"
    if works[0] != BETWEEN[0]:
        better = BETWEEN[: BETWEEN.index(works[0])]
        text += f", because {' and '.join(better)} {'does' if len(better) == 1 else 'do'} not work"
    if works[1:]:
        text += f", and continues over {' or '.join(works[1:])} when that breaks"
    return [*checks, Check(f"transport {AUTO}", True, f"{text}; {WITHIN} inside one")]


async def _emulation_checks(graph: Graph | None) -> list[Check]:
    timer = new_timer()
    try:
        lateness = await measure_lateness(timer)
    finally:
        timer.close()
    return emulation_checks(lateness[len(lateness) // 2], isinstance(timer, FineTimer), graph)


def emulation_checks(error_seconds: float, is_fine: bool, graph: Graph | None = None) -> list[Check]:
    """The smallest dilation for each kind of link, and for `graph`, given waits with an error of `error_seconds`."""
    links = ", ".join(f"{name} {smallest_dilation({name: each.seconds(0)}, error_seconds)[0]:g}" for name, each in PROFILES.items())
    computing = f"{smallest_dilation({'': 1e-3}, error_seconds)[0]:g} for 1 ms of computing"
    text = f"a wait is off by {duration_text(error_seconds)}; smallest dilation: {links}, {computing}"
    remedy = None if is_fine else "no timerfd here: waits are as coarse as the event loop's; Linux has finer ones"
    checks = [Check("emulation", is_fine, text, remedy)]
    if graph is None:
        return checks
    times = modelled_seconds(graph)
    if graph.emulation is None or not times:
        return [*checks, Check("emulate", True, "the graph emulates nothing")]
    smallest, name = smallest_dilation(times, error_seconds)
    dilation = graph.emulation.dilation
    text = f"{smallest:g} is the smallest dilation for this graph, because of {name} ({duration_text(times[name])}); it has {dilation:g}"
    enough = dilation >= smallest
    return [*checks, Check("emulate", enough, text, None if enough else f"write emulate: {{dilation: {smallest:g}, ..}} or more")]


def detector_check(times: ProcessTimes | None, activity: Activity | None) -> Check:
    """The evidence that this machine gives the failure detector. `times` and `activity` are those of this process."""
    if times is not None and activity is not None:
        return Check("detector", True, "/proc shows which processes are stopped, busy or asleep")
    text = "no /proc/PID/schedstat: only closed connections and operations beyond their bounds mark a process dead"
    return Check("detector", False, text, "a Linux kernel with CONFIG_SCHED_INFO also finds processes that are stopped or blocked")


def leftover_check(marked: Sequence[Marked]) -> Check:
    """Processes of runs whose launcher has ended. Processes of running graphs are not counted."""
    orphans = [process for process in marked if not os.path.exists(f"/proc/{process.launcher_pid}")]
    if not orphans:
        return Check("leftovers", True, "no process of an earlier run")
    pids = " ".join(str(process.pid) for process in orphans)
    names = ", ".join(f"{process.name} ({_details(process.pid)})" for process in orphans)
    return Check("leftovers", False, f"processes of earlier runs still live: {names}", f"end them: kill -9 {pids}")


def _details(pid: int) -> str:
    """ "71, for 3 min 20 s, started in /home/me": whose run it was."""
    age, folder = process_age_seconds(pid), None
    with suppress(OSError):  # it has ended, or is another user's
        folder = os.readlink(f"/proc/{pid}/cwd")
    return f"{pid}" + (f", for {duration_text(age)}" if age is not None else "") + (f", started in {folder}" if folder else "")


def _python_check() -> Check:
    text = f"{platform.python_version()} ({platform.python_implementation()}), {sys.executable}"
    wanted = ".".join(map(str, MIN_PYTHON))
    ok = sys.version_info >= MIN_PYTHON
    return Check("python", ok, text, None if ok else f"flowrt needs Python {wanted} or newer", needed=True)


async def _torch_checks() -> list[Check]:
    """Checks of torch, its GPUs and flowrt's own kernels, collected in a separate process."""
    installed = _installed("torch")
    if installed is None:
        return [Check("torch", False, "not installed", "pip install torch", needed=True), Check("gpu", False, "unknown: torch is missing")]
    output, error = await _run_probe(_TORCH_PROBE)
    if output is None:
        broken = Check("torch", False, f"{installed} is installed but cannot be imported: {error}", TORCH_REMEDY, needed=True)
        return [broken, Check("gpu", False, "unknown: torch is missing")]
    facts = json.loads(output)
    kind = f"CUDA {facts['cuda']}" if facts["cuda"] else "CPU build"
    torch = Check("torch", True, f"{facts['version']} ({kind}), {facts['threads']} threads by default", needed=True)
    return [torch, products_check(facts["products"]), rows_check(facts["rows"]), _gpu_check(facts["gpus"])]


def _gpu_check(gpus: Sequence[str]) -> Check:
    if gpus:
        return Check("gpu", True, ", ".join(gpus))
    if os.path.exists("/proc/driver/nvidia/version"):
        return Check("gpu", False, "there is an NVIDIA driver, but torch sees no GPU", "install torch with CUDA (pytorch.org)")
    return Check("gpu", True, "none; everything computes on the CPU")


def files_check(model: Path) -> Check:
    """Whether the headers of the weight files hold what config.json describes."""
    try:
        notes = check_files(model)
    except ModelError as error:
        return Check("model files", False, str(error), needed=True)
    return Check("model files", True, "; ".join(notes) or "all tensors are there")


async def _strict_check(model: str, dtype: str | None) -> Check:
    output, error = await _run_probe(_STRICT_PROBE.format(path=model, dtype=dtype))
    verdict, _, text = (output or b"").decode(errors="replace").strip().partition(" ")
    return Check("strict numerics", verdict == "ok", text or error)


async def _run_probe(code: str) -> tuple[bytes | None, str]:
    """Run `code` in a new process of this interpreter. Returns its output, or None and the last line of its errors."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-c", code),  # -P: a tree of flowrt in the current directory is not the installed one
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": import_path()},
    )
    try:
        async with asyncio.timeout(_TORCH_SECONDS):
            output, errors = await process.communicate()
    except TimeoutError:
        return None, f"no result within {_TORCH_SECONDS:g} s"
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode != 0:
        lines = errors.decode(errors="replace").strip().splitlines()
        return None, lines[-1] if lines else f"exit status {process.returncode}"
    return output, ""


def _machine_checks() -> list[Check]:
    checks = [cpus_check(usable_cores(), visible_cores(), cpu_quota())]
    free = available_memory_bytes()
    if free is not None:
        ok = free >= MIN_MEMORY_BYTES
        remedy = None if ok else "each worker takes about 200 MiB before its weights; `processes: one` shares that"
        checks.append(Check("memory", ok, f"{size_text(free)} available", remedy))
    return checks


def cpus_check(cores: int, visible: int, quota: float | None) -> Check:
    """`cores`: those that `threads: auto` divides. `quota`: processor time that the container allows, in cores."""
    text = f"{visible} usable of {os.cpu_count()}, {platform.machine()}"
    if quota is not None:
        text += f", limited to {quota:g} by the container"
    return Check("cpus", True, f"{text}; `threads: auto` divides {cores} among the processes of a run")


def products_check(forms: Mapping[str, str] | None) -> Check:
    """What computes matrix products: flowrt's own kernels, or torch. `forms`: that of products.py for each dtype."""
    if forms is None:
        return _not_built("products", "matrix products", "_panels.c or _wide_panels.c")
    found = [f"{dtype} ({form})" for dtype, form in forms.items() if form.endswith("panels")]
    ours = f"flowrt's own kernels compute matrix products in {', '.join(found)}"
    return Check("products", True, ours if found else "torch computes matrix products: this processor has no AVX2")


def rows_check(is_built: bool) -> Check:
    """Whether flowrt's own kernels compute the operations between matrix products (operators/kernels)."""
    what = "norms, attention over pages and routing"
    return Check("rows", True, f"flowrt's own kernels compute {what}") if is_built else _not_built("rows", what, "_rows.c")


def _not_built(name: str, what: str, source: str) -> Check:
    text = f"torch computes {what}, which is slower: kernels/cpu/{source} was not built"
    return Check(name, False, text, "install gcc 11 or newer, then flowrt again")


def _library_check(name: str, consequence: str) -> Check:
    found = _installed(name)
    return Check(name, found is not None, found or f"not installed: {consequence}", None if found else f"pip install {name}")


def _kernel_checks() -> list[Check]:
    """Checks of the system calls by which processes end together and shared memory has no name."""
    checks = []
    calls: tuple[tuple[str, Callable[[], int], str], ...] = (
        ("pidfd", lambda: os.pidfd_open(os.getpid()), "the launcher polls for the ends of processes"),
        ("memfd", lambda: os.memfd_create("flowrt-doctor"), "shared memory does not work"),
    )
    for name, call, consequence in calls:
        try:
            os.close(call())
            checks.append(Check(name, True, "works"))
        except (AttributeError, OSError) as error:
            reason = error if isinstance(error, OSError) else "not in this Python or system"
            checks.append(Check(name, False, f"{reason}: {consequence}"))
    if sys.platform != "linux":
        text = f"{platform.system()}: workers end when their launcher closes the control connection, not at once when it is killed"
        checks.append(Check("system", False, text, "use Linux: there every function of flowrt works"))
    return checks


def _installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
