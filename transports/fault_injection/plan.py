"""Defines fault plans, which select the fault of each message deterministically and without I/O.

The text form is a list of `[out.]KIND[:SECONDS]@WHEN` and `seed=N`, separated by commas. WHEN is a message's number from 0 (`@7`), every
message from there on (`@7+`), or a share of all, drawn from the seed (`@1%`). Without `out.` the fault applies to what this end receives.
"""

from __future__ import annotations

import re
from hashlib import sha256
from typing import Literal, get_args

import msgspec

from flowrt.transports.errors import AddressError

Direction = Literal["in", "out"]
Kind = Literal["delay", "stall", "drop", "duplicate", "truncate", "flip", "cut"]
KINDS: tuple[Kind, ...] = get_args(Kind)
TIMED: tuple[Kind, ...] = ("delay", "stall")
_DEFAULT_SECONDS = {"delay": 0.01, "stall": 1.0}
_RULE = re.compile(r"(?:(in|out)\.)?([a-z]+)(?::(\d+(?:\.\d+)?))?@(\d+(?:\.\d+)?)(\+|%)?")
_EXAMPLE = "drop@100,out.delay:0.005@1%,seed=3"


class MessageFault(msgspec.Struct, frozen=True, kw_only=True):
    """One rule of a plan. It applies to message `at`; with `onward`, to all messages from `at` on; without `at`, to a share `rate`.

    delay      the message and the messages behind it arrive `seconds` later
    stall      as delay, but its direction carries no message meanwhile, so a sender finds the channel full
    drop       the connection breaks at this message, for both ends; the message is lost
    duplicate  the message arrives twice, as after a retry whose first attempt had arrived
    truncate   the bytes of the message end early; a receiver must treat this as a broken channel
    flip       one bit of the message is inverted: the channel breaks if the result is invalid, otherwise the changed message arrives
    cut        from this message on, this direction silently loses all messages; the other direction works
    """

    kind: Kind
    direction: Direction = "in"
    at: int | None = None
    onward: bool = False
    rate: float = 0.0
    seconds: float = 0.0


class FaultPlan(msgspec.Struct, frozen=True):
    """All rules of a plan, and the seed of the rules with a rate."""

    faults: tuple[MessageFault, ...] = ()
    seed: int = 0

    def concerns(self, direction: Direction) -> bool:
        return any(fault.direction == direction for fault in self.faults)

    def faults_of(self, channel: int, direction: Direction, number: int) -> list[MessageFault]:
        """Returns the faults of message `number` in one direction of the `channel`-th channel of this process, in the plan's order."""
        return [
            fault
            for index, fault in enumerate(self.faults)
            if fault.direction == direction and self._applies(index, fault, (channel, direction, number))
        ]

    def draw(self, *what: object) -> float:
        """Returns a number in [0, 1) that depends only on the seed and `what`."""
        digest = sha256(repr((self.seed, *what)).encode()).digest()
        return int.from_bytes(digest[:7], "little") / (1 << 56)

    def _applies(self, index: int, fault: MessageFault, message: tuple[int, Direction, int]) -> bool:
        number = message[2]
        if fault.at is None:
            return self.draw(index, *message) < fault.rate
        if fault.kind == "cut" or fault.onward:
            return number >= fault.at
        return number == fault.at


def parse_plan(text: str) -> FaultPlan:
    """Parses `text` as a plan. Raises AddressError that names the invalid rule."""
    faults, seed = [], 0
    for rule in filter(None, text.split(",")):
        if re.fullmatch(r"seed=\d{1,18}", rule):
            seed = int(rule[5:])
        else:
            faults.append(_parse_rule(rule))
    return FaultPlan(tuple(faults), seed)


def _parse_rule(rule: str) -> MessageFault:
    match = _RULE.fullmatch(rule)
    if match is None or match[2] not in KINDS:
        raise AddressError(f"{rule[:60]!r} is not a fault; kinds are {', '.join(KINDS)}, and a plan looks like {_EXAMPLE}")
    direction: Direction = "out" if match[1] == "out" else "in"
    kind: Kind = next(kind for kind in KINDS if kind == match[2])
    if match[3] is not None and kind not in TIMED:
        raise AddressError(f"{rule!r}: only {' and '.join(TIMED)} take seconds")
    seconds = float(match[3]) if match[3] is not None else _DEFAULT_SECONDS.get(kind, 0.0)
    number = float(match[4])
    if match[5] == "%":
        if number > 100 or kind == "cut":
            raise AddressError(f"{rule!r}: " + ("a cut begins at a message, as in cut@100" if kind == "cut" else "at most 100%"))
        return MessageFault(kind=kind, direction=direction, rate=number / 100, seconds=seconds)
    if not number.is_integer():
        raise AddressError(f"{rule!r}: the number of a message must be an integer; a share ends with %")
    return MessageFault(kind=kind, direction=direction, at=int(number), onward=match[5] == "+", seconds=seconds)
