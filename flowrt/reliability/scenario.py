"""Scenarios: which faults befall which process when, the same for simulated and for real processes. Pure.

Here: the kinds of fault, Scenario, `scenario_of` (plain values, as read from YAML, to a checked scenario) and its inverse `to_values`.
Not here: reading a file (flowrt/graph/scenario_file.py), doing a fault (flowrt/simulation/faults.py for virtual time), what must hold
afterwards (flowrt/simulation/invariants.py). Fault classes are those of the failure model (F1 to F15) in docs/simulation.md.

Times count from the first request. A fault with `for_seconds` heals by itself; a crash does not.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from typing import Annotated, Any, Literal

import msgspec

from flowrt.errors import UserError

MAX_FAULTS = 1000
MAX_SECONDS = 24 * 3600.0
PERMANENT_SECONDS = 3600.0  # a standstill of at least this is permanent: a recovery must not wait for its end

_Seconds = Annotated[float, msgspec.Meta(ge=0, le=MAX_SECONDS)]
_Duration = Annotated[float, msgspec.Meta(gt=0, le=MAX_SECONDS)]
_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=200)]
_Factor = Annotated[float, msgspec.Meta(gt=1, le=1e6)]
_OneIn = Annotated[int, msgspec.Meta(ge=1, le=1_000_000)]


class Fault(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="fault", omit_defaults=True):
    """Root of all faults; `fault:` in a file names the kind."""

    at_seconds: _Seconds = 0.0

    @property
    def heals(self) -> bool:
        """Whether everything works again afterwards without a recovery."""
        return True

    @property
    def kind(self) -> str:
        return str(self.__struct_config__.tag)

    @property
    def processes(self) -> tuple[str, ...]:
        """Whom it befalls."""
        return ()

    @property
    def ends_seconds(self) -> float:
        """When it is over, from the first request."""
        return self.at_seconds


class _OfProcess(Fault, frozen=True, kw_only=True):
    process: _Name

    @property
    def processes(self) -> tuple[str, ...]:
        return (self.process,)


class _OfProcessForATime(_OfProcess, frozen=True, kw_only=True):
    for_seconds: _Duration

    @property
    def ends_seconds(self) -> float:
        return self.at_seconds + self.for_seconds


class _OfLink(Fault, frozen=True, kw_only=True):
    between: tuple[_Name, _Name]

    @property
    def processes(self) -> tuple[str, ...]:
        return self.between


class _OfLinkForATime(_OfLink, frozen=True, kw_only=True):
    for_seconds: _Duration

    @property
    def ends_seconds(self) -> float:
        return self.at_seconds + self.for_seconds


class Crash(_OfProcess, frozen=True, kw_only=True, tag="crash"):
    """kill -9, or a power cut: nothing of the process runs any more, no `finally` (F1)."""

    @property
    def heals(self) -> bool:
        return False


class _Standstill(_OfProcessForATime, frozen=True, kw_only=True):
    @property
    def heals(self) -> bool:
        return self.for_seconds < PERMANENT_SECONDS


class Pause(_Standstill, frozen=True, kw_only=True, tag="pause"):
    """SIGSTOP, then SIGCONT: loop and compute thread stand still (F2)."""


class Stall(_Standstill, frozen=True, kw_only=True, tag="stall"):
    """The loop is blocked, the compute thread goes on (F2)."""


class Hang(_Standstill, frozen=True, kw_only=True, tag="hang"):
    """The compute thread stands still, the loop goes on (F2)."""


class Slow(_OfProcessForATime, frozen=True, kw_only=True, tag="slow"):
    """Computing takes `factor` times as long (F3)."""

    factor: _Factor


class SlowLink(_OfLinkForATime, frozen=True, kw_only=True, tag="slow_link"):
    """Frames between the two take `factor` times as long, both ways (F3)."""

    factor: _Factor


class Cut(_OfLinkForATime, frozen=True, kw_only=True, tag="cut"):
    """A partition (F5). `direction`: `there` stops what the first of `between` sends, `back` what the second sends. What was sent
    meanwhile arrives when it heals."""

    direction: Literal["both", "there", "back"] = "both"


class Reset(_OfLink, frozen=True, kw_only=True, tag="reset"):
    """The connections between the two are lost, with all that was on its way (F4)."""

    @property
    def heals(self) -> bool:
        return False


class Duplicate(_OfLinkForATime, frozen=True, kw_only=True, tag="duplicate"):
    """One message in `one_in` arrives twice, as when a sender tries again (F4)."""

    one_in: _OneIn = 2


class Skew(_OfProcess, frozen=True, kw_only=True, tag="skew"):
    """The process's clock runs `rate` times as fast from now on (F14)."""

    rate: Annotated[float, msgspec.Meta(gt=0, le=100)]


class TinyQueues(_OfProcess, frozen=True, kw_only=True, tag="tiny_queues"):
    """Channels of the process hold a single message each (F8); from its start, whatever `at_seconds` says."""


class RollBack(_OfProcess, frozen=True, kw_only=True, tag="roll_back"):
    """The group of an attention worker drops its running steps and begins a new epoch, as a recovery will make it do. What the old
    epoch still sends must change nothing (I2)."""


AnyFault = Crash | Pause | Stall | Hang | Slow | SlowLink | Cut | Reset | Duplicate | Skew | TinyQueues | RollBack
KINDS: tuple[str, ...] = tuple(str(kind.__struct_config__.tag) for kind in AnyFault.__args__)


class Scenario(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """`expect`: what must come of it. `tokens`: every request its right tokens; `tokens_or_error`: that, or an error that names who
    failed, within `deadline_seconds` of the fault, and nothing left behind. Default: what the faults allow (invariants.py)."""

    scenario: Literal[1] = 1  # the version of this format
    faults: Annotated[tuple[AnyFault, ...], msgspec.Meta(max_length=MAX_FAULTS)] = ()
    expect: Literal["tokens", "tokens_or_error"] | None = None
    deadline_seconds: _Duration = 30.0

    @property
    def ends_seconds(self) -> float:
        """When the last fault is over, but for those that are permanent."""
        return max((fault.ends_seconds if fault.heals else fault.at_seconds for fault in self.faults), default=0.0)


Place = tuple[str | int, ...]
_PATH = re.compile(r"^(?P<text>.*?)(?: - at `\$?(?P<path>.*)`)?$", re.DOTALL)
_STEP = re.compile(r"\.?([^.\[\]]+)")


_SUCH_AS = {
    "process": "experts.1",
    "between": "[attention.0, experts.1]",
    "at_seconds": "2.5",
    "for_seconds": "0.5",
    "factor": "5",
    "rate": "1.5",
    "one_in": "2",
    "direction": "there",
}
_WHOLE = "a file holds scenario: 1, faults: [...], and may hold expect: tokens or tokens_or_error, and deadline_seconds"
_TYPES = {"`float`": "a number", "`int`": "a whole number", "`str`": "a text", "`array`": "a list", "`object`": "a mapping"}


def written(kind: str) -> str:
    """A fault of the kind with all its keys, as a scenario file has it: what is said with an error."""
    fields = next(each.__struct_fields__ for each in AnyFault.__args__ if each.__struct_config__.tag == kind)
    keys = sorted(fields, key=list(_SUCH_AS).index)
    return "such as {" + ", ".join([f"fault: {kind}", *(f"{key}: {_SUCH_AS[key]}" for key in keys)]) + "}"


def scenario_of(
    value: Any,
    where: Callable[[Place], str],
    processes: Collection[str] | None = None,
    example: Callable[[str], str] = written,
    kinds: Sequence[str] = KINDS,
) -> Scenario:
    """The scenario that plain values (dict, list, str, int, float) describe. `where(path)` names a place in the file, as FILE:LINE.

    `processes`: the names that may be given; None, any. `example(kind)` shows how such a fault is written, `kinds` are those to
    propose. Raises UserError, one line: what, where, what would be right.
    """
    if not isinstance(value, dict) or "scenario" not in value:
        raise UserError(f"{where(())}: no scenario file; begin it with the line scenario: 1")
    faults = value.get("faults")
    for number, fault in enumerate(faults if isinstance(faults, list) else ()):
        kind = fault.get("fault") if isinstance(fault, dict) else None
        if kind not in KINDS:
            path = ("faults", number, "fault") if isinstance(fault, dict) and "fault" in fault else ("faults", number)
            raise UserError(f"{where(path)}: faults.{number}: {_kind_text(kind)}; one of: {', '.join(kinds)}")
    try:
        scenario = msgspec.convert(value, Scenario)
    except msgspec.ValidationError as error:
        found = _PATH.match(str(error))
        text, dotted = (found["text"], found["path"] or "") if found else (str(error), "")
        steps: Place = tuple(int(step) if step.isdigit() else step for step in _STEP.findall(dotted))
        remedy = example(faults[steps[1]]["fault"]) if isinstance(faults, list) and len(steps) > 1 and isinstance(steps[1], int) else _WHOLE
        wrong = f"{_in_words(text)}; {remedy}"
        raise UserError(": ".join(part for part in (where(steps), ".".join(map(str, steps)), wrong) if part)) from None
    for number, each in enumerate(scenario.faults):
        for name in each.processes:
            if processes is not None and name not in processes:
                known = ", ".join(sorted(processes))
                raise UserError(f"{where(('faults', number))}: faults.{number}: no process is called {name!r}; there are {known}")
        if len(set(each.processes)) < len(each.processes):
            raise UserError(f"{where(('faults', number))}: faults.{number}: between needs two different processes")
    return scenario


def to_values(scenario: Scenario) -> dict[str, Any]:
    """Plain values that `scenario_of` reads as this scenario; what is default is left out."""
    values: dict[str, Any] = msgspec.to_builtins(scenario)
    return {"scenario": 1, **values}


def _kind_text(kind: object) -> str:
    return "names no fault (fault: crash)" if kind is None else f"fault {str(kind)[:40]!r} is unknown"


def _in_words(text: str) -> str:
    """What the validator says, for people who write files."""
    for one, other in _TYPES.items():
        text = text.replace(one, other)
    text = re.sub(r"^Object missing required field `(.*)`$", r"`\1` is missing", text)
    text = re.sub(r"^Object contains unknown field `(.*)`$", r"`\1` is no key of it", text)
    return " ".join((text[:1].lower() + text[1:]).split())
