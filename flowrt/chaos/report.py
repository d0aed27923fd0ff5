"""Reports a chaos run: a table of figures with their targets, the outcome of each role, fault and phase, JSON, and the data of the plot."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import pairwise, product
from typing import Any, Literal, NamedTuple

from rich.console import Console

from flowrt.bench.report.figures import MIN_VALUES_OF_P99, Spread, Target, Verdict, nearest_rank, tail_interval, verdict_of
from flowrt.bench.report.report import Machine, new_table, print_notes
from flowrt.chaos import compare
from flowrt.chaos.cells import FAULTS, PHASES, can_take, fault_name, processes_by_role, role_of
from flowrt.chaos.compare import MAX_WAIT_SECONDS, Difference, ExpectedAnswer, MovedRequest, ReceivedAnswer, UsualTimes
from flowrt.chaos.measure import ChaosResult, expert_servers
from flowrt.chaos.observer import InjectedFault
from flowrt.graph.model import MONITOR
from flowrt.graph.numerics import is_exact, numerics_text
from flowrt.launcher import events
from flowrt.observe import duration_text

NOTICED_SECONDS, HUNG_SECONDS, MAX_STALL_SECONDS = 0.020, 1.2, 0.150  # targets, each of a 99th percentile
WITH_SPARE, OF_THE_REST = 0.98, 0.97  # of throughput: with spare capacity; without, of what the servers left could do
# Of the fields of a Difference behind `lost`.
DIFFERENCES = "tokens doubled", "tokens changed", "tokens out of order", "tokens after the end", "finish reasons or texts changed"
STANDSTILLS = ("pause", "stall", "hang")
MAX_LINES = 20
NOT_TRIED, IMPOSSIBLE = "-", "n/a"
MATRIX_NOTES = (
    "N ok: after N faults every answer was exact, none failed, and the process came back",
    "N bad: after N faults an answer was wrong or failed, or the process stayed down",
    f"{NOT_TRIED}, or no row: not tried; {IMPOSSIBLE}: such a process cannot take the fault then",
)


class Cell(NamedTuple):
    role: str
    fault: str
    phase: str


Outcomes = Counter[str]  # numbers of faults in one cell, by what came of them


@dataclass(frozen=True)
class ReportRow:
    """A figure with its target, where it has one. `verdict` "": no target, or no value to compare with it."""

    name: str
    shown: str
    target: str = ""
    verdict: Verdict | Literal[""] = ""
    values: dict[str, float] = field(default_factory=dict)  # the numbers behind `shown`


@dataclass
class ChaosReport:
    """`is_success`: no token is lost, doubled, changed or late, no request failed that had to succeed, all faults were injected, no process
    was lost without cause, and nothing is left behind."""

    machine: Machine
    rows: list[ReportRow]
    matrix: list[tuple[str, ...]]
    notes: list[str]
    is_success: bool
    details: dict[str, Any]

    def record(self) -> dict[str, Any]:
        """The report for `json_text`, which writes numbers that are not finite as null."""
        rows = [{"name": row.name, "shown": row.shown, "target": row.target, "verdict": row.verdict, **row.values} for row in self.rows]
        return {"benchmark": "chaos", "machine": self.machine, "figures": rows, "notes": self.notes, "details": self.details}


def report_of(found: ChaosResult, machine: Machine, tolerates_errors: bool = False) -> ChaosReport:
    """`tolerates_errors`: the plan allows requests to end with an error."""
    before = [answer for answer in found.answers if answer.ended <= found.faults_begun]
    under = [answer for answer in found.answers if answer.ended > found.faults_begun]
    expected, num_unsteady = compare.expected_of([*found.reference, *before])
    matrix = matrix_of(found, expected)
    differences = [compare.difference_of(expected[answer.number], answer) for answer in under if answer.number in expected]
    difference = Difference(*map(sum, zip(*differences, strict=True)))
    num_failed = sum(answer.failed for answer in found.answers)
    done = [injected for injected in found.injected_faults if not injected.missed]
    is_tried = bool(done and any(answer.tokens for answer in found.answers))
    without_cause = lost_without_cause(found)
    rows = [
        *_done(found, done),
        _count("requests failed", num_failed, f"of {len(found.answers)}", is_tried),
        _count("tokens lost", difference.lost, f"of {sum(len(answer.tokens) for answer in found.answers)}", is_tried),
        *(_count(name, count, is_tried=is_tried) for name, count in zip(DIFFERENCES, difference[1:], strict=True)),
        *_stalls(found, done),
        *_times(found, done),
        *_moves(found),
        *_throughput(found),
        *_memory(found),
        _count("processes lost without cause", len(without_cause)),
        _count("left behind", len(found.leaks)),
    ]
    fails = any(difference) or found.failure or found.not_back or without_cause or found.leaks or (num_failed and not tolerates_errors)
    is_success = not (found.interrupted or fails or len(done) < max(found.num_faults, len(found.injected_faults)))
    notes = _notes(found, num_unsteady, without_cause)
    return ChaosReport(machine, rows, matrix_rows(found, matrix), notes, is_success, _details(found) | {"matrix": _cells(found, matrix)})


def _notes(found: ChaosResult, num_unsteady: int, without_cause: Sequence[str]) -> list[str]:
    missed = Counter(f"{injected.text}: {injected.missed}" for injected in found.injected_faults if injected.missed)
    errors = dict.fromkeys(answer.error or "never ended" for answer in found.answers if answer.failed)
    down: dict[str, str] = {}
    for _, event in found.observer.seen:
        if isinstance(event, events.WorkerGivenUp):
            down[event.name] = event.why
        elif isinstance(event, events.WorkerRestarted):
            down.pop(event.name, None)
    more = "; use --set reliability.restarts=N"
    notes = [
        *[f"left behind: {line}" for line in found.leaks[:MAX_LINES]],
        *[f"not injected: {line}" + (f" ({num} times)" if num > 1 else "") for line, num in missed.items()][:MAX_LINES],
        *[f"{name} stayed down: {why}{more if 'was started again' in why else ''}" for name, why in down.items()],
        *[f"failed: {line}" for line in errors][:MAX_LINES],
        *[f"lost without cause: {name}" + (f" ({num} times)" if num > 1 else "") for name, num in Counter(without_cause).items()],
    ]
    if num_unsteady:
        notes.append(f"{num_unsteady} answers differed from the first of their kind before any fault: use --set numerics=strict")
    if not is_exact(found.graph):
        text = f"numerics are {numerics_text(found.graph)}: an answer may depend on which process computed it, and logprobs are left out"
        notes.append(f"{text}; {'make each role strict' if found.graph.role_numerics else 'use --set numerics=strict'}")
    if found.interrupted:
        notes.append("interrupted: this is the report so far")
    elif not found.num_faults:
        notes.append("no fault was planned")
    if (emulated := found.emulation) is not None:
        notes.append(f"emulated at dilation {emulated.dilation:g}: {emulated.num_computed} computations in modelled time")
        notes += emulated.sentences
    if found.failure is not None:
        notes.append(f"the run ended early: {found.failure}")
    return notes


def lost_without_cause(found: ChaosResult) -> list[str]:
    """The processes that were lost although no fault since their last loss must end them, or one that a policy restarts them with."""
    dead_seconds = found.graph.reliability.dead_seconds
    last: dict[str, float] = {}
    names = []
    for at, event in found.observer.seen:
        if isinstance(event, events.WorkerLost):
            since = last.get(event.name, -math.inf)
            faults = [injected for injected in found.injected_faults if injected.at > since]
            if not any(each.explains(each.process if event.is_restarting else event.name, at, dead_seconds) for each in faults):
                names.append(event.name)
            last[event.name] = at
    return names


def _count(name: str, count: int, more: str = "", is_tried: bool = True) -> ReportRow:
    """A count that must be 0. Without any fault, a 0 proves nothing."""
    verdict: Verdict = "not met" if count else "met" if is_tried else "undecided"
    return ReportRow(name, f"{count} {more}".strip(), "0", verdict, {"count": count})


def _done(found: ChaosResult, done: Sequence[InjectedFault]) -> list[ReportRow]:
    """How many of the planned faults were injected, and how many of the killed processes are back."""
    killed = [injected for injected in done if injected.kind == "crash"]
    num_back = sum(map(found.observer.has_returned, killed))
    wanted = max(found.num_faults, len(found.injected_faults))
    rows = [ReportRow("faults injected", f"{len(done)} of {wanted}", values={"count": len(done)})]
    if killed:
        verdict: Verdict = "met" if num_back == len(killed) else "undecided" if found.interrupted else "not met"
        rows.append(ReportRow("killed processes back", f"{num_back} of {len(killed)}", "all", verdict, {"count": num_back}))
    if len(done) > 1:
        intervals = [later.at - earlier.at for earlier, later in pairwise(done)]
        rows.append(_durations("time between two faults", intervals, None))
    return rows


def _stalls(found: ChaosResult, done: Sequence[InjectedFault]) -> list[ReportRow]:
    undisturbed = found.undisturbed
    usual = compare.usual_gaps([*found.reference, *undisturbed])
    stalls = compare.extra_stalls(found.answers, usual, sorted(injected.at for injected in done))
    noise = compare.extra_stalls(undisturbed, usual)
    kills = bool(done) and all(injected.kind == "crash" for injected in done)
    return [
        _durations("longest extra pause in answers hit by a fault", stalls, MAX_STALL_SECONDS if kills else None, len(done)),
        _durations("the same in answers without faults", noise, None),
    ]


def _times(found: ChaosResult, done: Sequence[InjectedFault]) -> list[ReportRow]:
    """Standstills shorter than dead_seconds are left out: they have no consequence."""
    observer, rows = found.observer, list[ReportRow]()
    servers, groups = set(expert_servers(found.graph)), set(processes_by_role(found.graph).get("attention", ()))
    up = [injected for injected in done if injected.phase != "start"]  # in a start, the peers do not use the process yet
    kills = [injected for injected in up if injected.kind == "crash"]
    long = [injected for injected in up if injected.kind in STANDSTILLS and injected.for_seconds >= found.graph.reliability.dead_seconds]

    def add(name: str, faults: Sequence[InjectedFault], seconds_of: Callable[[InjectedFault], float], bound: float | None = None) -> None:
        rows.append(_durations(name, list(map(seconds_of, faults)), bound))

    for injected_faults, name, bound in ((kills, "kill", NOTICED_SECONDS), (long, "standstill", HUNG_SECONDS)):
        if of_servers := [injected for injected in injected_faults if injected.process in servers]:
            add(f"{name} until no process uses the server", of_servers, observer.left_seconds, bound)
            add(f"{name} until the launcher notices", of_servers, observer.lost_seconds)
            add(f"{name} until the server is back", of_servers, observer.back_seconds)
        if of_groups := [injected for injected in injected_faults if injected.process in groups]:
            add(f"{name} until the requests of the group move", of_groups, observer.lost_seconds, bound)
            if servers:
                add(f"{name} until no expert server holds rows of the group", of_groups, observer.left_seconds, bound)
            add(f"{name} until the group is back", of_groups, observer.back_seconds)
    if monitors := [injected for injected in kills if injected.process == MONITOR]:
        add("kill until the monitor is back", monitors, observer.back_seconds)
    return rows


def _moved(found: ChaosResult) -> tuple[list[MovedRequest], dict[int, UsualTimes]]:
    usual = compare.usual_times([*found.reference, *found.undisturbed])
    moved = compare.moved_requests(found.answers, found.injected_faults, usual, found.graph.group_limits().chunk_tokens)
    return [each for each in moved if each.fault.phase != "start"], usual


def _moves(found: ChaosResult) -> list[ReportRow]:
    """Reports the requests that moved to other groups."""
    moved, usual = _moved(found)
    rows = []
    for name, kinds in (("kill", ("crash",)), ("standstill", STANDSTILLS)):
        of_kind = [each for each in moved if each.fault.kind in kinds]
        if not of_kind:
            continue
        num_faults = len({id(each.fault) for each in of_kind})
        rows += [
            _durations(f"{name} until the first token of a moved request", [each.seconds for each in of_kind], None, num_faults),
            _durations("of it: replay, at the usual speed", [each.replay_seconds for each in of_kind], None, num_faults),
            _durations("of it: extra stall", [each.stall_seconds for each in of_kind], MAX_STALL_SECONDS, num_faults),
        ]
        if name == "standstill":
            rows += _after_verdicts(found, {id(each.fault): each.fault for each in of_kind}.values(), of_kind, usual)
    return rows


def _after_verdicts(
    found: ChaosResult, faults: Collection[InjectedFault], moved: Sequence[MovedRequest], usual: Mapping[int, UsualTimes]
) -> list[ReportRow]:
    """No request waits for a group that was marked dead."""
    marked, lost, back = found.observer.marked_seconds, found.observer.lost_seconds, found.observer.back_seconds
    fenced = [fault for fault in faults if marked(fault) <= lost(fault) < math.inf]
    down = [(fault.at + lost(fault), fault.at + back(fault)) for fault in fenced]
    stalls = [each.stall_seconds for each in moved] + compare.stalls_of_new_requests(found.answers, down, usual)
    num_long = sum(stall > MAX_WAIT_SECONDS for stall in stalls)
    name = f"moved and new requests with extra stalls over {MAX_WAIT_SECONDS:g} s"
    text = f"of {len(stalls)}, worst {duration_text(max(stalls))}"
    delays = [lost(fault) - marked(fault) for fault in fenced]
    return [_durations("verdict until the requests of the group move", delays, MAX_WAIT_SECONDS), _count(name, num_long, text)]


def _memory(found: ChaosResult) -> list[ReportRow]:
    """Growth of the launching process, without the first fifth of the faults, in which caches fill."""
    if len(found.memory) < 2:
        return []
    (begun, before, record_before), (ended, after, record_after) = found.memory
    record = record_after - record_before
    grown = f"{(after - before - record) / 2**20:+.1f} MiB from fault {begun} to {ended}"
    shown = f"{grown}, and {record / 2**20:.1f} MiB for this command's record; {after / 2**20:.0f} MiB at the end"
    values: dict[str, float] = {"from_bytes": before, "to_bytes": after, "record_bytes": record}
    return [ReportRow("memory of the launching process", shown, values=values)]


def outcome_of(found: ChaosResult, injected: InjectedFault, expected: Mapping[int, ExpectedAnswer]) -> str:
    """`exact`, or the worst that came of the fault: `wrong` answers, `failed` requests, or a process that is `down`."""
    observer = found.observer
    back = observer.back_seconds(injected)
    until = injected.at + (back if back < math.inf else 0.0) + compare.STALL_SECONDS
    answers = [answer for answer in found.answers if answer.submitted <= until and answer.ended >= injected.at]
    if any(answer.number in expected and any(compare.difference_of(expected[answer.number], answer)) for answer in answers):
        return "wrong"
    if any(answer.failed for answer in answers):
        return "failed"
    return "down" if observer.must_return(injected) and not observer.has_returned(injected) else "exact"


def matrix_of(found: ChaosResult, expected: Mapping[int, ExpectedAnswer]) -> dict[Cell, Outcomes]:
    """The outcomes of every cell that was tried."""
    matrix: dict[Cell, Outcomes] = {}
    for injected in found.injected_faults:
        if not injected.missed and injected.phase:
            cell = Cell(role_of(found.graph, injected.process), fault_name(injected.kind), injected.phase)
            matrix.setdefault(cell, Counter())[outcome_of(found, injected, expected)] += 1
    return matrix


def matrix_rows(found: ChaosResult, matrix: Mapping[Cell, Outcomes]) -> list[tuple[str, ...]]:
    """A row of short texts for each role and fault that was tried, with a column for each phase."""
    tried = {(cell.role, cell.fault) for cell in matrix}
    roles = dict.fromkeys([*processes_by_role(found.graph), *(cell.role for cell in matrix)])
    faults = [*FAULTS, *sorted({cell.fault for cell in matrix} - set(FAULTS))]
    return [
        (role, fault, *(_text(role, fault, phase, matrix.get(Cell(role, fault, phase))) for phase in PHASES))
        for role in roles
        for fault in faults
        if (role, fault) in tried
    ]


def _text(role: str, fault: str, phase: str, outcomes: Outcomes | None) -> str:
    if outcomes is None:
        return NOT_TRIED if fault not in FAULTS or can_take(role, fault, phase) else IMPOSSIBLE
    num_bad = outcomes.total() - outcomes["exact"]
    return f"{num_bad} bad" if num_bad else f"{outcomes['exact']} ok"


def _cells(found: ChaosResult, matrix: Mapping[Cell, Outcomes]) -> list[dict[str, Any]]:
    """Every cell that a process of the graph can take, tried or not."""
    cells = [Cell(*each) for each in product(processes_by_role(found.graph), FAULTS, PHASES) if can_take(*each)]
    tried = {cell: {"tried": True, "exact": 0, **outcomes} for cell, outcomes in matrix.items()}
    return [cell._asdict() | tried.get(cell, {"tried": False}) for cell in dict.fromkeys([*cells, *matrix])]


def _durations(name: str, seconds: Sequence[float], bound: float | None, num_faults: int | None = None) -> ReportRow:
    """p50, p99 and the worst, as far as there are enough values. A target holds for the p99 and is decided by its interval.

    What never happened took infinitely long. `num_faults` when several values come of one fault.
    """
    finite = [each for each in seconds if math.isfinite(each)]
    num_never = len(seconds) - len(finite)
    target = f"p99 <= {duration_text(bound)}" if bound is not None else ""
    low, high = tail_interval(seconds, len(seconds) if num_faults is None else num_faults)
    verdict: Verdict | Literal[""] = verdict_of(low, high, Target(bound)) if bound is not None and seconds else ""
    values: dict[str, float] = {"num": len(finite), "num_never": num_never}
    if not finite:
        return ReportRow(name, f"never, of {num_never}" if seconds else "-", target, verdict, values)
    values["max_seconds"] = max(finite)
    parts = []
    if len(finite) > 1:
        values["p50_seconds"] = nearest_rank(finite, 0.5)
        parts.append(f"p50 {duration_text(values['p50_seconds'])}")
    if len(finite) >= MIN_VALUES_OF_P99:
        values |= {"p99_seconds": nearest_rank(finite, 0.99), "p99_low_seconds": low, "p99_high_seconds": high}
        parts.append(f"p99 {duration_text(values['p99_seconds'])}")
    parts.append(f"worst {duration_text(max(finite))} of {len(finite)}" if len(finite) > 1 else f"{duration_text(finite[0])} (one value)")
    shown = ", ".join(parts) + (f"; {num_never} never" if num_never else "")
    return ReportRow(name, shown, target, verdict, values)


def _throughput(found: ChaosResult) -> list[ReportRow]:
    times = compare.token_times(found.answers)
    rates = [(under, usual) for under, usual in (pair.rates(times) for pair in found.stretches) if usual > 0]
    if not rates:  # interrupted before there was anything to compare
        return []
    under, usual, ratio = (Spread.of(values) for values in zip(*[(one, other, one / other) for one, other in rates], strict=True))
    least = min(one / other for one, other in rates)
    seconds = nearest_rank([pair.ended - pair.faults_begun for pair in found.stretches], 0.5)
    between = f" ({ratio.low:.3f} to {ratio.high:.3f})" if math.isfinite(ratio.low) else ""
    several = f"median {ratio.median:.3f}{between}, least {least:.3f} of {ratio.count}"
    shown = several if len(rates) > 1 else f"{ratio.median:.3f} (one value)"
    bound = WITH_SPARE if found.has_spare else OF_THE_REST * (found.num_servers - 1) / max(1, found.num_servers)
    why = "with spare servers" if found.has_spare else f"{found.num_servers - 1} of {found.num_servers} servers"
    is_void = found.emulation is not None and found.emulation.void
    verdict: Verdict = "undecided" if is_void else verdict_of(ratio.low, ratio.high, Target(bound, at_most=False))
    values = {"median": ratio.median, "low": ratio.low, "high": ratio.high, "least": least, "num": ratio.count, "stretch_seconds": seconds}
    return [
        ReportRow("tokens per second without faults", f"{usual.median:.1f}", values={"tokens_per_second": usual.median}),
        ReportRow("tokens per second with faults", f"{under.median:.1f}", values={"tokens_per_second": under.median}),
        ReportRow("throughput with faults, relative to without", shown, f">= {bound:.3f} ({why})", verdict, values),
    ]


def _details(found: ChaosResult) -> dict[str, Any]:
    def since(at: float) -> float:
        return round(at - found.begun, 4)

    def request(answer: ReceivedAnswer) -> dict[str, Any]:
        return {"number": answer.number, "submitted": since(answer.submitted), "tokens": len(answer.tokens), "error": answer.error}

    seen = found.observer.seen
    return {
        "interrupted": found.interrupted,
        "numerics": numerics_text(found.graph),
        "expert_servers": found.num_servers,
        "seconds": since(found.ended),
        "faults": found.observer.as_json(found.begun),
        "bin_seconds": compare.BIN_SECONDS,
        "tokens_per_second": [round(rate, 1) for rate in compare.curve(found.answers, found.begun, found.ended)],
        "stretches": [[since(at) for at in pair] for pair in found.stretches],
        "events": [{"at_seconds": since(at), "event": type(event).__name__, **asdict(event)} for at, event in seen],
        "requests": [request(answer) for answer in found.answers if answer.failed],
        "moved": [[*map(partial(round, ndigits=5), each[1:]), since(each.fault.at), each.fault.process] for each in _moved(found)[0]],
        "before": found.before,
        "after": found.after,
        "leaks": found.leaks,
        "failure": found.failure,
    }


def print_report(report: ChaosReport, console: Console) -> None:
    rows = [(row.name, row.shown, row.target, row.verdict) for row in report.rows]
    console.print(new_table("flowrt chaos", "figure", "found", "target", "verdict", rows=rows))
    if report.matrix:
        table = new_table("role, fault and phase", "role", "fault", *PHASES, rows=report.matrix)
        table.padding = (0, 1, 0, 0)  # 60 columns hold it
        console.print(table)
        for line in MATRIX_NOTES:
            console.print(line, markup=False)
    notes = list(report.notes)
    if any(row.verdict == "undecided" for row in report.rows):
        notes.append("undecided: there are too few values, or their 95 % interval lies on both sides of the target")
    print_notes(console, notes, report.machine)
