"""Frames of an emulated link on the channel below it: headers of stamped messages, control kinds, and the disguise of window calls."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from flowrt.transports.channel.message_windows import RESERVED
from flowrt.transports.wire.message import Message

PASSED = "link.passed"  # the time at which a message had passed the sender's NIC
ASK = "link.ask"  # the sender wants to know when this message is taken
TAKEN = "link.taken"  # the receiver's user has taken it
_DISGUISE = "link"


class Stamp(msgspec.Struct, frozen=True, array_like=True):
    """Wraps the header of a message: its number, when its service began, when that of the one before ended, if not reported yet."""

    number: int
    start_seconds: float
    before_seconds: float | None
    header: bytes | None


class Passed(msgspec.Struct, frozen=True, array_like=True):
    """Of all three words: it is so for message `number` and all before it, since then."""

    number: int
    seconds: float


@dataclass
class HeldMessage:
    """An arriving message: which NICs it has passed, and when."""

    message: Message
    number: int
    size: int
    start: float
    work: float
    moved: float = 0.0
    sent: float | None = None  # passed the sender's NIC
    received: float | None = None  # passed ours


def disguised(kind: str) -> str:
    """The kind on the channel below, which must not take a call of our window for one of its own windows."""
    return _DISGUISE + kind if kind[:1] == RESERVED else kind


def undisguised(kind: str) -> str:
    return kind[len(_DISGUISE) :] if kind.startswith(_DISGUISE + RESERVED) else kind
