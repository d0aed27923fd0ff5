"""Decides which other processes are restarted with one that dies: none, those of its role, or all. Pure.

`reliability.recovery: restart_all` and `restart_role` are the earlier stages of recovery in xDeepServe (section 6.2); `fine` restarts the
dead process alone. A role is the set of workers that keep the same kind of state (`Rule.keeps`).
"""

from __future__ import annotations

from collections.abc import Iterable

from flowrt.graph.model import Graph
from flowrt.graph.recovery import RULES, rule_of

_ORDER = list(RULES)


class RecoveryPolicy:
    """Without restarts (`reliability.restarts: 0`), each policy is `fine`: a process that cannot return is no reason to end others."""

    def __init__(self, graph: Graph) -> None:
        self._recovery = graph.reliability.recovery
        self._rules = {name: rule_of(graph, name) for name in graph.process_names()}
        self.restarts_others = self._recovery in ("restart_role", "restart_all") and graph.reliability.restarts > 0

    def is_restarted_with(self, workers: Iterable[str], dead: Iterable[str]) -> bool:
        """Whether a process with these workers is restarted when one with the workers `dead` dies. The monitor has no part in it."""
        role, role_of_dead = self._role(workers), self._role(dead)
        if not self.restarts_others or role is None or role_of_dead is None:
            return False
        return self._recovery == "restart_all" or role == role_of_dead

    def follows(self, workers: Iterable[str]) -> bool:
        """Whether others may be restarted with these workers, which flowrt's own processes have no part in."""
        return self.restarts_others and self._role(workers) is not None

    def rank_of(self, workers: Iterable[str]) -> int:
        """Of processes that are restarted together, those of a lower rank start first."""
        return min((self._rules[name].restart_rank for name in workers if name in self._rules), default=0)

    def _role(self, workers: Iterable[str]) -> str | None:
        """Of a process with several workers: that of the worker with the most state."""
        kept = [self._rules[name].keeps for name in workers if name in self._rules]
        return max(kept, key=_ORDER.index, default=None)
