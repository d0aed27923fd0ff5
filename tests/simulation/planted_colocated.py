"""Lists planted bugs of groups that are expert servers too. See planting.py."""

from __future__ import annotations

from simulation.planting import Bug, bug

RUNNER = "flowrt.dataflow.runner"
ALONE = "flowrt.dataflow.alone"
CHANGES = "flowrt.launcher.run"
MEMBERSHIP = "flowrt.workers.membership"

COLOCATED_BUGS: tuple[Bug, ...] = (
    bug("local-response-unseen", "the next part of a suspect waits for ever when its own group has computed the last one", (
        RUNNER, "Runner._emit", "self._on_response(output.edge.id, output.tag, message)", "pass")),
    bug("server-suspects-own", "requests of a group that crashed over a part of another group's suspect are suspects", (
        CHANGES, "apply_group_change", "is_innocent = alone_for not in ('', name)", "is_innocent = False")),
    bug("alone-for-ever", "a group that has computed a suspect's part counts as computing it while it computes its own", (
        ALONE, "AloneFirings.report", "alone is not None or self.reported is not None", "alone is not None")),
    bug("lost-as-group-only", "the parts at a dead group are not redispatched", (
        MEMBERSHIP, "Membership._lose", "if self._failover.mark_lost(process):", "if process not in self._failover.processes:")),
)  # fmt: skip
