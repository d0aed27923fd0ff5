"""Parses the faults for real processes: a scenario file, or text such as "kill:experts.1@2s". Pure but for reading the file."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flowrt.chaos.cells import fault_name
from flowrt.document import read_document
from flowrt.errors import UserError, shortened
from flowrt.graph.model import FORK_SERVER, GATEWAY, MONITOR, Graph
from flowrt.graph.recovery import is_watched, neighbours, standby_names
from flowrt.reliability.scenario import AnyFault, Crash, Hang, Pause, Place, Reset, Scenario, Slow, Stall, scenario_of, written

INJECTABLE = (Crash, Pause, Stall, Hang, Slow, Reset)  # into real processes
BY_WORKER = (Stall, Hang, Slow, Reset)  # injected by the worker itself, on an order
_SUCH_AS = {
    "crash": "kill:experts.1@2s",
    "pause": "pause:experts.0@1s+500ms",
    "stall": "stall:experts.0@1s+500ms",
    "hang": "hang:experts.0@1s+5s",
    "slow": "slow:experts.0@1s+5sx4",
    "reset": "reset:attention.0-experts.1@1s",
}
EXAMPLE = ", ".join(_SUCH_AS[kind] for kind in ("crash", "pause", "slow", "reset"))
_NAMES = {"fork-server": FORK_SERVER}  # on the command line, without a space
_FIELDS = {str(kind.__struct_config__.tag): kind.__struct_fields__ for kind in INJECTABLE}
_KINDS = {"kill": "crash"} | {kind: kind for kind in _FIELDS}
_FAULT = re.compile(r"(?P<kind>[a-z_]+):(?P<process>[^@]+)@(?P<at>[^+@]+)(?:\+(?P<for>[^+@x]+))?(?:x(?P<factor>[^+@x]+))?")
_SECONDS = re.compile(r"(\d+(?:\.\d+)?|\.\d+)(ms|s)?")


def parse_faults(text: str, graph: Graph) -> Scenario:
    """The scenario of a --chaos option: faults with commas between, KIND:PROCESS@TIME, then +DURATION and xFACTOR where the kind has them.

    Raises UserError, one line.
    """
    parts = [part.strip() for part in text.split(",")]
    values = {"scenario": 1, "faults": [_values_of(part) for part in parts]}

    def where(place: Place) -> str:
        number = next((step for step in place if isinstance(step, int)), None)
        return f"--chaos {shortened(parts[number] if number is not None else text)}"

    return _checked(values, where, graph, lambda kind: f"such as {_SUCH_AS[kind]}", has_keys=False)


def load_plan(path: Path, graph: Graph) -> Scenario:
    """The scenario in the file at `path`. Raises UserError, one line, also for a fault that only a simulation knows."""
    if not path.is_file():
        raise UserError(f"{path}: no such file; give the path of a scenario file")
    document = read_document(path)
    return _checked(document.value, document.where, graph)


def check_processes(graph: Graph, where: str) -> None:
    """Raises UserError for a graph whose workers share processes."""
    if graph.processes != "many":
        raise UserError(f"{where}workers share processes, so no fault can be injected into one alone; use --set deploy.processes=many")


def needs_fault_worker(scenario: Scenario) -> bool:
    """Whether the run needs workers that take orders (worker.py)."""
    return any(isinstance(fault, BY_WORKER) for fault in scenario.faults)


def fault_text(fault: AnyFault) -> str:
    """The fault in words: "kill experts.1", "pause experts.0 for 0.5 s"."""
    text = f"{fault_name(fault.kind)} {' - '.join(fault.processes)}"
    if isinstance(fault, Slow):
        text += f" {fault.factor:g} times"
    return f"{text} for {fault.for_seconds:g} s" if isinstance(fault, Pause | Stall | Hang | Slow) else text


def _checked(
    value: Any, where: Callable[[Place], str], graph: Graph, example: Callable[[str], str] = written, has_keys: bool = True
) -> Scenario:
    known = {GATEWAY, FORK_SERVER, *graph.process_names(), *standby_names(graph), *([MONITOR] if is_watched(graph) else [])}
    scenario = scenario_of(value, where, known, example, tuple(_FIELDS), has_keys)
    if scenario.faults:
        check_processes(graph, f"{where(('faults', 0))}: ")
    linked = neighbours(graph)
    for number, fault in enumerate(scenario.faults):
        place = f"{where(('faults', number))}: "
        if not isinstance(fault, INJECTABLE):
            raise UserError(f"{place}{fault.kind} is for simulation only; real processes take {', '.join(_FIELDS)}")
        if GATEWAY in fault.processes:
            raise UserError(f"{place}the gateway is this command itself; name another process")
        if isinstance(fault, Reset) and fault.between[1] not in (others := linked.get(fault.between[0], ())):
            one, other = fault.between
            peers = ", ".join(name for name in others if name != GATEWAY) or "no process"
            raise UserError(f"{place}{one} has no link to {other}, so there is none to reset; it has links to {peers}")
        if isinstance(fault, BY_WORKER) and fault.processes[0] in (MONITOR, FORK_SERVER, *standby_names(graph)):
            raise UserError(f"{place}the {fault.processes[0]} takes crash and pause only; for {fault.kind} name another process")
    return scenario


def _values_of(part: str) -> dict[str, Any]:
    """A fault's plain values, as in a file."""
    found = _FAULT.fullmatch(part)
    if found is None:
        form = "KIND:PROCESS@TIME[+DURATION][xFACTOR]"
        raise UserError(f"--chaos {shortened(part) or '(nothing)'}: not of the form {form}; such as {EXAMPLE}")
    if found["kind"] not in _KINDS:
        raise UserError(f"--chaos {shortened(part)}: {found['kind']} is unknown; one of: {', '.join(_KINDS)}")
    kind = _KINDS[found["kind"]]
    values: dict[str, Any] = {"fault": kind, "at_seconds": _seconds(found["at"], part)}
    values |= {"between": found["process"].split("-")} if kind == "reset" else {"process": _NAMES.get(found["process"], found["process"])}
    for name, text, form, read in (
        ("for_seconds", found["for"], "+DURATION, as +500ms", _seconds),
        ("factor", found["factor"], "xFACTOR, as x5", _number),
    ):
        if (text is not None) != (name in _FIELDS[kind]):
            raise UserError(f"--chaos {shortened(part)}: {found['kind']} {'takes no' if text is not None else 'needs'} {form}")
        if text is not None:
            values[name] = read(text, part)
    return values


def _seconds(text: str, part: str) -> float:
    found = _SECONDS.fullmatch(text)
    if found is None:
        raise UserError(f"--chaos {shortened(part)}: {shortened(text)!r} is not a time; for example 2s, 1.5s, 500ms")
    return float(found[1]) * (1e-3 if found[2] == "ms" else 1.0)


def _number(text: str, part: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise UserError(f"--chaos {shortened(part)}: {shortened(text)!r} is not a factor; for example x5") from None
