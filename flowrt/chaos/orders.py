"""What a run with chaos says to its workers, and hears from them, beside what every run says.

Here: Order (a message on the control connection) and Note (a line on stderr, so that it comes even while the control connection stands
still).
Not here: who obeys (worker.py), who orders (inject.py). No torch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import msgspec

from flowrt.actors.control import Control

WORKER = "flowrt.chaos.worker:run_worker"  # what a graph with chaos starts instead of its usual workers
_MARK = "@chaos "


class Order(Control, frozen=True):
    """Do this to yourself. Known only to the workers of chaos: the usual ones refuse it as no control message.

    what: `stall`, `hang`, `slow` (for `seconds`, by `factor`), `reset` (the connections to the process `pid`), `look` (answer with a
    Note what you hold).
    """

    kind: ClassVar[str] = "control.chaos"
    what: str
    seconds: float = 0.0
    factor: float = 1.0
    pid: int = 0


@dataclass(frozen=True)
class Note:
    """What a worker noticed: `what` with whom, when (the host's monotonic clock), and what it counted.

    what: the name of an order when it is carried out (`reset`: with `counts` of the connections that it found); `left`: the life
    `incarnation` of `peer` is used no more; `held`: `counts`.
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
    except msgspec.MsgspecError:  # a line of somebody else's
        return None
