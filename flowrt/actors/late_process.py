"""The message about a process on another host whose heartbeats are late; see control.py."""

from __future__ import annotations

from flowrt.actors.control import Control
from flowrt.system.process_status import ProcessSample


class LateProcess(Control, frozen=True):
    """From the host server of another host, on the control connection of a worker whose heartbeats are late: what its process does. It
    follows all heartbeats that the host server has relayed, the last one `silent_seconds` before. Relayed to the monitor."""

    sample: ProcessSample
    silent_seconds: float
    process: str = ""  # the worker and its incarnation; filled in by the launcher, which relays it
    incarnation: str = ""
