"""Tracks the current incarnation of each peer: one at a time; each ends once and never returns. Pure."""

from __future__ import annotations

from collections import defaultdict, deque
from functools import partial

from flowrt.transports.contract import Identity

MAX_ENDED = 64  # remembered per process: no notice about an older incarnation comes


class Incarnations:
    """The incarnations of all peers of one worker, each identified by process name and incarnation."""

    def __init__(self) -> None:
        self._current: dict[str, Identity] = {}  # by process
        self._ended: defaultdict[str, deque[str]] = defaultdict(partial(deque, maxlen=MAX_ENDED))  # by process

    def current(self, process: str) -> Identity | None:
        """The current incarnation of `process`, or None."""
        return self._current.get(process)

    def begin(self, identity: Identity) -> bool:
        """Make `identity` the current incarnation of its process. Returns False, without effect, when it has already ended."""
        if self.has_ended(identity):
            return False
        before = self.current(identity.name)
        if before is not None and before != identity:
            self._ended[before.name].append(before.incarnation)
        self._current[identity.name] = identity
        return True

    def end(self, identity: Identity) -> bool:
        """Mark `identity` as ended, whether or not it had begun. True when it was current until now."""
        if not self.has_ended(identity):
            self._ended[identity.name].append(identity.incarnation)
        if self._current.get(identity.name) != identity:
            return False
        del self._current[identity.name]
        return True

    def has_ended(self, identity: Identity) -> bool:
        return identity.incarnation in self._ended[identity.name]
