"""Lists planted bugs of groups that are expert servers too. See planting.py."""

from __future__ import annotations

from simulation.planting import Bug, bug

RUNNER = "flowrt.dataflow.runner"
MEMBERSHIP = "flowrt.workers.membership"

COLOCATED_BUGS: tuple[Bug, ...] = (
    bug("local-response-unseen", "the next part of a suspect waits for ever when its own group has computed the last one", (
        RUNNER, "Runner._emit", "self._on_response(output.edge.id, output.tag, message)", "pass")),
    bug("lost-as-group-only", "the parts at a dead group are not redispatched", (
        MEMBERSHIP, "Membership._lose", "if self._failover.mark_lost(process):", "if process not in self._failover.processes:")),
)  # fmt: skip
