"""Lists planted bugs of changes of the running graph: processes that join and leave. See planting.py."""

# ruff: noqa: E501  (code within strings)

from __future__ import annotations

from simulation.planting import Bug, bug

CHANGE = "flowrt.launcher.graph_change"
POOL = "flowrt.launcher.worker_pool"
ROUTER = "flowrt.gateway.router"
LINKS = "flowrt.actors.links"
OUTBOUND = "flowrt.dataflow.outbound_edges"
INBOUND = "flowrt.dataflow.inbound_edges"
SUBGRAPH = "flowrt.dataflow.subgraph"
SERVERS = "flowrt.exchange.servers"
DATA_PATH = "flowrt.workers.data_path"
DELTA = "flowrt.graph.delta"

CHANGE_BUGS: tuple[Bug, ...] = (
    bug("change-not-drained", "a process that leaves gets Stop before the workers confirm that nothing of theirs is left there", (
        CHANGE, "GraphChange._awaits_confirmations", "return any((workers[name].is_open for name in living))", "return False")),
    bug("change-confirms-early", "a worker confirms at once that nothing of its is left at processes that leave", (
        DATA_PATH, "DataPath.is_drained", "return not any(map(self.runner.is_waiting_for, leaving))", "return True"), (
        DATA_PATH, "DataPath.is_drained", "any(map(self.failover.client.has_parts_of, leaving))", "False"), (
        DATA_PATH, "DataPath.is_drained", "not self.group.is_idle", "False")),
    bug("change-parts-to-leaving", "new parts go to a server that leaves", (
        SERVERS, "Servers.place", "expert_map.without_servers((server for process in leaving for server in self._numbers.get(process, ())))", "expert_map")),
    bug("change-requests-to-leaving", "new requests go to a group that leaves", (
        ROUTER, "Router.use", "return sorted(self._leaving - self._lost.keys())", "return []")),
    bug("change-group-too-early", "requests go to a group that has not joined yet", (
        ROUTER, "Router.use", "self._mark_lost(group, 'has not joined yet')", "pass")),
    bug("change-group-never", "a group that has joined gets no requests, and stays one of those that are lost", (
        "flowrt.launcher.run", "apply_group_change", "events.WorkerJoined(name) | ", "")),
    bug("change-old-start", "a worker that starts again gets the first version of the graph", (
        POOL, "WorkerPool.graph_for", "if (graph.version, path) not in self._graphs:", "graph = graph.replace(version=0)\n    if (graph.version, path) not in self._graphs:")),
    bug("change-never-ends", "a process that has left stays in the table", (
        CHANGE, "GraphChange.advance", "self._table.remove(process)", "pass")),
    bug("change-outbound-stay", "the edges to a process that has left stay", (
        OUTBOUND, "OutboundEdges.use", "del self.edges[edge_id], self.sent[edge_id], self.times[edge_id]", "pass")),
    bug("change-inbound-stay", "the edges from a process that has left stay", (
        INBOUND, "InboundEdges.use", "del self.edges[gone]", "pass")),
    bug("change-links-stay", "the link to a process that has left stays", (
        LINKS, "Links.use", "self._links.pop(key, None)", "None")),
    bug("change-routes-stay", "results of nodes that have fired before do not reach processes that join later", (
        SUBGRAPH, "FusedSubgraph.use", "self._routes: dict[tuple[str, str, int], tuple[_Route, ...]] = {}",
        "self._routes: dict[tuple[str, str, int], tuple[_Route, ...]] = getattr(self, '_routes', {})")),
    bug("change-map-stays", "a group does not learn of new servers", (
        DATA_PATH, "DataPath.use", "client.servers.place(expert_map, servers_of(graph, self._dispatch), graph.leaving)", "pass")),
    bug("change-failover-stays", "responses of new servers count for none", (
        DATA_PATH, "DataPath.use", "self.failover.use(graph)", "pass")),
    bug("change-links-unplanned", "a worker does not link with processes that join", (
        DATA_PATH, "DataPath.use", "self.links.use(plans, survivable_processes(graph))", "pass")),
    bug("change-delta-without-ports", "nodes that stay keep their former ports and servers", (
        DELTA, "delta_of", "old.nodes.get(name) != node", "name not in old.nodes")),
)  # fmt: skip
