"""A link that finds out why an expected response does not come (xDeepServe section 6.1).

The end that waits calls `check` once per PROBE_SECONDS. After a turn without any message from its peer it sends a probe, to which the peer
responds from its loop, whatever it computes. A late response means that the peer is saturated: the wait continues, and is the
back-pressure. No message at all until the last turn means that the link is broken: it is lost. A process that stands still is marked dead
long before.

Turns are counted, not seconds: an end that was stopped itself does not blame its peer.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from flowrt.actors.link import Link
from flowrt.transports.contract import Channel
from flowrt.transports.wire.message import Message

PROBE_SECONDS = 1.0
LOST_AFTER = 8  # turns without a message; an overloaded machine has kept a loop from its turn for 4.4 s
PROBE_EDGE = -18  # not an edge of a graph
_PROBE, _RESPONSE = "probe", "probe.response"
log = logging.getLogger("flowrt.links")


class ProbedLink(Link):
    """Both ends of a link are probed, or none is."""

    def __init__(
        self, channel: Channel, capacity_messages: int, on_message: Callable[[Message], None], on_pause: Callable[[], None] | None = None
    ) -> None:
        super().__init__(channel, capacity_messages, self._receive, on_pause)
        self._pass_on = on_message
        self._num_received = self._num_silent = 0

    def check(self, is_waiting: bool) -> None:
        """Call once per PROBE_SECONDS. `is_waiting`: a response of the peer is outstanding."""
        num_received = self.statistics().messages_received
        if not is_waiting or num_received != self._num_received:
            if self._num_silent > 1:
                log.info("%s responded after %d s: it is saturated", self.peer.name, self._num_silent)
            self._num_received, self._num_silent = num_received, 0
            return
        self._num_silent += 1
        if self._num_silent == 1:
            self._post_once(_PROBE)
        elif self._num_silent == LOST_AFTER:
            self._num_silent = 0
            self._channel.abort(f"{self.peer.name} has not responded to a probe for {(LOST_AFTER - 1) * PROBE_SECONDS:g} s")

    def _receive(self, message: Message) -> None:
        if message.edge != PROBE_EDGE:
            self._pass_on(message)
        elif message.kind == _PROBE:
            self._post_once(_RESPONSE)

    def _post_once(self, kind: str) -> None:
        """Messages that wait for the channel serve as well: so a peer that sends many probes fills no outbox."""
        if not self._waiting:
            self.post(Message(kind, edge=PROBE_EDGE))
