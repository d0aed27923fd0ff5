"""Lists planted bugs of groups that are expert servers too. See planting.py."""

from __future__ import annotations

from simulation.planting import Bug, bug

RUNNER = "flowrt.dataflow.runner"

COLOCATED_BUGS: tuple[Bug, ...] = (
    bug("local-response-unseen", "the next part of a suspect waits for ever when its own group has computed the last one", (
        RUNNER, "Runner._emit", "self._owner.on_response(output.edge.id, output.tag, message)", "pass")),
    bug("lost-as-group-only", "the parts at a dead group are not redispatched", (
        "flowrt.exchange.failover", "Failover.settle", "if not self.client.servers.settle(process):",
        "if self.client.servers.settle(process) or True:")),
)  # fmt: skip
