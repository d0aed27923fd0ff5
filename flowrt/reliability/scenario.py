"""Defines scenarios: which fault hits which process at which time, for simulated and for real processes. Pure.

`scenario_of` converts plain values, as read from YAML, into a checked scenario; flowrt/graph/scenario_file.py reads files. The fault
classes are those of the failure model (F1 to F15) in docs/simulation.md.

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
PERMANENT_SECONDS = 3600.0  # a standstill of at least this length is permanent: a recovery must not wait for its end

_Seconds = Annotated[float, msgspec.Meta(ge=0, le=MAX_SECONDS)]
_Duration = Annotated[float, msgspec.Meta(gt=0, le=MAX_SECONDS)]
_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=200)]
_Factor = Annotated[float, msgspec.Meta(gt=1, le=1e6)]
_OneIn = Annotated[int, msgspec.Meta(ge=1, le=1_000_000)]


class Fault(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="fault", omit_defaults=True):
    """Base of all faults; the key `fault:` in a file names the kind."""

    at_seconds: _Seconds = 0.0

    @property
    def heals(self) -> bool:
        """Whether everything works after the end of the fault without a recovery."""
        return True

    @property
    def kind(self) -> str:
        return str(self.__struct_config__.tag)

    @property
    def processes(self) -> tuple[str, ...]:
        """The processes that the fault hits."""
        return ()

    @property
    def ends_seconds(self) -> float:
        """The end of the fault, in seconds from the first request."""
        duration: float = getattr(self, "for_seconds", 0.0)
        return self.at_seconds + duration


class _OfProcess(Fault, frozen=True, kw_only=True):
    process: _Name

    @property
    def processes(self) -> tuple[str, ...]:
        return (self.process,)


class _OfProcessForATime(_OfProcess, frozen=True, kw_only=True):
    for_seconds: _Duration


class _OfLink(Fault, frozen=True, kw_only=True):
    between: tuple[_Name, _Name]

    @property
    def processes(self) -> tuple[str, ...]:
        return self.between


class _OfLinkForATime(_OfLink, frozen=True, kw_only=True):
    for_seconds: _Duration


class Crash(_OfProcess, frozen=True, kw_only=True, tag="crash"):
    """kill -9, or a power cut: no code of the process runs any more, not even `finally` (F1)."""

    @property
    def heals(self) -> bool:
        return False


class _Standstill(_OfProcessForATime, frozen=True, kw_only=True):
    @property
    def heals(self) -> bool:
        return self.for_seconds < PERMANENT_SECONDS


class Pause(_Standstill, frozen=True, kw_only=True, tag="pause"):
    """SIGSTOP, then SIGCONT: event loop and compute thread stop (F2)."""


class Stall(_Standstill, frozen=True, kw_only=True, tag="stall"):
    """The event loop is blocked; the compute thread continues (F2)."""


class Hang(_Standstill, frozen=True, kw_only=True, tag="hang"):
    """The compute thread stops; the event loop continues (F2)."""


class Slow(_OfProcessForATime, frozen=True, kw_only=True, tag="slow"):
    """Computation takes `factor` times as long (F3)."""

    factor: _Factor


class SlowLink(_OfLinkForATime, frozen=True, kw_only=True, tag="slow_link"):
    """Frames between the two processes take `factor` times as long, in both directions (F3)."""

    factor: _Factor


class Cut(_OfLinkForATime, frozen=True, kw_only=True, tag="cut"):
    """A network partition (F5). `direction`: `there` stops frames from the first of `between`, `back` frames from the second. Frames sent
    during the cut arrive when it heals."""

    direction: Literal["both", "there", "back"] = "both"

    @property
    def heals(self) -> bool:
        return self.for_seconds < PERMANENT_SECONDS


class Reset(_OfLink, frozen=True, kw_only=True, tag="reset"):
    """The connections between the two processes are lost, with all messages in flight (F4)."""

    @property
    def heals(self) -> bool:
        return False


class Duplicate(_OfLinkForATime, frozen=True, kw_only=True, tag="duplicate"):
    """One message in `one_in` arrives twice, as after a retry of the sender (F4)."""

    one_in: _OneIn = 2


class Skew(_OfProcess, frozen=True, kw_only=True, tag="skew"):
    """The process's clock runs `rate` times as fast from now on (F14)."""

    rate: Annotated[float, msgspec.Meta(gt=0, le=100)]


class TinyQueues(_OfProcess, frozen=True, kw_only=True, tag="tiny_queues"):
    """Each channel of the process holds a single message (F8), from its start; `at_seconds` is ignored."""


class RollBack(_OfProcess, frozen=True, kw_only=True, tag="roll_back"):
    """The group of an attention worker drops its running steps and begins a new epoch, as a recovery does. Messages of the old epoch
    must have no effect (I2)."""


AnyFault = Crash | Pause | Stall | Hang | Slow | SlowLink | Cut | Reset | Duplicate | Skew | TinyQueues | RollBack
KINDS: tuple[str, ...] = tuple(str(kind.__struct_config__.tag) for kind in AnyFault.__args__)


class Scenario(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Faults and the expected outcome of a run.

    `expect`: `tokens`: every request gets its correct tokens. `tokens_or_error`: that, or an error that names the failed process within
    `deadline_seconds` of the fault, and no leaks. Default: the outcomes that the faults allow (flowrt/simulation/invariants.py).
    """

    scenario: Literal[1] = 1  # the version of this format
    faults: Annotated[tuple[AnyFault, ...], msgspec.Meta(max_length=MAX_FAULTS)] = ()
    expect: Literal["tokens", "tokens_or_error"] | None = None
    deadline_seconds: _Duration = 30.0

    @property
    def ends_seconds(self) -> float:
        """The end of the last fault. A fault that does not heal counts with its beginning."""
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
    """An example fault of this kind with all its keys, as in a scenario file; error messages quote it."""
    fields = next(each.__struct_fields__ for each in AnyFault.__args__ if each.__struct_config__.tag == kind)
    keys = sorted(fields, key=list(_SUCH_AS).index)
    return "such as {" + ", ".join([f"fault: {kind}", *(f"{key}: {_SUCH_AS[key]}" for key in keys)]) + "}"


def scenario_of(
    value: Any,
    where: Callable[[Place], str],
    processes: Collection[str] | None = None,
    example: Callable[[str], str] = written,
    kinds: Sequence[str] = KINDS,
    has_keys: bool = True,
) -> Scenario:
    """Converts plain values (dict, list, str, int, float) into a scenario. `where(path)` returns a place in the file as FILE:LINE.

    `processes`: the accepted process names; None: any. `example(kind)` returns an example of such a fault; `kinds` are the kinds that
    errors propose; `has_keys`: the user wrote the keys, so errors name them. Raises UserError with one line: what is wrong, where, and
    what is correct.
    """

    def at(path: Place) -> str:
        return ": ".join(part for part in (where(path), ".".join(map(str, path)) if has_keys else "") if part)

    if not isinstance(value, dict) or "scenario" not in value:
        raise UserError(f"{where(())}: no scenario file; begin it with the line scenario: 1")
    faults = value.get("faults")
    for number, fault in enumerate(faults if isinstance(faults, list) else ()):
        kind = fault.get("fault") if isinstance(fault, dict) else None
        if kind not in KINDS:
            raise UserError(f"{at(('faults', number))}: {_kind_text(kind)}; one of: {', '.join(kinds)}")
    try:
        scenario = msgspec.convert(value, Scenario)
    except msgspec.ValidationError as error:
        found = _PATH.match(str(error))
        text, dotted = (found["text"], found["path"] or "") if found else (str(error), "")
        steps: Place = tuple(int(step) if step.isdigit() else step for step in _STEP.findall(dotted))
        remedy = example(faults[steps[1]]["fault"]) if isinstance(faults, list) and len(steps) > 1 and isinstance(steps[1], int) else _WHOLE
        raise UserError(f"{at(steps)}: {_in_words(text)}; {remedy}") from None
    for number, each in enumerate(scenario.faults):
        for name in each.processes:
            if processes is not None and name not in processes:
                known = ", ".join(sorted(processes))
                raise UserError(f"{at(('faults', number))}: no process is called {name!r}; there are {known}")
        if len(set(each.processes)) < len(each.processes):
            raise UserError(f"{at(('faults', number))}: between needs two different processes")
    return scenario


def _kind_text(kind: object) -> str:
    return "names no fault (fault: crash)" if kind is None else f"fault {str(kind)[:40]!r} is unknown"


def _in_words(text: str) -> str:
    """Rewrites an error of the validator in the terms of scenario files."""
    for one, other in _TYPES.items():
        text = text.replace(one, other)
    text = re.sub(r"^Object missing required field `(.*)`$", r"`\1` is missing", text)
    text = re.sub(r"^Object contains unknown field `(.*)`$", r"unknown key `\1`", text)
    return " ".join((text[:1].lower() + text[1:]).split())
