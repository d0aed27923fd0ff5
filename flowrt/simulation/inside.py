"""Observes a simulated worker: reads the snapshots and leftovers of its parts, and checks what it computes.

It modifies a worker in two ways only: it loads the exact model in place of the weights, and rolls back a group, which otherwise only lost
experts cause.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from importlib import import_module
from typing import Any

from flowrt.engine.page_allocator import PageAllocator
from flowrt.engine.prefix_cache import HOLDER
from flowrt.graph.model import Graph
from flowrt.graph.placement import servers_of
from flowrt.graph.recovery import neighbours
from flowrt.simulation.page_waits import EngineSequence
from flowrt.simulation.waitables import current_node
from flowrt.simulation.wrong_results import WrongResults
from flowrt.transports.contract import Identity

EXACT_MODEL = "flowrt.workers.exact_nodes"  # these import torch, so they are imported when used
START_CHECK = "flowrt.workers.start_check"
DISPATCH, DATA_PATH = "flowrt.exchange.dispatch", "flowrt.workers.data_path"


class WorkerInternals:
    """A view of one incarnation of a worker; its WorkerObserver. `wrong`: the results of the exact model that it computes with, which is
    integers instead of weights; None: with the weights. `on_poison(process, hangs)` is called when the poison ends the process: it kills
    the process, or stops its compute thread. `on_name`: called once it is a worker of the graph."""

    on_sink = None

    def __init__(
        self,
        worker: Any = None,
        wrong: WrongResults | None = None,
        on_poison: Callable[[str, bool], None] = lambda process, hangs: None,
        on_name: Callable[[WorkerInternals], None] = lambda inside: None,
    ) -> None:
        self.worker, self._wrong, self._on_poison, self._on_name = worker, wrong, on_poison, on_name
        self.node = current_node.get()
        self._source, self._epoch = "", 0  # of the tags of its group
        self._rolled_back_during: float | None = None  # start of the call during which the group began its epoch
        self._ended_during: dict[str, float | None] = {}  # source of an ended client -> start of the call that ran at that time
        self.late_firings: list[str] = []

    @property
    def name(self) -> str:
        """A standby process has a name of its own until it becomes a worker of the graph."""
        return str(self.worker.start.name)

    # as a WorkerObserver

    def begin(self, worker: Any) -> None:
        self.worker = worker

    def take_name(self, worker: Any) -> None:
        self._on_name(self)

    def act(self, worker: Any, message: Any) -> None:
        worker.act(message)

    def lose(self, worker: Any, peer: Any, reason: str) -> None:
        worker.lose(peer, reason)

    def load(self, worker: Any, name: str) -> Any:
        wrong = self._wrong
        if wrong is None:
            return worker.load(name)
        build, check_process = import_module(EXACT_MODEL).build_exact_nodes, import_module(START_CHECK).check_process
        users, end = check_process(worker.graph, name), partial(self._end, wrong.hangs)
        operators = import_module(DATA_PATH).LoadedOperators.of(users | build(worker.graph, name, worker.seams.clock.now))
        wrapped = {node: wrong.wrap(worker.graph.nodes[node], function, end) for node, function in operators.functions.items()}
        return replace(operators, functions={node: self._checked(function) for node, function in wrapped.items()} | users)

    def end_loading(self, data_path: Any) -> None:
        """Record the running call at each rollback of the group, and at each end of a client."""
        if data_path.group is not None:
            self._source = data_path.group.snapshot().source
        runner, compute = data_path.runner, self.worker.compute
        roll_back, end_peer = runner.roll_back, runner.end_peer

        def since_seconds() -> float | None:
            return None if compute.running is None else float(compute.running.since_seconds)

        def roll_back_noted(source: str, epoch: int) -> Any:
            self._epoch, self._rolled_back_during = epoch, since_seconds()
            return roll_back(source, epoch)

        def end_peer_noted(peer: str, sources: Sequence[str] = ()) -> Any:
            self._ended_during |= dict.fromkeys(sources, since_seconds())
            return end_peer(peer, sources)

        runner.roll_back, runner.end_peer = roll_back_noted, end_peer_noted

    def _checked(self, function: Any) -> Any:
        """Wraps `function` with check I2: a worker computes no firing of a client that has ended, a group none of another incarnation and
        none of an epoch that it has left, except in the call that ran at that time."""

        def run(firings: Any) -> Any:
            foreign = [each for each in firings if each.tag.source != self._source] if self._source else []
            old = [] if not self._source or foreign else [firing for firing in firings if firing.tag.epoch < self._epoch]
            if foreign and not self.worker.graph.nodes[foreign[0].node].kind.holds_experts:
                self.late_firings.append(f"{self.name}: {foreign[0].node} fired for {foreign[0].tag} of another incarnation")
            if old and not began(self._rolled_back_during):
                self.late_firings.append(f"{self.name}: {old[0].node} fired for {old[0].tag} in epoch {self._epoch}")
            ended = self._ended_during and [each for each in firings if each.tag.source in self._ended_during]
            if ended and not began(self._ended_during[ended[0].tag.source]):
                self.late_firings.append(f"{self.name}: {ended[0].node} fired for {ended[0].tag} of a client that has ended")
            return function(firings)

        def began(since_seconds: float | None) -> bool:
            """Whether the running call began then."""
            running = self.worker.compute.running
            return running is not None and running.since_seconds == since_seconds

        return run

    def _end(self, hangs: bool) -> None:
        """The poison ends the process, or `hangs` it if the call runs on the compute thread."""
        compute = getattr(self.worker.compute, "inner", self.worker.compute)  # of emulated hardware
        hangs = hangs and not compute.is_inline
        compute.never_ends = True
        self._on_poison(self.name, hangs)

    def _part(self, name: str) -> Any:
        """The runner, links, group or failover of the worker; None before it has loaded."""
        return None if self.worker.data_path is None else getattr(self.worker.data_path, name)

    def _group(self) -> Any:
        """The snapshot of the group."""
        group = self._part("group")
        return None if group is None else group.snapshot()

    @property
    def num_firings(self) -> int:
        runner = self._part("runner")
        return 0 if runner is None else int(runner.statistics.num_firings)

    @property
    def computes(self) -> bool:
        """Whether a call is running. A call that began under a slow fault may outlast all faults and requests."""
        return self.worker.compute.running is not None

    # expert servers from the view of an attention worker

    @property
    def servers(self) -> list[str]:
        """The expert servers that this worker sends requests to."""
        failover = self._part("failover")
        return [] if failover is None else _sorted(failover.processes)

    def has_ended(self, server: str, incarnation: str) -> bool:
        if self.worker.membership is None:
            return False
        return bool(self._part("links").incarnations.has_ended(Identity(server, incarnation)))

    def uses(self, server: str, incarnation: str) -> bool:
        """Whether the worker sends parts to this incarnation of the server."""
        failover = self._part("failover")
        if failover is None or self.has_ended(server, incarnation):
            return False
        servers = failover.client.servers
        is_linked = self._part("links").incarnations_of(server) == {incarnation}
        return is_linked and server not in servers.lost and (server in servers.in_use() or server not in self._holders())

    def _holders(self) -> set[str]:
        """The servers that hold experts in the graph that the worker knows. A trampoline does while a server behind it that is not lost
        holds one."""
        servers = self._part("failover").client.servers
        dispatch = next(node for node in self.worker.graph.nodes_of(self.name) if node.kind.dispatches)
        held = {server for server in servers_of(self.worker.graph, dispatch.name) if dispatch.options["servers"][str(server)]}
        reached = {server for server in held if not servers.is_lost(server)}
        return {servers.processes[server] for server in held if not reached.isdisjoint(servers.behind.get(server, {server}))}

    def undispatched(self) -> set[tuple[Any, int]]:
        """Parts, by tag and number, that wait for a replica of their experts although the worker knows an available one."""
        failover = self._part("failover")
        return set() if failover is None else set(failover.undispatched())

    def unsettled(self) -> list[str]:
        """Lost servers whose pending parts wait until the cause of the death is known."""
        failover = self._part("failover")
        return [] if failover is None else sorted(failover.client.servers.due)

    def alone(self) -> str | None:
        """The id of the latest suspect that the group has begun to compute alone; None if any other is in a step."""
        group = self._group()
        if group is None or group.alone is None:
            return None
        in_steps = {sequence.name for step in group.engine.steps if step is not None for sequence, _ in step.parts}
        return str(group.alone.request.id) if in_steps <= {group.alone.name} else None

    def kept_of_ended(self) -> list[str]:
        """At any time: what the worker keeps of clients whose incarnation it knows to have ended. A running call may add rows to its
        end."""
        runner, membership = self._part("runner"), self.worker.membership
        ended = None if runner is None or membership is None else membership.ended_sources()
        if not ended:
            return []
        found = {what: sources for what, sources in runner.snapshot().sources.items() if what != "rows" or not self.computes}
        return [f"{self.name} keeps {what} of {source}" for what, sources in found.items() for source in sorted(sources & ended)]

    @property
    def has_engine(self) -> bool:
        return self._part("group") is not None

    def roll_back(self) -> bool:
        """Begin a new epoch of the worker's group. False: not now, since something computes that may write into its pages."""
        if self.computes:
            return False
        self._part("group").roll_back()
        return True

    def waiting(self) -> list[str]:
        """What waits for what: the lines of the runner, and the counts of the engine."""
        runner, group = self._part("runner"), self._group()
        lines = [] if runner is None else [f"{self.name}: {line}" for line in runner.waiting()]
        if group is not None and (group.engine.running or group.engine.waiting):
            counts = group.counts
            pages = f"{counts.num_free_pages} of {counts.num_pages} pages free"
            lines.append(f"{self.name}: engine has {counts.num_running} running and {counts.num_waiting} waiting sequences, {pages}")
        return lines

    def page_faults(self) -> list[str]:
        """I3, at any time: each page and slot is free or held, only sequences with the same tokens up to its end share a page, and waiting
        sequences hold none."""
        if (group := self._group()) is None:
            return []
        engine = group.engine
        memory, faults = engine.memory, list[str]()
        held: dict[int, list[str]] = {page: [HOLDER] for page in memory.cached_pages()}
        slots: dict[int, list[str]] = {slot: [HOLDER] for slot in memory.cached_slots()}
        content: dict[int, tuple[object, ...]] = {}
        for sequence in (*engine.running, *engine.pulling, *engine.held):
            own_pages = sequence.holding.pages
            for slot in sequence.holding.slots():
                slots.setdefault(slot, []).append(sequence.name)
            if len(set(own_pages)) < len(own_pages):
                faults.append(f"{sequence.name} has a page twice in {own_pages}")
            for number, page in enumerate(own_pages, 1):
                held.setdefault(page, []).append(sequence.name)
                end = number * engine.page_size
                own = (sequence.request.params.cache_salt, *sequence.tokens[:end])
                if (other := content.setdefault(page, own)) is not own and (own != other or end > len(sequence.tokens)):
                    faults.append(f"page {page} is shared by sequences with different tokens: {sorted(held[page])}")
        for each in engine.waiting:
            if each.holding.pages or each.holding.slots():
                faults.append(f"waiting {each.name} has pages {each.holding.pages} and slots {each.holding.slots()}")
        faults += _unit_faults("page", memory.pages.units, held)
        if memory.slots is not None:
            faults += _unit_faults("slot", memory.slots.units, slots)
        for micro_batch, step in enumerate(engine.steps):
            for sequence, _ in step.parts if step is not None else ():
                if sequence not in engine.running or sequence.micro_batch != micro_batch:
                    faults.append(f"{sequence.name} is in the step of micro-batch {micro_batch}, without pages or in another one")
        if engine.claim is not None and engine.claim not in engine.running:
            faults.append(f"{engine.claim.name} claims the next free page and does not run")
        return [f"{self.name}: {fault}" for fault in faults]

    def sequences(self) -> list[EngineSequence]:
        """The sequences of the engine, for circular_waits."""
        if (group := self._group()) is None:
            return []
        engine, offers = group.engine, group.offers
        found = []
        for each in (*engine.running, *engine.pulling, *engine.held, *engine.waiting):
            attempt, offer = (each.request.id, each.request.attempt), None
            if each.kv is not None:
                offer = (each.kv.worker, each.kv.incarnation, each.kv.number)
            elif attempt in offers:
                offer = (self.name, self.worker.incarnation, offers[attempt])
            found.append(EngineSequence(self.name, attempt, each.name, each.state.name.lower(), offer))
        return found

    def branches(self) -> Counter[str]:
        """Counts of rare branches, which show whether the drawn cases ever reach them."""
        found = Counter[str]()
        group, runner, failover, links = self._group(), *map(self._part, ("runner", "failover", "links"))
        if group is not None:
            found["preempted"], found["tokens of the prefix cache"] = group.counts.num_preemptions, group.counts.num_prefix_hits
        if runner is not None:
            found["stale or late message dropped"] = runner.statistics.num_dropped
            edges = [edge for edge in self.worker.graph.edges.values() if self.worker.graph.nodes[edge.target].kind.forwards]
            found["part sent to a trampoline"] = sum(
                runner.statistics.sent[edge.id][0] for edge in edges if edge.id in runner.statistics.sent
            )
        if failover is not None:
            found["part redispatched"] = failover.client.num_redispatched
            found["part hedged"] = failover.client.hedging.num_hedged
        if links is not None:
            found["channel was full"] = sum(link.statistics().sends_waited for link in links.values())
            found["repeated message dropped"] = sum(link.statistics().messages_dropped for link in links.values())
        return found

    def leftovers(self) -> list[str]:
        """I8, when all requests have ended and no message is in flight: the state that should have been released."""
        return [f"{self.name}: {line}" for line in self.worker.leftovers()]

    def foreign(self, graph: Graph) -> list[str]:
        """What differs from this graph when it has held for a while: its edges, links and servers."""
        runner, links, failover = map(self._part, ("runner", "links", "failover"))
        if runner is None or self.name not in graph.process_names():
            return []
        edges = {edge.id: edge.name for edge in graph.edges.values() if graph.crosses(edge) and self.name in graph.ends_of(edge)}
        found = [f"edge {edges.get(edge, edge)} of {self.name}" for edge in sorted(runner.edge_ids() ^ edges.keys())]
        peers = {link.peer.name for link in links.values()} - {*neighbours(graph).get(self.name, ())}
        found += [f"the link from {self.name} to {peer}" for peer in sorted(peers)]
        if failover is not None:
            servers = {*servers_of(graph, next(node.name for node in graph.nodes_of(self.name) if node.kind.dispatches)).values()}
            found += [f"{self.name} knows the server {server}" for server in sorted(failover.processes - servers)]
        return found

    def uses_leaving(self) -> str | None:
        """What this worker, which knows who leaves, has at such a process, or as one; None: nothing."""
        graph, runner, group = self.worker.graph, self._part("runner"), self._group()
        if runner is None or not graph.leaving:
            return None
        if self.name in graph.leaving and group is not None and (group.engine.running or group.engine.waiting):
            return f"{self.name} has sequences"
        requests = {edge.response_to for edge in graph.edges.values()}
        to_leaving = (name for name in requests if name is not None and graph.ends_of(graph.edges[name])[1] in graph.leaving)
        credits = runner.snapshot().credits
        used = sorted(name for name in to_leaving if name in credits and credits[name][0] < credits[name][1])
        return f"{self.name} awaits responses to {used[0]}" if used and self.name not in graph.leaving else None

    def prefers_leaving(self) -> str | None:
        """A server that is leaving and that new parts may go to."""
        failover = self._part("failover") if self.worker.graph.leaving else None
        leaving = set() if failover is None else failover.client.servers.in_use().intersection(self.worker.graph.leaving)
        return f"{self.name} sends new parts to {min(leaving)}, which leaves the graph" if leaving else None

    def credits(self) -> tuple[Mapping[str, tuple[int, int]], Mapping[str, tuple[int, int]]]:
        """I4, at the same moment. Outbound edges: name -> (free credits, all credits). Incoming edges: name -> (outstanding credits of
        consumed messages, messages present but not consumed)."""
        runner = self._part("runner")
        if runner is None:
            return {}, {}
        now = runner.snapshot()
        return now.credits, now.consumed


@cache
def _sorted(names: frozenset[str]) -> list[str]:
    return sorted(names)


def credit_faults(insides: list[WorkerInternals]) -> list[str]:
    """I4 over all edges: when no message is in flight, free and outstanding credits add up to all credits."""
    faults, free, outstanding = list[str](), dict[str, tuple[int, int]](), Counter[str]()
    for inside in insides:
        outbound, inbound = inside.credits()
        free.update(outbound)
        for edge, (consumed, unconsumed) in inbound.items():
            outstanding[edge] += consumed
            if unconsumed:
                faults.append(f"edge {edge} into {inside.name}: {unconsumed} messages have arrived and were not consumed")
    faults += [
        f"edge {edge}: {count} credits of a dead client are outstanding"
        for edge, count in outstanding.items()
        if edge not in free and count
    ]
    for edge, (num_free, size) in sorted(free.items()):
        if num_free + outstanding[edge] != size:
            faults.append(f"edge {edge}: {num_free} free and {outstanding[edge]} outstanding credits, of {size}")
    return faults


def _unit_faults(what: str, units: PageAllocator, held: Mapping[int, Sequence[str]]) -> list[str]:
    """What is wrong with the pages or slots of an engine, of which `held` are in use, by the names of their users."""
    faults = []
    if len(held) + units.num_free != units.num_pages:
        faults.append(f"{len(held)} held and {units.num_free} free {what}s of {units.num_pages}")
    for unit, names in held.items():
        if units.holders_of(unit) != frozenset(names):
            faults.append(f"{what} {unit} is used by {sorted(names)}, held by {sorted(units.holders_of(unit))}")
    return faults
