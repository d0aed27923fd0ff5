"""Which life of each peer counts: one at a time, each ends once, and none comes back. Pure.

Here: Lives. Not here: what is done when one ends (links.py, the only user).
"""

from __future__ import annotations

from flowrt.transports.contract import Identity


class Lives:
    """The lives of all peers of one worker. A life is a process's name and incarnation."""

    def __init__(self) -> None:
        self._current: dict[str, str] = {}  # process -> incarnation
        self._over: set[Identity] = set()  # those told of; a restart budget bounds how many there come to be

    def current(self, process: str) -> Identity | None:
        """The life of `process` that counts now."""
        incarnation = self._current.get(process)
        return None if incarnation is None else Identity(process, incarnation)

    def begin(self, life: Identity) -> bool:
        """`life` counts from now on, instead of any other of that process. False, and nothing changes, when it is over already."""
        if life in self._over:
            return False
        before = self.current(life.name)
        if before is not None and before != life:
            self._over.add(before)
        self._current[life.name] = life.incarnation
        return True

    def end(self, life: Identity) -> bool:
        """`life` is over, whether or not it had begun. True when it counted until now."""
        self._over.add(life)
        if self._current.get(life.name) != life.incarnation:
            return False
        del self._current[life.name]
        return True

    def is_over(self, life: Identity) -> bool:
        return life in self._over
