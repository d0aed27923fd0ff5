"""Tracks the current incarnation of each peer: one at a time; each ends once and never returns. Pure."""

from __future__ import annotations

from flowrt.transports.contract import Identity


class Lives:
    """The incarnations of all peers of one worker, each identified by process name and incarnation."""

    def __init__(self) -> None:
        self._current: dict[str, str] = {}  # process -> incarnation
        self._over: set[Identity] = set()  # those told of; a restart budget bounds how many there come to be

    def current(self, process: str) -> Identity | None:
        """The current incarnation of `process`, or None."""
        incarnation = self._current.get(process)
        return None if incarnation is None else Identity(process, incarnation)

    def begin(self, life: Identity) -> bool:
        """Make `life` the current incarnation of its process. Returns False, without effect, when it has already ended."""
        if life in self._over:
            return False
        before = self.current(life.name)
        if before is not None and before != life:
            self._over.add(before)
        self._current[life.name] = life.incarnation
        return True

    def end(self, life: Identity) -> bool:
        """Mark `life` as ended, whether or not it had begun. True when it was current until now."""
        self._over.add(life)
        if self._current.get(life.name) != life.incarnation:
            return False
        del self._current[life.name]
        return True

    def is_over(self, life: Identity) -> bool:
        return life in self._over
