"""Tracks the current incarnation of each peer: one at a time; each ends once and never returns. Pure."""

from __future__ import annotations

from flowrt.transports.contract import Identity


class Incarnations:
    """The incarnations of all peers of one worker, each identified by process name and incarnation."""

    def __init__(self) -> None:
        self._current: dict[str, Identity] = {}  # by process
        self._ended: set[Identity] = set()  # a restart budget bounds their number

    def current(self, process: str) -> Identity | None:
        """The current incarnation of `process`, or None."""
        return self._current.get(process)

    def begin(self, identity: Identity) -> bool:
        """Make `identity` the current incarnation of its process. Returns False, without effect, when it has already ended."""
        if identity in self._ended:
            return False
        before = self.current(identity.name)
        if before is not None and before != identity:
            self._ended.add(before)
        self._current[identity.name] = identity
        return True

    def end(self, identity: Identity) -> bool:
        """Mark `identity` as ended, whether or not it had begun. True when it was current until now."""
        self._ended.add(identity)
        if self._current.get(identity.name) != identity:
            return False
        del self._current[identity.name]
        return True

    def has_ended(self, identity: Identity) -> bool:
        return identity in self._ended
