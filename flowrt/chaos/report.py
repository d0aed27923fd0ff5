"""What a run with chaos found, as a table with the targets, as JSON, and as the data of the picture.

Here: Row, Report, `report_of`, `print_report`. Not here: measuring (measure.py), counting (compare.py), drawing (plot.py).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from rich.console import Console
from rich.table import Table

from flowrt.bench.report.figures import Target, Verdict, judge, median_interval, quantile_interval
from flowrt.bench.report.report import Machine
from flowrt.chaos import compare
from flowrt.chaos.compare import Difference, Told
from flowrt.chaos.measure import Found, expert_servers
from flowrt.chaos.watch import Deed, Watch
from flowrt.graph.model import MONITOR
from flowrt.launcher import events
from flowrt.observe import duration_text

NOTICED_SECONDS, HUNG_SECONDS, STALL_SECONDS = 0.020, 1.2, 0.150  # targets, each of a 99th percentile
WITH_SPARE, OF_THE_REST = 0.98, 0.97  # of throughput: with spare capacity; without, of what the servers left could do
MIN_FAULTS = 6  # of a verdict on times: fewer bound not even a median
MIN_OF_P99 = 100  # values; of fewer the 99th percentile is the worst
STANDSTILLS = ("pause", "stall", "hang")
MAX_LINES = 20


@dataclass(frozen=True)
class Row:
    """A figure with its target, where it has one. `verdict` "": no target, or nothing to hold against it."""

    name: str
    shown: str
    target: str = ""
    verdict: Verdict | Literal[""] = ""
    values: dict[str, float] = field(default_factory=dict)  # the numbers behind `shown`


@dataclass
class Report:
    """`answers_right`: no token lost, doubled, changed or late, and no request failed that was to be answered."""

    machine: Machine
    rows: list[Row]
    notes: list[str]
    answers_right: bool
    details: dict[str, Any]

    def as_json(self) -> dict[str, Any]:
        rows = [
            {"name": row.name, "shown": row.shown, "target": row.target, "verdict": row.verdict, **_finite(row.values)} for row in self.rows
        ]
        return {"benchmark": "chaos", "machine": vars(self.machine), "figures": rows, "notes": self.notes, "details": self.details}


def report_of(found: Found, machine: Machine, tolerates_errors: bool = False) -> Report:
    """`tolerates_errors`: the plan says that requests may end in an error."""
    watch = found.watch
    assert watch is not None
    expected, num_unsteady = compare.expected_of(found.undisturbed)
    difference = Difference()
    for told in found.told:
        if told.number in expected:
            difference += compare.difference_of(expected[told.number], told)
    num_failed = sum(told.failed for told in found.told)
    done = [deed for deed in found.deeds if not deed.missed]
    is_tried = bool(done and any(told.tokens for told in found.told))
    rows = [
        *_done(found, done),
        _count("requests failed", num_failed, f"of {len(found.told)}", is_tried),
        _count("tokens lost", difference.lost, f"of {sum(len(told.tokens) for told in found.told)}", is_tried),
        _count("tokens doubled", difference.doubled, is_tried=is_tried),
        _count("tokens changed", difference.changed, is_tried=is_tried),
        _count("tokens out of order", difference.swapped, is_tried=is_tried),
        _count("tokens after the end", difference.late, is_tried=is_tried),
        *_stalls(found, done),
        *_times(found, done),
        *_throughput(found, done),
        _count("processes lost without cause", len(lost_without_cause(found))),
        _count("left behind", len(found.leaks)),
    ]
    notes = [f"left behind: {line}" for line in found.leaks[:MAX_LINES]]
    missed = Counter(f"{deed.text}: {deed.missed}" for deed in found.deeds if deed.missed)
    notes += [f"could not be done: {line}" + (f" ({num} times)" if num > 1 else "") for line, num in missed.items()][:MAX_LINES]
    down: dict[str, str] = {}
    for _, event in watch.seen:
        if isinstance(event, events.WorkerGivenUp):
            down[event.name] = event.why
        elif isinstance(event, events.WorkerRestarted):
            down.pop(event.name, None)
    more = "; use --set reliability.restarts=N"
    notes += [f"{name} stayed down: {why}{more if 'was started again' in why else ''}" for name, why in down.items()]
    notes += [f"failed: {line}" for line in dict.fromkeys(told.error or "never ended" for told in found.told if told.failed)][:MAX_LINES]
    if num_unsteady:
        notes.append(f"{num_unsteady} answers differed from the first of their kind before any fault: use --set numerics=strict")
    if found.graph.numerics != "strict":
        notes.append("numerics are fast: an answer may depend on which server computed it; use --set numerics=strict")
    if found.interrupted:
        notes.append("interrupted: this is what was seen until then")
    elif not found.num_faults:
        notes.append("no fault was to befall anybody: this says nothing about faults")
    if (emulated := found.emulation) is not None:
        notes.append(f"emulated at dilation {emulated.dilation:g}: {emulated.num_computed} computations in modelled time")
        notes += emulated.sentences
    if found.failure is not None:
        notes.append(f"the run ended before its time: {found.failure}")
    right = not (found.interrupted or difference.any or found.failure or found.not_back or (num_failed and not tolerates_errors))
    return Report(machine, rows, notes, right, _details(found, watch))


def lost_without_cause(found: Found) -> list[str]:
    """Who was lost though nothing had befallen it, since it was last lost, that need end a process."""
    assert found.watch is not None
    dead_seconds = found.graph.reliability.dead_seconds
    last: dict[str, float] = {}
    names = []
    for at, event in found.watch.seen:
        if isinstance(event, events.WorkerLost):
            since = last.get(event.name, -math.inf)
            if not any(deed.at > since and deed.explains(event.name, at, dead_seconds) for deed in found.deeds):
                names.append(event.name)
            last[event.name] = at
    return names


def _count(name: str, count: int, more: str = "", is_tried: bool = True) -> Row:
    """What must not be. Where nothing befell anybody, that there is none says nothing."""
    verdict: Verdict = "not met" if count else "met" if is_tried else "open"
    return Row(name, f"{count} {more}".strip(), "0", verdict, {"count": count})


def _done(found: Found, done: Sequence[Deed]) -> list[Row]:
    """How much of what was to be done was done, and whether those that were killed are back."""
    assert found.watch is not None
    killed = [deed for deed in done if deed.kind == "crash"]
    num_back = sum(found.watch.back_seconds(deed) < math.inf for deed in killed)
    wanted = max(found.num_faults, len(found.deeds))
    rows = [Row("faults carried out", f"{len(done)} of {wanted}", values={"count": len(done)})]
    if killed:
        verdict: Verdict = "met" if num_back == len(killed) else "open" if found.interrupted else "not met"
        rows.append(Row("killed processes back", f"{num_back} of {len(killed)}", "all", verdict, {"count": num_back}))
    return rows


def _stalls(found: Found, done: Sequence[Deed]) -> list[Row]:
    usual = compare.usual_gaps(found.undisturbed)
    stalls = compare.extra_stalls(found.told, usual, [deed.at for deed in done])
    noise = compare.extra_stalls(found.undisturbed, usual)
    kills = bool(done) and all(deed.kind == "crash" for deed in done)
    return [
        _durations("extra stall of requests met by a fault", stalls, STALL_SECONDS if kills else None, len(done)),
        _durations("the same where nothing befell", noise, None),
    ]


def _times(found: Found, done: Sequence[Deed]) -> list[Row]:
    """A standstill shorter than the detector waits is none of this: nobody is to notice."""
    watch, rows = found.watch, []
    assert watch is not None
    servers = set(expert_servers(found.graph))  # the death of any other process but the monitor's ends the run
    kills = [deed for deed in done if deed.kind == "crash" and deed.process in servers]
    monitors = [deed for deed in done if deed.kind == "crash" and deed.process == MONITOR]
    long = [deed for deed in done if deed.kind in STANDSTILLS and deed.for_seconds >= found.graph.reliability.dead_seconds]
    for deeds, name, bound in ((kills, "kill", NOTICED_SECONDS), (long, "standstill", HUNG_SECONDS)):
        if deeds:
            rows.append(_durations(f"{name} to no client using it", [watch.left_seconds(deed) for deed in deeds], bound))
            rows.append(_durations(f"{name} to the launcher's knowing", [watch.lost_seconds(deed) for deed in deeds], None))
            rows.append(_durations(f"{name} to its return", [watch.back_seconds(deed) for deed in deeds], None))
    if monitors:
        rows.append(_durations("the monitor's death to its return", [watch.back_seconds(deed) for deed in monitors], None))
    return rows


def _durations(name: str, seconds: Sequence[float], bound: float | None, num_faults: int | None = None) -> Row:
    """p50, p99 and the worst, as far as there are enough values to speak of them; a target is for the p99, and judged by its interval.

    What never happened took infinitely long. `num_faults` when several values come of one fault.
    """
    finite = [each for each in seconds if math.isfinite(each)]
    target = f"p99 <= {duration_text(bound)}" if bound is not None else ""
    enough = (len(seconds) if num_faults is None else num_faults) >= MIN_FAULTS
    low, high = quantile_interval(seconds, 0.99) if enough else (-math.inf, math.inf)
    verdict: Verdict | Literal[""] = judge(low, high, Target(bound)) if bound is not None and seconds else ""
    if not finite:
        return Row(name, f"never, of {len(seconds)}" if seconds else "-", target, verdict, {"num": len(finite), "num_never": len(seconds)})
    values = {"num": float(len(finite)), "num_never": float(len(seconds) - len(finite)), "max_seconds": max(finite)}
    parts = []
    if len(finite) > 1:
        values["p50_seconds"] = compare.percentile(finite, 0.5)
        parts.append(f"p50 {duration_text(values['p50_seconds'])}")
    if len(finite) >= MIN_OF_P99:
        values |= {"p99_seconds": compare.percentile(finite, 0.99), "p99_low_seconds": low, "p99_high_seconds": high}
        parts.append(f"p99 {duration_text(values['p99_seconds'])}")
    parts.append(f"worst {duration_text(max(finite))} of {len(finite)}" if len(finite) > 1 else f"{duration_text(finite[0])} (one value)")
    shown = ", ".join(parts) + (f"; {len(seconds) - len(finite)} never" if len(finite) < len(seconds) else "")
    return Row(name, shown, target, verdict, values)


def _throughput(found: Found, done: Sequence[Deed]) -> list[Row]:
    usual = compare.throughput(found.undisturbed, *found.undisturbed_span)
    under = compare.throughput(found.told, found.begun, found.ended)
    if not usual > 0 or not under > 0:  # broken off before there was anything to compare
        return []
    ratio = under / usual
    rows = [
        Row("tokens per second, undisturbed", f"{usual:.1f}", values={"tokens_per_second": usual}),
        Row("tokens per second, with faults", f"{under:.1f} ({ratio:.3f})", values={"tokens_per_second": under, "ratio": ratio}),
    ]
    assert found.watch is not None
    faults = sorted((deed.at, deed.at + found.watch.back_seconds(deed)) for deed in done)
    windows = compare.windows(found.told, faults, found.begun, found.ended)
    if not windows:
        return rows
    seconds = compare.percentile([window.seconds for window in windows], 0.5)
    to_before = [window.after / window.before for window in windows if window.before > 0]
    if 2 * len(to_before) < len(windows):
        to_before = []  # of too few to speak for all
    to_usual = [window.after / usual for window in windows]
    name = f"throughput in {seconds:.1f} s after a fault"
    named = ((f"{name}, to before it", to_before), (f"{name}, to undisturbed", to_usual))
    bound = WITH_SPARE if found.has_spare else OF_THE_REST * (found.num_servers - 1) / max(1, found.num_servers)
    why = "with spare capacity" if found.has_spare else f"of {found.num_servers} servers without spare capacity"
    for name, ratios in named:
        if ratios:
            median, least = compare.percentile(ratios, 0.5), min(ratios)
            low, high = median_interval(ratios)
            between = f" ({low:.3f} to {high:.3f})" if math.isfinite(low) else ""
            shown = f"median {median:.3f}{between}, least {least:.3f} of {len(ratios)}" if len(ratios) > 1 else f"{median:.3f} (one value)"
            told = {"median": median, "low": low, "high": high, "least": least, "num": len(ratios), "window_seconds": seconds}
            held = ratios is to_before or not to_before  # a machine's other load changes less within seconds
            target = f">= {bound:.3f}, {why}" if held else ""
            void = found.emulation is not None and found.emulation.void
            verdict: Verdict = "open" if void else judge(low, high, Target(bound, at_most=False))
            rows.append(Row(name, shown, target, verdict if held else "", told))
    return rows


def _details(found: Found, watch: Watch) -> dict[str, Any]:
    def since(at: float) -> float | None:
        return round(at - found.begun, 4) if math.isfinite(at) else None

    faults = [
        {
            "fault": deed.text,
            "seconds": since(deed.at),
            "pid": deed.pid,
            "missed": deed.missed or None,
            "left_seconds": _number(watch.left_seconds(deed)),
            "lost_seconds": _number(watch.lost_seconds(deed)),
            "back_seconds": _number(watch.back_seconds(deed)),
        }
        for deed in found.deeds
    ]
    return {
        "interrupted": found.interrupted,
        "numerics": found.graph.numerics,
        "expert_servers": found.num_servers,
        "seconds": since(found.ended),
        "faults": faults,
        "bin_seconds": compare.BIN_SECONDS,
        "tokens_per_second": [round(rate, 1) for rate in compare.curve(found.told, found.begun, found.ended)],
        "undisturbed_tokens_per_second": [round(rate, 1) for rate in compare.curve(found.undisturbed, *found.undisturbed_span)],
        "events": [{"at_seconds": since(at), "event": type(event).__name__, **_plain(event)} for at, event in watch.seen],
        "requests": [_request(told, found.begun) for told in found.told if told.failed],
        "before": {name: holding.as_json() for name, holding in found.before.items()},
        "after": {name: holding.as_json() for name, holding in found.after.items()},
        "leaks": found.leaks,
        "failure": found.failure,
    }


def _request(told: Told, begun: float) -> dict[str, Any]:
    return {"number": told.number, "submitted": round(told.submitted - begun, 4), "tokens": len(told.tokens), "error": told.error}


def _plain(event: Any) -> dict[str, Any]:
    return {name: value if isinstance(value, int | float | str) else str(value) for name, value in asdict(event).items()}


def _number(seconds: float) -> float | None:
    return round(seconds, 5) if math.isfinite(seconds) else None


def _finite(values: dict[str, float]) -> dict[str, float | None]:
    return {name: value if math.isfinite(value) else None for name, value in values.items()}


def print_report(report: Report, console: Console) -> None:
    table = Table(title="flowrt chaos", title_justify="left", box=None, pad_edge=False)
    for heading in ("figure", "found", "target", "verdict"):
        table.add_column(heading, overflow="fold")
    for row in report.rows:
        table.add_row(row.name, row.shown, row.target, row.verdict)
    console.print(table)
    for note in report.notes:
        console.print(f"note: {note}", markup=False)
    console.print(str(report.machine), markup=False)
