"""Defines the frames of an emulated link on the channel below it: stamped headers and the control kind."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from flowrt.transports.wire.message import Message

PASSED = "link.passed"  # the time at which a message had passed the sender's NIC


class Stamp(msgspec.Struct, frozen=True, array_like=True):
    """The frame header of a message: its number, when its service began, when the service of the message before it ended (None when
    reported already or not ended), and its own header. Times are in seconds."""

    number: int
    start_seconds: float
    before_seconds: float | None
    header: bytes | None


class Passed(msgspec.Struct, frozen=True, array_like=True):
    """The header of a PASSED frame: message `number` and all before it had passed at `seconds`."""

    number: int
    seconds: float


@dataclass
class ArrivingMessage:
    """An arriving message, and the times at which it passed each NIC."""

    message: Message
    number: int
    size: int
    start: float
    work: float
    moved: float = 0.0
    sent: float | None = None  # passed the sender's NIC
    received: float | None = None  # passed the receiver's NIC
