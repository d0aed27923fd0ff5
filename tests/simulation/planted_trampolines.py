"""Lists planted bugs of trampolines. See planting.py."""

from __future__ import annotations

from simulation.planting import Bug, bug

TRAMPOLINE = "flowrt.exchange.trampoline"
CLIENT = "flowrt.exchange.expert_client"
FAILOVER = "flowrt.exchange.failover"
SERVERS = "flowrt.exchange.servers"
RUNNER = "flowrt.dataflow.runner"
MATCHING = "flowrt.dataflow.matching"

TRAMPOLINE_BUGS: tuple[Bug, ...] = (
    bug("merged-rows-mixed", "a trampoline adds the response of each server to the rows of another", (
        TRAMPOLINE, "Forward._dispatch", "part.rows_R for part in parts)", "part.rows_R for part in parts[::-1])")),
    bug("merged-onto-rows", "a trampoline adds the responses to the rows themselves", (
        TRAMPOLINE, "Merge._combine", "torch.zeros_like(x_RH)", "x_RH")),
    bug("merged-for-other-part", "a trampoline responds to the first part of a tag, whichever it got", (
        TRAMPOLINE, "Merge._combine", "PartHeader(plan.header_as(PlanHeader).responds_to)", "PartHeader(0)")),
    bug("merged-and-kept", "a trampoline keeps the parts to which it has responded", (
        TRAMPOLINE, "Merge._combine", "self._client.forget(firing.tag)", "pass")),
    bug("failed-and-kept", "a trampoline keeps the parts that it has reported lost", (
        TRAMPOLINE, "Trampoline.fail", "self.client.forget(tag)", "pass")),
    bug("request-consumed-at-once", "the credit of a part returns when a trampoline forwards it, and with the response", (
        RUNNER, "Runner._finish", "if firing.node not in self._keeping:", "if True:")),
    bug("request-forgotten", "a trampoline forgets which group a part came from", (
        MATCHING, "MatchingTable.arrive", "row.via += via", "pass")),
    bug("trampoline-waits", "a trampoline waits for a replica that it does not reach", (
        TRAMPOLINE, "Trampoline._send", "if len(redispatch.outputs) < len(redispatch.by):", "if False:")),
    bug("trampoline-silent", "a trampoline drops the part of a dead server without a response", (
        RUNNER, "Runner.fail", "self._fail(firing, error)", "pass")),
    bug("lost-part-not-sent-again", "a group ignores that a trampoline has lost a part", (
        FAILOVER, "Failover._on_failed", "self._redispatch(tag, header.part)", "pass")),
    bug("crash-behind-trampoline", "a group sends the part of a crashed server behind a trampoline to a replica", (
        FAILOVER, "Failover._on_failed", "self._steps.fail_steps(dict.fromkeys((tag, *others)), header.error, crashed=True)",
        "self._redispatch(tag, header.part)")),
    bug("sent-again-through-trampoline", "a redispatched part passes a trampoline, which has one of the tag already", (
        SERVERS, "Servers.table", "self._tables_avoiding(preferred.union(besides))",
        "self._tables_avoiding(preferred.union(besides), [*self.behind])")),
    bug("trampoline-late-for-ever", "a group sends nothing through a trampoline that was late once", (
        CLIENT, "ExpertClient.record_response", "self.servers.note_response(server)",
        "server in self.servers.behind or self.servers.note_response(server)")),
    bug("dead-group-at-trampoline", "a trampoline keeps the parts of a group that has died", (
        FAILOVER, "Failover.mark_lost", "self.client.roll_back(source, ENDED)", "pass")),
)  # fmt: skip
