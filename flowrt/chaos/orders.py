"""Messages between a chaos run and its workers: Order on the control connection, Note as a line on stderr.

A note is a line on stderr so that it arrives even while the worker's event loop is blocked.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from flowrt.actors.control import Control

WORKER = "flowrt.chaos.worker:run_worker"  # in place of the usual workers
_MARK = "@chaos "


class Order(Control, frozen=True):
    """A fault that the worker injects into itself. Usual workers reject it as an unknown control message.

    what: `stall`, `hang`, `slow` (for `seconds`, by `factor`), `reset` (the connections to the process `pid`), `look` (report in a Note
    what it holds).
    """

    what: str
    seconds: float = 0.0
    factor: float = 1.0
    pid: int = 0


@dataclass(frozen=True)
class Note:
    """An event in a worker: `what`, with which peer, when (the host's monotonic clock), and counts.

    what: the name of an order when it is carried out (`reset`: with `counts` of the connections that it found); `left`: this worker no
    longer uses `incarnation` of `peer`; `held`: `counts`.
    """

    what: str
    at: float
    peer: str = ""
    incarnation: str = ""
    counts: dict[str, int] = field(default_factory=dict)

    def as_line(self) -> str:
        return _MARK + msgspec.json.encode(self).decode()


def note_of(line: str) -> Note | None:
    """The note in a line of a worker's stderr; None for any other line."""
    if not line.startswith(_MARK):
        return None
    try:
        return msgspec.convert(msgspec.json.decode(line.removeprefix(_MARK)), Note)
    except msgspec.MsgspecError:  # another program's line
        return None
