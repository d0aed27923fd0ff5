"""Lists planted bugs of trampolines. See planting.py."""

from __future__ import annotations

from simulation.planting import Bug, bug

TRAMPOLINE = "flowrt.exchange.trampoline"
CLIENT = "flowrt.exchange.expert_client"
FAILOVER = "flowrt.exchange.failover"
SUBGRAPH = "flowrt.dataflow.subgraph"
SELECTION = "flowrt.dataflow.selection"
INBOUND = "flowrt.dataflow.inbound_edges"

TRAMPOLINE_BUGS: tuple[Bug, ...] = (
    bug("bundle-rows-mixed", "a trampoline gives each server the first rows of a bundle", (
        TRAMPOLINE, "split_bundle", "x_RH if len(own_rows) == len(x_RH) else x_RH.index_select(0, own_rows)", "x_RH[:len(own_rows)]")),
    bug("merged-ids-sorted", "merged responses are listed by part id, and their rows by arrival", (
        TRAMPOLINE, "merge", "ids = tuple((response.header_as(PartHeader).part for response in responses))",
        "ids = tuple(sorted((response.header_as(PartHeader).part for response in responses)))")),
    bug("returned-to-first-group", "a trampoline returns all responses to its first group", (
        TRAMPOLINE, "Return._port", "self._ports[tag.source.partition('@')[0]]", "next(iter(self._ports.values()))")),
    bug("merged-and-forgotten", "of merged responses only the first one ends its request", (
        INBOUND, "InboundEdge._end_requests", "parts = header.parts", "parts = header.parts[:1]")),
    bug("siblings-for-ever", "a response waits at its trampoline for the others of its bundle without a bound", (
        SELECTION, "Siblings.select", "or now + ROUNDING_SECONDS >= since[tag] + self._max_wait_seconds", ""), (
        SELECTION, "Siblings.select", "return min(since.values()) + self._max_wait_seconds", "return now + 1000.0")),
    bug("stalled-server-blocks", "a trampoline splits a bundle only when each server behind it has a credit", (
        SUBGRAPH, "FusedSubgraph.reachable", "[] if entry in self._forwarding else [entry]", "[entry]")),
    bug("bundles-not-redispatched", "the parts that a dead trampoline held are not redispatched", (
        FAILOVER, "Failover.mark_lost", "self._redispatch_forwarded(tag, part)", "pass")),
    bug("trampoline-never-used-again", "a group sends nothing through a restarted trampoline", (
        "flowrt.exchange.servers", "Servers.may_forward", "process not in self._lost", "self.map_version == 1")),
    bug("trampoline-late-for-ever", "a group sends nothing through a trampoline that was late once", (
        CLIENT, "ExpertClient.record_forwarded", "self.servers.note_response(via(self.trampolines.processes[trampoline]))", "pass")),
    bug("lost-server-unnoticed", "a trampoline does not notify the groups of the parts that a dead server had", (
        TRAMPOLINE, "Forwarder.mark_lost", "self._notify(tag, process, part)", "pass")),
    bug("unsent-part-unnoticed", "a trampoline drops a part for a dead server without a notice", (
        TRAMPOLINE, "Forwarder.on_unsent", "self._notify(output.tag, self._process_of[output.edge.target], part)", "pass")),
)  # fmt: skip
