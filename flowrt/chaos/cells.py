"""Chooses which faults a chaos run injects: processes by role, kinds of faults, and phases of the run. Pure.

A cell is a role, a fault and a phase. The report prints the outcome of each (report.py).
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from flowrt.errors import UserError
from flowrt.graph.kinds import Keeps
from flowrt.graph.model import FORK_SERVER, MONITOR, Graph
from flowrt.graph.recovery import is_watched, rule_of, survives
from flowrt.reliability.scenario import AnyFault, Crash, Hang, Pause, Scenario, Stall

FaultName = Literal["kill", "pause", "stall", "hang"]
Phase = Literal["start", "prefill", "decode", "idle", "replay", "drain"]
FAULTS: tuple[FaultName, ...] = get_args(FaultName)
PHASES: tuple[Phase, ...] = get_args(Phase)
STANDSTILL_SECONDS = 30.0  # a standstill ends with the verdict on its process, or after this time
SHORT_SECONDS = 3.0  # the same for processes without a quick verdict: the fork server, and those that start
_HINT = "workers take stall and hang once they have loaded, the monitor and the fork server take kill and pause"
_ROLES = {Keeps.NOTHING: "experts", Keeps.SEQUENCES: "attention", Keeps.PROMPTS: "prefill"}


@dataclass(frozen=True)
class Stretch:
    """A stretch of load with faults. `first` is killed before them, so that they hit the run in `phase`; None: at any moment."""

    scenario: Scenario
    phase: Phase | None = None
    first: str | None = None

    @property
    def num_faults(self) -> int:
        return len(self.scenario.faults) + (self.first is not None)


def role_of(graph: Graph, process: str) -> str:
    return process.replace(" ", "-") if process in (MONITOR, FORK_SERVER) else _ROLES.get(Keeps(rule_of(graph, process).keeps), "other")


def processes_by_role(graph: Graph) -> dict[str, list[str]]:
    """role -> the processes whose death the run survives."""
    found: dict[str, list[str]] = {}
    for name in (*graph.process_names(), *([MONITOR] if is_watched(graph) else []), FORK_SERVER):
        if survives(graph, name):
            found.setdefault(role_of(graph, name), []).append(name)
    return found


def chosen(text: str, known: Sequence[str], option: str) -> list[str]:
    """The names in an option's value: some of `known` with commas between, or `all`. Raises UserError for others."""
    names = [name.strip() for name in text.split(",")]
    if names == ["all"]:
        return list(known)
    for name in names:
        if name not in known:
            raise UserError(f"{option} {name or '(nothing)'}: unknown here; one of: all, {', '.join(known)}")
    return list(dict.fromkeys(names))


def fault_name(kind: str) -> str:
    """The name on the command line of a kind of fault."""
    return "kill" if kind == "crash" else kind


def fault_of(name: FaultName, process: str, phase: Phase | None = None) -> AnyFault:
    seconds = SHORT_SECONDS if process == FORK_SERVER or phase == "start" else STANDSTILL_SECONDS
    kinds: dict[str, type[Pause | Stall | Hang]] = {"pause": Pause, "stall": Stall, "hang": Hang}
    return Crash(process=process) if name == "kill" else kinds[name](process=process, for_seconds=seconds)


def can_take(role: str, fault: str, phase: str | None = None) -> bool:
    """Whether such a process takes this fault: the worker injects stalls and hangs into itself, and only once it has loaded."""
    if fault in ("kill", "pause"):
        return role != "fork-server" or phase != "start"
    return role not in (MONITOR, "fork-server") and phase != "start"


def random_stretches(graph: Graph, num: int, roles: Sequence[str], faults: Sequence[FaultName], seed: int) -> list[Stretch]:
    """A fault per stretch, at any moment: a random process of these roles, and the kinds of faults in turn. Raises UserError when no
    process takes any of them."""
    generator, processes = random.Random(seed), processes_by_role(graph)
    pairs = {fault: [name for role in roles if can_take(role, fault) for name in processes[role]] for fault in faults}
    usable = [fault for fault in faults if pairs[fault]]
    if not usable:
        raise UserError(f"--fault {', '.join(faults)}: no process of {', '.join(roles)} takes it; {_HINT}")
    order = [usable[number % len(usable)] for number in range(num)]
    return [Stretch(Scenario(faults=(fault_of(fault, generator.choice(sorted(pairs[fault]))),))) for fault in order]


def cell_stretches(
    graph: Graph, num: int, roles: Sequence[str], faults: Sequence[FaultName], phases: Sequence[Phase], seed: int
) -> list[Stretch]:
    """At least `num` faults that go through all cells in turn. The drain of the run is its end, so its cells come last, and once. Raises
    UserError when there is no cell."""
    generator, processes = random.Random(seed), processes_by_role(graph)
    cells = [(role, fault, phase) for phase in phases for fault in faults for role in roles if can_take(role, fault, phase)]
    if not cells:
        raise UserError(f"--phase {', '.join(phases)}: no process of {', '.join(roles)} takes {', '.join(faults)} then; {_HINT}")
    repeated = [cell for cell in cells if cell[2] != "drain"]
    stretches: list[Stretch] = []
    while repeated and sum(stretch.num_faults for stretch in stretches) < num:
        role, fault, phase = repeated[len(stretches) % len(repeated)]
        process = generator.choice(processes[role])
        groups = [name for name in processes.get("attention", ()) if name != process]
        first = process if phase == "start" else generator.choice(groups) if phase == "replay" and groups else None
        stretches.append(Stretch(Scenario(faults=(fault_of(fault, process, phase),)), phase, first))
    last = [fault_of(fault, generator.choice(processes[role])) for role, fault, phase in cells if phase == "drain"]
    hit: dict[str, AnyFault] = {fault.processes[0]: fault for fault in last}  # a process takes one fault while the run drains
    return [*stretches, Stretch(Scenario(faults=tuple(hit.values())), "drain")] if hit else stretches
