"""Lists the planted bugs: possible faults of the existing mechanisms, one at a time. See planting.py and plant.py.

New mechanisms add their bugs here.
"""

# ruff: noqa: E501  (code within strings)

from __future__ import annotations

from simulation.planted_changes import CHANGE_BUGS
from simulation.planted_colocated import COLOCATED_BUGS
from simulation.planted_composed import COMPOSED_BUGS
from simulation.planted_constraints import CONSTRAINT_BUGS
from simulation.planted_faults import FAULT_BUGS
from simulation.planted_front_ends import FRONT_END_BUGS
from simulation.planted_groups import GROUP_BUGS
from simulation.planted_hosts import HOST_BUGS
from simulation.planted_modelled import MODELLED_BUGS
from simulation.planted_page_waits import PAGE_WAIT_BUGS
from simulation.planted_prefixes import PREFIX_BUGS
from simulation.planted_recurrent import RECURRENT_BUGS
from simulation.planted_request_log import REQUEST_LOG_BUGS
from simulation.planted_standby import STANDBY_BUGS
from simulation.planted_trampolines import TRAMPOLINE_BUGS
from simulation.planted_transfers import TRANSFER_BUGS
from simulation.planting import Bug, body, bug, with_graphs

MATCHING = "flowrt.dataflow.matching"
PARTS = "flowrt.dataflow.parts"
LINKS = "flowrt.actors.links"
RUNNER = "flowrt.dataflow.runner"
SELECTION = "flowrt.dataflow.selection"
FENCES = "flowrt.dataflow.fences"
READY = "flowrt.dataflow.ready_firings"
USERS_ENDPOINT = "flowrt.workers.endpoint"
CALLS = "flowrt.workers.call_table"
SUBGRAPH = "flowrt.dataflow.subgraph"
MAILBOX = "flowrt.actors.mailbox"
LINK = "flowrt.actors.link"
HEARTBEATS = "flowrt.actors.heartbeats"
OUTBOUND = "flowrt.dataflow.outbound_edges"
INBOUND = "flowrt.dataflow.inbound_edges"
ENGINE = "flowrt.engine.engine"
SCHEDULER = "flowrt.engine.scheduler"
MEMORY = "flowrt.engine.group_memory"
PAGES = "flowrt.engine.page_allocator"
SEQUENCE = "flowrt.engine.sequence"
BATCH = "flowrt.engine.batch"
GROUP = "flowrt.workers.group"
PROCESS = "flowrt.workers.process"
SERVICE = "flowrt.exchange.expert_service"
DISPATCH = "flowrt.exchange.dispatch"
CLIENT = "flowrt.exchange.expert_client"
SERVERS = "flowrt.exchange.servers"
FAILOVER = "flowrt.exchange.failover"
MEMBERSHIP = "flowrt.workers.membership"
DETECTOR = "flowrt.reliability.detector"
MONITOR = "flowrt.workers.monitor"
PARTITION, REPLICA_TABLE = "flowrt.operators.dispatch", "flowrt.operators.replica_table"
TORCH_KERNELS = "flowrt.operators.kernels.torch.rows"
GATEWAY, ADMISSION, ROUTER = "flowrt.gateway.gateway", "flowrt.gateway.admission", "flowrt.gateway.router"
WINDOW = "flowrt.transports.channel.flow_control"
LAUNCHER = "flowrt.launcher.launcher"
RUN_STATE = "flowrt.launcher.run_state"
CONNECTION = "flowrt.launcher.control_connection"
POOL = "flowrt.launcher.worker_pool"
DEATHS = "flowrt.launcher.deaths"
STARTS = "flowrt.launcher.starts"
RUN_TABLE = "flowrt.launcher.run_table"
REQUESTS = "flowrt.gateway.requests"
LAZY = "flowrt.actors.lazy_opener"
LAZY_CHANNEL = "flowrt.actors.lazy_channel"
CODEC = "flowrt.transports.wire.codec"
ENDPOINT = "flowrt.transports.channel.queued"
HANDSHAKE = "flowrt.transports.wire.handshake"

BUGS: tuple[Bug, ...] = (
    *GROUP_BUGS,
    *CONSTRAINT_BUGS,
    *FAULT_BUGS,
    *STANDBY_BUGS,
    *FRONT_END_BUGS,
    *REQUEST_LOG_BUGS,
    *CHANGE_BUGS,
    *with_graphs("hosts", HOST_BUGS),
    *with_graphs("colocated", COLOCATED_BUGS),
    *with_graphs("composed", COMPOSED_BUGS),
    *with_graphs("trampoline.yaml", TRAMPOLINE_BUGS),
    *with_graphs("prefill.yaml", TRANSFER_BUGS),
    *with_graphs("few_pages", PAGE_WAIT_BUGS),
    *MODELLED_BUGS,
    *PREFIX_BUGS,
    *with_graphs("recurrent", RECURRENT_BUGS),
    # tags and matching
    bug("micro-batches-mixed", "rows are matched without the micro-batch", (
        MATCHING, "MatchingTable.arrive", "key = (edge.target, tag)", "key = (edge.target, Tag(tag.source, tag.epoch, 0, tag.step, tag.layer))")),
    bug("layer-forgotten", "the inputs of a node are looked up without the layer", (
        MATCHING, "MatchingTable.arrive", "self._shapes.get((edge.target, tag.layer)) or self._shape(edge.target, tag.layer)",
        "self._shape(edge.target, 1)")),
    bug("rows-survive-rollback", "a rollback leaves old rows in the table", (
        MATCHING, "MatchingTable.drop", "if stale(key[1])", "if stale(key[1]) and False")),
    bug("epoch-begins-at-zero", "a stateful node of a new epoch waits for step 0", (
        MATCHING, "MatchingTable._in_turn", "tag.step if tag.epoch else 0", "0")),
    # selection
    bug("waits-for-ever", "a node that waits for more firings is not woken when its wait is over", (
        RUNNER, "Runner.run", "await self._sleeper.sleep(self._ready.wake_at)", "await self._sleeper.sleep(None)")),
    bug("selected-twice", "the firings of a batch stay in the queue beside those that were not selected", (
        READY, "ReadyFirings.take", "firings = deque((firing for firing in firings if id(firing) not in taken))", "pass")),
    bug("turn-never-passes", "a server serves one domain for ever", (
        SELECTION, "DomainTurns.select", "for place in range(len(domains))", "for place in range(1)")),
    # parts
    bug("parts-in-order-of-arrival", "responses are added in order of arrival to the rows of the parts in plan order", (
        PARTS, "Cover.complete", "for part in cover]", "for part in sorted(cover, key=list(self._arrived).index)]"), (
        DISPATCH, "Combine._located", "if numbers != list(range(len(where))):", "if sorted(numbers) != list(range(len(where))):")),
    bug("part-missing", "a tag counts as complete when one part is missing", (
        PARTS, "Cover.complete", "cover = self._cover(self._plan)", "cover = self._cover(self._plan)\n    if len(self._arrived) + 1 >= len(cover):\n        cover = [part for part in cover if part in self._arrived]")),
    bug("part-twice", "the last part is added twice", (
        DISPATCH, "Combine._located", "zip(where, firing.inputs['parts'], strict=True)]", "zip([*where, where[-1]], [*firing.inputs['parts'], firing.inputs['parts'][-1]], strict=True)]")),
    bug("parts-overwrite", "a row with responses of two servers keeps the last", (
        TORCH_KERNELS, "add_parts", "total_TH.index_add_(0, rows_R, y_RH)", "total_TH.index_copy_(0, rows_R, y_RH)")),
    bug("residual-in-place", "combine writes into a received buffer and adds it again", (
        TORCH_KERNELS, "add_parts", "total_TH = torch.zeros_like(residual_TH)", "total_TH = residual_TH")),
    bug("wrong-part-id", "all responses of a batch have the part id of its first request", (
        SERVICE, "ExpertService.__call__", "request.header_as(PartHeader)", "requests[0].header_as(PartHeader)")),
    # the expert service and its map
    bug("batch-offset", "the second request of a batch is computed from the rows of the first", (
        SERVICE, "ExpertService._compute", "offset += size", "offset += 0")),
    bug("responses-swapped", "two requests of one batch get each other's responses", (
        SERVICE, "ExpertService.__call__", "return responses", "return responses[::-1]")),
    bug("layers-batched", "requests of different layers are computed with one layer's experts", (
        SELECTION, "by_layer", "layers.setdefault(firing.tag.layer, [])", "layers.setdefault(batch[0].tag.layer, [])")),
    bug("response-on-every-edge", "a response is sent on every response edge", (
        SUBGRAPH, "FusedSubgraph.run", "if route.request_id is not None and route.request_id not in firing.via:", "if False:")),
    bug("stale-map", "dispatch uses a map in which each expert is on the neighbouring server", (
        REPLICA_TABLE, "ReplicaTable.from_lists", "return cls(table.to(device),", "return cls((table + 1) % num_servers,")),
    bug("pair-lost", "the last pair of a large part is not sent", (
        PARTITION, "_by_server", "[Part(*fields) for fields in", "[Part(*fields[:2], *(x[:len(x) - (len(x) > 6)] for x in fields[2:])) for fields in")),
    # credits and epochs in the runner
    bug("credit-lost", "a response does not return its request's credit", (
        RUNNER, "Runner.accept", "self._outbound.release_request(edge.request_id, tag)", "pass")),
    bug("credit-doubled", "a response returns two credits", (
        OUTBOUND, "OutboundEdges.release_request", "self.release(edge_id, 1)", "self.release(edge_id, 2)")),
    bug("credit-never-taken", "sending takes no credit", (
        OUTBOUND, "OutboundEdges.take", "outbound.free -= 1", "outbound.free -= 0")),
    bug("credit-returned-twice", "a request's credit returns with its response and once more by itself", (
        INBOUND, "InboundEdges.consume", "responded and (edge_id, tag) in responded", "False")),
    bug("credit-of-stale-lost", "the credit of a response to an old epoch is lost", (
        RUNNER, "Runner.accept", "self._outbound.release_request(edge.request_id, tag)", "self._fences.is_stale(tag) or self._outbound.release_request(edge.request_id, tag)")),
    bug("epoch-unchecked", "messages of an old epoch are accepted", (
        FENCES, "Fences.is_stale", "tag.epoch < self._epochs.get(tag.source, 0) or", "")),
    bug("rollback-forgets-ready", "firings that were ready before a rollback still fire", (
        READY, "ReadyFirings.drop", "for node, firings in list(self.items()):", "for node, firings in []:")),
    # failed calls of a user's graph
    bug("failed-call-keeps-rows", "a failed call leaves its rows and waiting firings", (
        RUNNER, "Runner.fence", "self._drop_stale()", "pass")),
    bug("failed-call-unfenced", "messages of a failed call are accepted", (
        FENCES, "Fences.is_stale", "or (tag.source, tag.step) in self.failed", "")),
    bug("order-waits-for-failed-call", "a stateful node waits for a call that has failed", (
        MATCHING, "MatchingTable._from_step", "or (key[1], expected) in self._failed", "")),
    bug("unsendable-keeps-credit", "an output that cannot be sent keeps its credit", (
        OUTBOUND, "OutboundEdges._on_send_error", "outbound.free += outbound.size > 0", "pass")),
    bug("failure-takes-neighbours", "an error drops the outputs of the other calls of its batch", (
        SUBGRAPH, "FusedSubgraph.run", "kept = [output for output in outgoing if _call_of(output.tag) not in errors]", "kept = []")),
    bug("fence-unsent", "the other workers do not learn of a failed call", (
        USERS_ENDPOINT, "Endpoint._send_fences", "worker.control.send(FenceCalls(self._source, tuple(unfenced)))", "pass")),
    bug("failure-of-another-call", "an error is raised by the next call", (
        USERS_ENDPOINT, "Endpoint.on_control", "future = self._waiting.get(step)", "future = self._waiting.get(step + 1)")),
    bug("failed-call-keeps-place", "a failed call keeps its place when all workers have fenced it", (
        CALLS, "CallTable.confirm", "del self._unconfirmed[step]", "pass")),
    bug("early-output-before-plan", "an early output is sent before the plan that counts its responses", (
        SUBGRAPH, "FusedSubgraph.run", "if output.edge.request_id is None]", "if output.edge.id in self._crossing]"), (
        SUBGRAPH, "FusedSubgraph.run", "if output.edge.request_id is not None]", "if output.edge.id not in self._crossing]")),
    bug("early-output-twice", "an early output is sent again at the end of the firing", (
        SUBGRAPH, "FusedSubgraph.run", "outgoing = [output for output in outgoing if output.edge.request_id is not None]", "pass")),
    # waking up
    bug("missed-wakeup-of-emit", "emitting does not wake the runner", (
        RUNNER, "Runner.emit", "self._wake()", "pass")),
    bug("missed-wakeup-of-settle", "messages that make a node ready do not wake the runner", (
        RUNNER, "Runner.settle", "if self._ready or self._failure is not None:\n        self._wake()", "pass")),
    bug("wakeup-between", "the runner misses wake-ups between its check and its sleep", (
        "flowrt.timer", "Sleeper.sleep", "self._future = asyncio.get_running_loop().create_future()",
        "await asyncio.sleep(0)\n    self._future = asyncio.get_running_loop().create_future()")),
    bug("mailbox-silent", "posting to a mailbox does not wake its reader", (
        MAILBOX, "Mailbox.post", "self._wake()", "pass")),
    bug("sender-not-woken", "room in a full channel does not wake the sender", (
        ENDPOINT, "QueuedChannel._wake_sender", "if future is not None and (not future.done()):", "if False:")),
    bug("receiver-not-woken", "one message in a wait is taken without waking for the next", (
        ENDPOINT, "QueuedChannel._wake_receiver", "if self._receiver is not None:",
        "if self._receiver is not None and self._counters.messages_received % 16 != 15:")),
    bug("reading-woken-once", "a reader that was woken is never woken again", (
        ENDPOINT, "Reading.take_all", "self._is_woken = False", "pass")),
    bug("reading-stops-when-full", "a reader that yields to the loop does not go on", (
        ENDPOINT, "Reading._take_all", "for _ in range(YIELD_AFTER):", "for _ in range(1):"), (
        ENDPOINT, "Reading._take_all", "self.wake()", "pass")),
    bug("reading-error-lost", "an error of a message that was read ends no link", (
        ENDPOINT, "Reading.take_all", "self.ended.set_exception(error)", "pass")),
    # links and channels
    bug("outbox-lost", "a message for a full channel is dropped", (
        LINK, "Link.post", "self._outbox.post(with_own_tensors(message), overtakes=overtakes)", "pass")),
    bug("read-not-settled", "messages of one read are not settled", (
        ENDPOINT, "Reading.take_all", "self._on_pause()", "pass")),
    bug("lost-link-unreported", "a worker does not report a lost peer", (
        PROCESS, "Worker._run_links", "self.control.send(LinkLost(lost.peer, lost.reason))", "pass")),
    bug("duplicates-accepted", "a duplicate message is accepted", (
        CODEC, "is_repeat", "return True", "return False")),
    bug("window-off-by-one", "a sender sends one message more than the channel holds", (
        WINDOW, "SendWindow.fits", "on_the_way < self.capacity_messages", "on_the_way <= self.capacity_messages")),
    bug("window-forgets", "a sender never learns that its messages were consumed", (
        WINDOW, "SendWindow.update", "self.taken_messages = taken_messages", "pass")),
    bug("stop-ignored", "a busy worker ignores a Stop message and goes on", (
        PROCESS, "Worker.stop", "self._stopped.set()", "pass")),
    # servers that die and come back
    bug("parts-not-redispatched", "parts of a dead server are not redispatched", (
        FAILOVER, "Failover.settle", "self._redispatch(tag, part)", "pass")),
    bug("map-keeps-dead-server", "a dead server stays in its client's map", (
        SERVERS, "Servers.lose", "self._update_map()", "pass")),
    bug("map-never-restored", "a restarted server stays out of the map", (
        SERVERS, "Servers.join", "self._update_map()", "pass")),
    bug("edges-stay-open", "edges to a dead server are not closed, so messages are lost", (
        RUNNER, "Runner.end_peer", "self._outbound.renew(peer, closed=True)", "pass")),
    bug("edges-stay-closed", "edges to a restarted server are not opened", (
        RUNNER, "Runner.join_peer", "self._outbound.renew(peer, closed=False)", "pass")),
    bug("unsent-forgotten", "an unsent part for a server that died is dropped", (
        FAILOVER, "Failover.on_unsent", "self._redispatch(output.tag, part)", "pass")),
    bug("waiting-parts-forgotten", "parts that wait for an expert are not dispatched when it is back", (
        FAILOVER, "Failover.mark_joined", "self._redispatch_from(frozenset({UNAVAILABLE}))", "pass"), (
        FAILOVER, "Failover.redispatch_waiting", "self._redispatch_from(frozenset({UNAVAILABLE}))", "pass")),
    bug("older-map-parts-forgotten", "parts from an older map wait for ever after the server came back", (
        FAILOVER, "Failover.redispatch_waiting", "self._redispatch_from(frozenset({UNAVAILABLE}))", "pass")),
    bug("window-not-renewed", "a new incarnation begins with the credits that remained of the old one", (
        OUTBOUND, "OutboundEdge.renew", "self.free = self.size", "self.free = getattr(self, 'free', self.size)")),
    bug("pending-survives", "outputs that wait for a credit of a dead server wait for its next incarnation", (
        OUTBOUND, "OutboundEdge.renew", "self.pending: deque[RoutedOutput] = deque()", "self.pending = getattr(self, 'pending', None) or deque()")),
    bug("superseded-twice", "a part and the parts that supersede it are both added", (
        PARTS, "Cover.complete", "for part in cover]",
        "for each in cover for part in (each, *(new for new in self._replaced_by.get(each, ()) if new in self._arrived))]")),
    bug("half-a-cover", "one of the superseding parts counts for all of them", (
        PARTS, "Cover._cover", "self._cover(self._replaced_by[part]) if", "([new for new in self._replaced_by[part] if new in self._arrived] or self._replaced_by[part]) if")),
    bug("rows-of-first-dispatch", "responses to redispatched parts are added to the rows of the first dispatch", (
        CLIENT, "ExpertClient.parts", "entry.parts[number]", "entry.parts[min(number, min(entry.sent, default=number + 1) - 1)]")),
    bug("pairs-renumbered", "a redispatched part numbers its pairs within the part", (
        PARTITION, "repartition", "_by_server(part.pair_P, part.expert_P", "_by_server(None, part.expert_P")),
    bug("weights-of-other-pairs", "a redispatched part takes the weights of other pairs", (
        PARTITION, "_by_server", "[Part(*fields) for fields in", "[Part(*fields[:4], weight_P[:len(fields[4])], fields[5]) for fields in")),
    bug("others-restored", "when one server is back, others that are down are in the map again", (
        SERVERS, "Servers._update_map", "filter(self.is_lost, self.processes)", "[each for each in self.processes if [*self._lost][-1:] == [self.processes[each]]]")),
    bug("slow-replica-unavailable", "an expert whose only replica is on a slow server is unavailable", (
        SERVERS, "ReplicaTables.of", "or servers for servers in replicas", "for servers in replicas"), graphs="2x3.yaml"),
    bug("hedge-without-replica", "a late part is hedged to servers that do not hold all its experts", (
        CLIENT, "ExpertClient.hedge", "self.servers.table(tag.layer, {part.server, *self.servers.behind.get(part.server, ())})", "type(self.servers._tables_avoiding(frozenset()))(self.servers._map.without_servers([part.server, *self.servers.behind]), frozenset(), len(self.processes), 'cpu').of(tag.layer)"), (
        FAILOVER, "Failover.redispatch_waiting", "self._redispatch_from(frozenset({UNAVAILABLE}))", "pass")),
    bug("rollback-forgets-parts", "a rollback leaves the parts of its tags with the client", (
        GROUP, "Group._begin_epoch", "self._client.roll_back(self._source, self._engine.epoch)", "pass")),
    bug("used-before-linked", "a new incarnation receives parts before its link is up", (
        MEMBERSHIP, "Membership._join", "if await self._links.join(joined.process, joined.incarnation, joined.addresses) and joined.process in self._sources:",
        "self._tasks.create_task(self._links.join(joined.process, joined.incarnation, joined.addresses))\n    if True:")),
    bug("left-ignored", "a worker ignores the notice of a server's death", (
        MEMBERSHIP, "Membership.on_control", "self._lose(control.process, control.incarnation)", "pass")),
    bug("link-end-ignored", "a worker whose link has ended waits for the notice of the death", (
        MEMBERSHIP, "Membership.on_lost", "self._lose(peer.name, peer.incarnation)", "pass")),
    bug("never-refused", "requests that need an unavailable expert wait for ever", (
        MEMBERSHIP, "Membership._watch_parts", "failover.client.servers.omitted.unavailable_seconds >= self._unavailable_expert_seconds", "False")),
    bug("refused-at-once", "requests end as soon as an expert is unavailable", (
        MEMBERSHIP, "Membership._watch_parts", "failover.client.servers.omitted.unavailable_seconds >= self._unavailable_expert_seconds", "True")),
    bug("refused-for-ever", "requests are refused although the expert is back", (
        GROUP, "Group.accept", "self._refusal = None", "pass")),
    bug("unavailable-time-adds-up", "the time without an expert is not reset when the expert is lost again", (
        "flowrt.exchange.omitted_experts", "OmittedExperts.update", "self._since = {(layer", "self._since = self._since | {(layer")),
    bug("refused-and-running", "requests that end for an unavailable expert keep their steps", (
        GROUP, "Group.refuse", "self._engine.fail_all(error)", "[]")),
    body("ended-incarnation-linked", "a link to an incarnation that ended during the join counts as up", LINKS, "Incarnations.has_ended",
         "return False"),
    # heartbeats and the monitor
    body("heartbeats-of-any-incarnation", "a heartbeat of any incarnation counts", DETECTOR, "Detector.record_heartbeat",
         "watched = self.watched.get(process)\nif watched is not None:\n    watched.silent_seconds = 0.0\n    watched.received_at = now\nreturn []"),
    body("launcher-silence-ignored", "silence of the launcher counts as silence of the workers", DETECTOR, "Detector.record_launcher_heartbeat", "pass"),
    body("silence-is-death", "silence alone marks a process dead", DETECTOR, "Detector._evidence",
         "return 'silent' if watched.silent_seconds >= self._timeouts.suspect_seconds else None"),
    body("never-dead", "no evidence is enough", DETECTOR, "Detector._evidence", "return None"),
    bug("busy-is-hung", "a long operation counts as hung", (
        HEARTBEATS, "OperationWatch.look", "computed - self._computed > STILL_SHARE * passed", "False")),
    # the launcher: starts, control connections, restarts, ends
    bug("start-unsent", "a worker never receives its start message", (
        RUN_STATE, "RunState.on_forked", "table.act(SendStart(worker.name, worker.incarnation, self.starts.loads_of(worker.name), worker.loaded_as))", "pass")),
    bug("peers-unsent", "workers never receive the addresses of their peers", (
        RUN_STATE, "RunState._send_peers", "self.table.act(Send(worker.name, Peers(addresses, incarnations, restarting)))", "pass")),
    bug("addresses-of-first-incarnation", "a restarted process keeps the addresses of its first incarnation", (
        RUN_STATE, "RunState.on_listening", "found.addresses = listening.addresses\n    if worker", "found.addresses = found.addresses or listening.addresses\n    if worker"), (
        RUN_TABLE, "RunTable.renew", "loaded_as=loaded_as", "loaded_as=loaded_as, addresses=self.workers[name].addresses if name in self.workers else {}")),
    bug("incarnation-kept", "a restarted process has the incarnation of the dead one", (
        RUN_TABLE, "RunTable.renew", "self._new_incarnation()", "self.workers[name].incarnation if name in self.workers else self._new_incarnation()")),
    bug("joined-unsent", "neighbours are notified of deaths but not of new incarnations", (
        RUN_STATE, "RunState.on_listening", "table.notify(each, PeerJoined(each.name, each.incarnation, each.addresses))", "pass")),
    bug("exit-ignored", "a process that ended is not started again", (
        DEATHS, "Deaths._on_dead", "self._restart(process)", "pass")),
    bug("never-retried", "a process out of its restart budget is never started again", (
        DEATHS, "Deaths._restart", "table.set_timer(decision.retry_seconds, self._starts.start_next, name)", "pass")),
    bug("notice-for-connecting-lost", "a notice is lost when its receiver is not connected yet", (
        RUN_TABLE, "RunTable.notify", "WorkerState.LINKING <= other.state", "WorkerState.CONNECTED <= other.state")),
    bug("policy-kills-stay-down", "a process that was killed to be restarted with another is not started again", (
        DEATHS, "Deaths._restart", "self._starts.start_next(name)\n", "pass\n")),
    bug("policy-waits-forgotten", "a process that waits for the end of another is forgotten", (
        STARTS, "Starts.wake_waiting", "self._table.set_timer(0.0, self.start_next, name)", "pass")),
    bug("policy-kills-unannounced", "the gateway does not learn that a group was killed to be restarted with another process", (
        DEATHS, "Deaths.fence", "if process.is_fenced or", "if process.is_killed_on_purpose or process.is_fenced or")),
    bug("policy-time-counts", "requests end when a policy restarts all groups for longer than lost_group_seconds", (
        ROUTER, "Router.lose", "self._restarting.add(group)", "pass")),
    bug("given-up-server-awaited", "requests wait without limit for a server that is given up", (
        MEMBERSHIP, "Membership.on_control", "else self._restarting.discard", "else self._restarting.add")),
    body("marked-dead-not-killed", "a process that was marked dead is not killed", DEATHS, "Deaths.kill_to_restart", "pass"),
    body("exits-ignored", "the backend's exit notices are dropped", POOL, "WorkerPool.on_exited", "pass"),
    body("backend-loss-ignored", "the end of the fork server is not noticed", POOL, "WorkerPool.on_backend_lost", "pass"),
    # the loss of the fork server
    bug("fork-server-not-replaced", "a lost fork server is not replaced", (
        STARTS, "Starts.start_fork_server", "self._table.act(StartForkServer())", "pass")),
    bug("failed-fork-server-not-replaced", "a new fork server that fails to start is not replaced", (
        STARTS, "Starts.on_fork_server_failed", "self._start_fork_server_again(error.reason if isinstance(error, WorkerDiedError) else f'cannot start: {error}')", "pass")),
    bug("waiting-forgotten", "processes that wait for a fork server are not forked when it is back", (
        STARTS, "Starts.on_fork_server_ready", "self._table.set_timer(0.0, self.start_next, name)", "pass")),
    bug("met-end-forgotten", "a process whose fork met the end of the fork server is not forked again", (
        STARTS, "Starts.await_fork_server", "self._table.set_timer(RETRY_SECONDS, self.start_next, process.name)", "pass")),
    bug("silent-not-killed", "a fork server that does not respond is not killed", (
        DEATHS, "Deaths.on_fork_silent", "self._starts.kill_fork_server()", "self._starts.fork_server.is_up = False")),
    bug("silent-restart-forgotten", "the process whose fork timed out is not forked again", (
        DEATHS, "Deaths.on_fork_silent", "self._starts.await_fork_server(process)", "pass")),
    body("stopped-fork-server-kept", "a fork server that the monitor marks dead is not killed", STARTS, "Starts.on_fork_server_marked_dead", "pass"),
    bug("stopped-at-start-kept", "a process that the monitor marks dead while the run loads is not killed", (
        RUN_TABLE, "RunTable.can_kill", "self.can_replace(process)", "self.can_lose(process)")),
    bug("loss-ends-run", "the loss of the fork server ends a running run", (
        DEATHS, "Deaths.on_fork_server_lost", "self._table.phase < RunPhase.RUNNING", "self._table.phase < RunPhase.STOPPING")),
    body("left-behind", "the end of a run leaves its processes", POOL, "WorkerPool.close", "pass"),
    body("stop-unsent", "workers receive no stop message", CONNECTION, "ControlConnection.send_until", "return True"),
    body("notice-lost", "a notice that finds the control connection full is lost", CONNECTION, "ControlConnection._send_queued", "pass"),
    body("drained-ignored", "no request to drain is ever done", CONNECTION, "ControlConnection.request",
         "self.post(control)\nreturn asyncio.get_running_loop().create_future()"),
    bug("lost-link-ignored", "a lost link that no death explains has no consequence", (
        DEATHS, "Deaths.on_unexplained_loss", "self.kill_to_restart(first.process, f'has lost its link to {other.name} ({loss.reason})')", "pass")),
    bug("failure-unseen", "the reports of a failed run are never examined", (
        DEATHS, "Deaths.report", "if not self._reports:", "if False:")),
    body("failures-ignored", "a worker's failure report is ignored", DEATHS, "Deaths._note_failure", "pass"),
    body("heartbeats-unrelayed", "the monitor gets no heartbeats", LAUNCHER, "Launcher._send_to_monitor", "pass"),
    body("detector-reports-ignored", "the monitor's decisions are ignored", RUN_STATE, "RunState.on_detector_report", "pass"),
    # admission and requests
    body("client-not-woken", "clients are not woken for committed tokens", REQUESTS, "Requests._carry_out", "pass"),
    body("failure-unannounced", "clients are not woken when the run fails", REQUESTS, "Requests.fail", "self._failure = error"),
    body("left-uncancelled", "a request whose client left continues", REQUESTS, "Requests._let_go", "del self._on_change[index]"),
    body("never-full", "requests are admitted without bound", ADMISSION, "Admission.overload", "return ''"),
    body("always-full", "every request is refused", ADMISSION, "Admission.overload", "return 'full'"),
    body("refused-is-active", "a refused request stays active", GATEWAY, "Gateway.refuse",
         "log = self._logs[index]\nlog.events.append(EndEvent(log.index, 'error', '', error))\nreturn log.events[-1]"),
    # lazy channels
    body("offer-dropped", "an incoming connection of a lazy channel is dropped", LAZY, "LazyOpener.offer", "pass"),
    bug("lazy-channel-never-opened", "sending does not open a lazy channel", (
        LAZY_CHANNEL, "LazyChannel.send_nowait", "self.opener.want()", "pass"), (
        LAZY_CHANNEL, "LazyChannel.send", "self.opener.want()", "pass")),
    body("call-never-marked", "the accepting end of a lazy channel never confirms it", LAZY, "LazyOpener._mark", "return True"),
    # handshake
    bug("proof-without-peer-nonce", "an end proves the key over its own hello only", (
        HANDSHAKE, "Handshake._mac", "if self.role == 'connector' else (self._peer_hello, self._hello)", "if True else ()")),
    bug("incarnation-unread", "the handshake drops the peer's incarnation", (
        HANDSHAKE, "Handshake._read_hello", "Identity(hello.name, hello.incarnation)", "Identity(hello.name)")),
    bug("done-before-proof", "the connector is done when it has read the listener's hello", (
        HANDSHAKE, "Handshake._take", "self._read_hello(body)", "self._read_hello(body)\n        self.done = self.role == 'connector'")),
    # hedging
    bug("hedged-ids-reused", "a part that is split a second time gets the ids of the first split", (
        CLIENT, "ExpertClient._split", "first = len(entry.parts)", "first = min(entry.sent, default=len(entry.parts))")),
    # the engine
    bug("page-freed-early", "a cancelled sequence's pages are free while its step still writes to them", (
        ENGINE, "Engine._end", "if sequence.in_step:\n        sequence.cancelled = True",
        "if sequence.in_step:\n        sequence.cancelled = True\n        sequence.in_step = False\n        self._scheduler.remove(sequence)"), (
        ENGINE, "Engine.step_done", "if sequence.cancelled:\n            self._scheduler.remove(sequence)", "if sequence.cancelled:\n            pass"), (
        ENGINE, "Engine.roll_back", "if sequence.cancelled:\n                self._scheduler.remove(sequence)", "if sequence.cancelled:\n                pass")),
    bug("page-never-freed", "a sequence cancelled during its step keeps its pages", (
        ENGINE, "Engine.step_done", "if sequence.cancelled:\n            self._scheduler.remove(sequence)", "if sequence.cancelled:\n            pass")),
    bug("page-freed-while-shared", "a page is free when one of its holders ends", (
        PAGES, "PageAllocator.free", "if not holders:", "if True:")),
    bug("page-of-two", "allocated pages are allocated again", (
        PAGES, "PageAllocator.allocate", "self._is_free[page] = False", "self._is_free[page] = True")),
    bug("shared-before-filled", "a choice reads a sibling's pages before they are filled", (
        MEMORY, "GroupMemory._shared_pages", "if other.num_computed_tokens >= num_tokens:", "if True:")),
    bug("shared-one-too-many", "the page with the last token of the prompt is shared too", (
        MEMORY, "GroupMemory._shared_pages", "(sequence.num_prompt_tokens - 1) // self._share_tokens", "sequence.num_prompt_tokens // self._share_tokens")),
    bug("preempted-in-step", "a sequence is preempted while its step runs", (
        SCHEDULER, "Scheduler._youngest_idle", "if not sequence.in_step:", "if True:")),
    bug("claim-kept", "a sequence that ends keeps its claim on pages", (
        SCHEDULER, "Scheduler._release", "if self.claim is sequence:\n        self.claim = None", "pass")),
    bug("moved-in-step", "a sequence changes its micro_batch while its step runs", (
        SCHEDULER, "Scheduler._balance", "sequence.micro_batch == fullest and (not sequence.in_step)", "sequence.micro_batch == fullest")),
    bug("unused-moved-in-step", "a micro-batch that goes out of use gives away a sequence while its step runs", (
        SCHEDULER, "Scheduler._balance", "sequence.micro_batch >= len(used) and (not sequence.in_step)", "sequence.micro_batch >= len(used)")),
    bug("micro-batch-starves", "only the first micro_batch gets steps when something happens", (
        ENGINE, "Engine.next_steps", "for each in range(len(self._steps))", "for each in range(1)")),
    bug("step-never-over", "a sequence stays marked as in a step when the step ends without a token", (
        ENGINE, "Engine.step_done", "sequence.in_step = False", "sequence.in_step = not produces_token(sequence, num_rows)")),
    bug("rollback-forgets-sequences", "a rollback leaves the sequences marked as in a step", (
        ENGINE, "Engine.roll_back", "sequence.in_step = False", "pass")),
    bug("rollback-commits", "a rollback keeps the rows of the dropped step as computed", (
        ENGINE, "Engine.roll_back", "sequence.in_step = False", "sequence.in_step = False\n            sequence.num_computed_tokens += max(0, min(_, sequence.num_missing_tokens - 1))")),
    bug("token-to-the-next", "tokens of a step go to the wrong sequences when one of them got none", (
        ENGINE, "Engine.step_done", " if produces_token(sequence, num_rows) else []", "")),
    bug("chunk-miscounted", "a chunk counts one row less than it had", (
        ENGINE, "Engine.step_done", "sequence.num_computed_tokens += num_rows", "sequence.num_computed_tokens += max(1, num_rows - 1)")),
    bug("noise-repeats", "the noise of a draw does not depend on the token index", (
        BATCH, "build_batch", "sequence.num_output_tokens", "0")),
    bug("replay-misplaced", "rows of output that are replayed together all stand at the place of the last one", (
        BATCH, "build_batch", "batch.kv_lengths.append(kv_length)", "batch.kv_lengths.append(end)")),
    bug("choices-alike", "all choices draw with the first one's noise", (
        BATCH, "build_batch", "choice, sequence.output_counts", "0, sequence.output_counts")),
    bug("penalties-behind", "penalties do not count the output tokens", (
        SEQUENCE, "Sequence.append", "self.output_counts.get(token_id, 0) + 1", "self.output_counts.get(token_id, 0)")),
    bug("stop-too-early", "min_tokens does not hold stop tokens back", (
        SEQUENCE, "Sequence.forbidden_token_ids", "self.num_output_tokens < self.request.params.min_tokens", "False")),
    # group and gateway
    bug("end-before-tokens", "the end of a request is sent before its last token", (
        GROUP, "Group._carry_out", "tokens = [each for each in decisions if isinstance(each, TokenEvent)]",
        "for each in decisions:\n        if isinstance(each, Ended):\n            self._send(each)\n    tokens = [each for each in decisions if isinstance(each, TokenEvent)]")),
    bug("step-number-off", "the layout of a step is emitted for all layers but the last when micro_batches are busy", (
        GROUP, "Group._emit", "for tag in tags:", "for tag in tags[:len(tags) - (start.micro_batch > 0)]:")),
    bug("ends-with-one-choice", "a request ends with the first of its choices", (
        GATEWAY, "Gateway._end_choice", "if all((each.finish_reason is not None for each in log.choices)):", "if True:")),
    bug("ended-twice", "the end of a cancelled request is reported again when the worker reports it", (
        GATEWAY, "Gateway.on_ended", "if log is None or ended.attempt != log.attempt or group not in (self._stages.worker_of(log), self._stages.group_of(log)):\n        return []",
        "if log is None:\n        log = self._logs[int(ended.request_id.split('-')[1])]\n        log.events.append(EndEvent(log.index, ended.reason))\n        return []")),
)  # fmt: skip
