"""Reads the internal state of a simulated worker: the pages of its engine, the rows and credits of its runner.

Only this module and modelled_time.py read private attributes of workers, so that a change there needs few changes here. This module
modifies a worker in two ways only: it replaces the model before the worker loads, and it rolls back a group, which otherwise only lost
experts cause.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from importlib import import_module
from typing import Any

from flowrt.engine.prefix_cache import HOLDER
from flowrt.simulation.page_waits import EngineSequence
from flowrt.simulation.waitables import current_node
from flowrt.simulation.wrong_results import WrongResults

EXACT_MODEL = "flowrt.workers.exact_nodes"  # these import torch, so they are imported when used
START_CHECK = "flowrt.workers.start_check"
DISPATCH, DATA_PATH = "flowrt.exchange.dispatch", "flowrt.workers.data_path"
REPLICA_TABLE = "flowrt.operators.replica_table"


class WorkerInternals:
    """A view of one worker, by its Worker object."""

    def __init__(self, worker: Any) -> None:
        self._worker = worker
        self.node = current_node.get()
        self._rolled_back_during: float | None = None  # start of the call during which the group began its epoch
        self._ended_during: dict[str, float | None] = {}  # source of an ended client -> start of the call that ran at that time
        self.late_firings: list[str] = []

    @property
    def name(self) -> str:
        """A standby process has a name of its own until it becomes a worker of the graph."""
        name: str = self._worker._start.name
        return name

    def when_named(self, call: Callable[[], None]) -> None:
        """Call `call` once the worker is one of the graph: now, or when a standby process becomes one."""
        worker = self._worker
        apply_start = worker._apply_start

        def begin(start: Any) -> None:
            apply_start(start)
            call()

        if worker._start.loads:
            worker._apply_start = begin
        else:
            call()

    def use_exact_model(self, wrong: WrongResults, on_poison: Callable[[str, bool], None]) -> None:
        """Use the exact integer model instead of weights, with wrong results. Call it before the worker loads. `on_poison(process, hangs)`
        is called when the poison ends the process: it kills the process, or stops its compute thread."""
        worker = self._worker
        build, check_process = import_module(EXACT_MODEL).build_exact_nodes, import_module(START_CHECK).check_process

        def load(name: str) -> Any:
            users = check_process(worker._graph, name)
            operators = import_module(DATA_PATH).LoadedOperators.of(users | build(worker._graph, name, worker._seams.clock.now))
            end = partial(self._end, wrong.hangs, on_poison)
            wrapped = {node: wrong.wrap(worker._graph.nodes[node], function, end) for node, function in operators.functions.items()}
            return replace(operators, functions={node: self._checked(function) for node, function in wrapped.items()} | users)

        make_data_path = worker._make_data_path

        def make(operators: Any) -> Any:
            data_path = make_data_path(operators)
            self._watch_epochs(data_path.group)
            self._watch_ends(data_path.runner)
            return data_path

        worker._load, worker._make_data_path = load, make

    def _watch_epochs(self, group: Any) -> None:
        """Record the running call at each rollback of this group."""
        if group is not None:
            engine, worker = group._engine, self._worker
            roll_back = engine.roll_back

            def noted() -> Any:
                running = worker._compute.running
                self._rolled_back_during = None if running is None else running.since_seconds
                return roll_back()

            engine.roll_back = noted

    def _watch_ends(self, runner: Any) -> None:
        """Record the running call at each end of a client."""
        end_peer = runner.end_peer

        def noted(peer: str, sources: Sequence[str] = ()) -> Any:
            running = self._worker._compute.running
            self._ended_during |= dict.fromkeys(sources, None if running is None else running.since_seconds)
            return end_peer(peer, sources)

        runner.end_peer = noted

    def _checked(self, function: Any) -> Any:
        """Wraps `function` with check I2: a worker computes no firing of a client that has ended, a group none of another incarnation and
        none of an epoch that it has left, except in the call that ran at that time."""

        def run(firings: Any) -> Any:
            engine = self._engine
            foreign = [] if engine is None else [each for each in firings if each.tag.source != self._part("group")._source]
            old = [] if engine is None or foreign else [firing for firing in firings if firing.tag.epoch < engine.epoch]
            if foreign and not self._worker._graph.nodes[foreign[0].node].kind.holds_experts:
                self.late_firings.append(f"{self.name}: {foreign[0].node} fired for {foreign[0].tag} of another incarnation")
            if old and not began(self._rolled_back_during):
                self.late_firings.append(f"{self.name}: {old[0].node} fired for {old[0].tag} in epoch {engine.epoch}")
            ended = self._ended_during and [each for each in firings if each.tag.source in self._ended_during]
            if ended and not began(self._ended_during[ended[0].tag.source]):
                self.late_firings.append(f"{self.name}: {ended[0].node} fired for {ended[0].tag} of a client that has ended")
            return function(firings)

        def began(since_seconds: float | None) -> bool:
            """Whether the running call began then."""
            running = self._worker._compute.running
            return running is not None and running.since_seconds == since_seconds

        return run

    def _end(self, hangs: bool, on_poison: Callable[[str, bool], None]) -> None:
        """The poison ends the process, or `hangs` it if the call runs on the compute thread."""
        compute = getattr(self._worker._compute, "_inner", self._worker._compute)  # of emulated hardware
        hangs = hangs and not compute.is_inline
        compute.never_ends = True
        on_poison(self.name, hangs)

    def _part(self, name: str) -> Any:
        """The runner, links, group or failover of the worker; None before it has loaded."""
        return None if self._worker._data_path is None else getattr(self._worker._data_path, name)

    @property
    def _engine(self) -> Any:
        data_path = self._worker._data_path
        return None if data_path is None or data_path.group is None else data_path.group._engine

    @property
    def num_firings(self) -> int:
        runner = self._part("runner")
        return 0 if runner is None else int(runner.statistics.num_firings)

    @property
    def computes(self) -> bool:
        """Whether a call is running. A call that began under a slow fault may outlast all faults and requests."""
        return self._worker._compute.running is not None

    # expert servers from the view of an attention worker

    @property
    def servers(self) -> list[str]:
        """The expert servers that this worker sends requests to."""
        failover = self._part("failover")
        return [] if failover is None else _sorted(failover.processes)

    def has_ended(self, server: str, incarnation: str) -> bool:
        membership = self._worker._membership
        return membership is not None and incarnation in membership._ended._ended.get(server, ())

    def uses(self, server: str, incarnation: str) -> bool:
        """Whether the worker sends parts to this incarnation of the server."""
        failover, links = self._part("failover"), self._part("links")
        if failover is None or links is None or self.has_ended(server, incarnation):
            return False
        numbers = failover._servers[server]
        peers = {link.peer.incarnation for (peer, _), link in links._links.items() if peer == server}
        is_bypassed = failover._trampolines.get(server) in failover.client.trampolines.lost
        return peers == {incarnation} and not is_bypassed and not any(number in failover.client.lost for number in numbers)

    def undispatched(self) -> set[tuple[Any, int]]:
        """Parts, by tag and number, that wait for a replica of their experts although the worker knows an available one."""
        failover, runner = self._part("failover"), self._part("runner")
        if failover is None or runner is None:
            return set()
        client, nowhere = failover.client, frozenset({import_module(REPLICA_TABLE).UNAVAILABLE})
        return {
            (tag, part)
            for tag in client.tags
            for part in client.parts_at(nowhere, tag, runner.missing(failover._combine, failover._gather, tag))
        }

    def held(self) -> set[tuple[Any, str]]:
        """Bundles and responses, by tag and node, that this trampoline has received and not sent on, although it computes nothing."""
        runner = self._part("runner")
        return (
            set()
            if runner is None or self.computes
            else {(each.tag, node) for node in runner._forwarding for each in runner._ready.get(node, ())}
        )

    def unsettled(self) -> list[str]:
        """Lost servers whose pending parts wait until the cause of the death is known."""
        membership = self._worker._membership
        return [] if membership is None or not membership._settle_at else sorted(membership._settle_at)

    def alone(self) -> str | None:
        """The id of the latest suspect that the group has begun to compute alone; None if any other is in a step."""
        group, engine = self._part("group"), self._engine
        if group is None or (alone := group._alone) is None:
            return None
        in_steps = {sequence.name for step in engine._steps if step is not None for sequence, _ in step.parts}
        return str(alone.request.id) if in_steps <= {alone.name} else None

    def kept_of_ended(self) -> list[str]:
        """At any time: what the worker keeps of clients whose incarnation it knows to have ended. A running call may add rows to its
        end."""
        runner, membership = self._part("runner"), self._worker._membership
        if runner is None or membership is None:
            return []
        by_process = membership._ended._ended.items()
        ended = {f"{source}@{end}" for process, ends in by_process for end in ends for source in membership._sources.get(process, ())}
        if not ended:
            return []
        found = {"ready firings": {firing.tag.source for firings in runner._ready.values() for firing in firings}}
        if not self.computes:
            found["rows"] = {tag.source for _, tag in runner._table._rows} | {key[1] for key in runner._table._held}
        found["outputs"] = {output.tag.source for each in runner._outbound.edges.values() for output in each.pending}
        kept = [(what, source) for what, sources in found.items() if sources for source in sorted(sources & ended)]
        return [f"{self.name} keeps {what} of {source}" for what, source in kept]

    @property
    def has_engine(self) -> bool:
        return self._engine is not None

    def roll_back(self) -> bool:
        """Begin a new epoch of the worker's group. False: not now, since something computes that may write into its pages."""
        worker = self._worker
        if worker._compute.running is not None:
            return False
        self._part("group").roll_back()
        return True

    def waiting(self) -> list[str]:
        """What waits for what: the lines of the runner, and the counts of the engine."""
        runner, engine = self._part("runner"), self._engine
        lines = [] if runner is None else [f"{self.name}: {line}" for line in runner.waiting()]
        if engine is not None and not engine.idle:
            counts = engine.statistics()
            pages = f"{counts.num_free_pages} of {counts.num_pages} pages free"
            lines.append(f"{self.name}: engine has {counts.num_running} running and {counts.num_waiting} waiting sequences, {pages}")
        return lines

    def page_faults(self) -> list[str]:
        """I3, at any time: each page is free or held, only sequences with the same tokens up to its end share a page, and waiting
        sequences hold none."""
        engine = self._engine
        if engine is None:
            return []
        scheduler = engine._scheduler
        pages, faults = scheduler.pages, list[str]()
        held: dict[int, list[str]] = {page: [HOLDER] for segment in scheduler._cache._segments.values() for page in segment.pages}
        content: dict[int, tuple[object, ...]] = {}
        for sequence in (*scheduler.running, *scheduler.pulling, *scheduler.held):
            if len(set(sequence.pages)) < len(sequence.pages):
                faults.append(f"{sequence.name} has a page twice in {sequence.pages}")
            for number, page in enumerate(sequence.pages, 1):
                held.setdefault(page, []).append(sequence.name)
                end = number * engine._limits.page_size
                own = (sequence.request.params.cache_salt, *sequence.tokens[:end])
                if (other := content.setdefault(page, own)) is not own and (own != other or end > len(sequence.tokens)):
                    faults.append(f"page {page} is shared by sequences with different tokens: {sorted(held[page])}")
        faults += [f"waiting {sequence.name} has pages {sequence.pages}" for sequence in scheduler.waiting if sequence.pages]
        if len(held) + pages.num_free != pages.num_pages:
            faults.append(f"{len(held)} held and {pages.num_free} free pages of {pages.num_pages}")
        for page, names in held.items():
            if pages.holders_of(page) != frozenset(names):
                faults.append(f"page {page} is used by {sorted(names)}, held by {sorted(pages.holders_of(page))}")
        for micro_batch, step in enumerate(engine._steps):
            for sequence, _ in step.parts if step is not None else ():
                if sequence not in scheduler.running or sequence.micro_batch != micro_batch:
                    faults.append(f"{sequence.name} is in the step of micro-batch {micro_batch}, without pages or in another one")
        if (claim := scheduler._claim) is not None and claim not in scheduler.running:
            faults.append(f"{claim.name} claims the next free page and does not run")
        return [f"{self.name}: {fault}" for fault in faults]

    def sequences(self) -> list[EngineSequence]:
        """The sequences of the engine, for circular_waits."""
        group, engine = self._part("group"), self._engine
        if engine is None:
            return []
        scheduler, offers = engine._scheduler, {} if group._pack is None else group._pack._offers
        found = []
        for each in (*scheduler.running, *scheduler.pulling, *scheduler.held, *scheduler.waiting):
            attempt, offer = (each.request.id, each.request.attempt), None
            if each.kv is not None:
                offer = (each.kv.worker, each.kv.incarnation, each.kv.number)
            elif attempt in offers:
                offer = (self.name, self._worker.incarnation, offers[attempt].number)
            found.append(EngineSequence(self.name, attempt, each.name, each.state.name.lower(), offer))
        return found

    def branches(self) -> Counter[str]:
        """Counts of rare branches, which show whether the drawn cases ever reach them."""
        found = Counter[str]()
        engine, runner, links = self._engine, self._part("runner"), self._part("links")
        if engine is not None:
            counts = engine.statistics()
            found["preempted"], found["tokens of the prefix cache"] = counts.num_preemptions, counts.num_prefix_hits
        if runner is not None:
            found["stale or late message dropped"] = runner.statistics.num_dropped
            found["bundle sent"] = sum(each.sent[0] for each in runner._outbound.edges.values() if each.relays == "bundles")
        if (failover := self._part("failover")) is not None:
            found["part redispatched"] = failover.client.num_redispatched
            found["part hedged"] = failover.client.hedging.num_hedged
        if links is not None:
            found["channel was full"] = sum(link.statistics().sends_waited for link in links.values())
            found["repeated message dropped"] = sum(link.statistics().messages_dropped for link in links.values())
        return found

    def leftovers(self) -> list[str]:
        """I8, when all requests have ended and no message is in flight: the state that should have been released."""
        worker, left = self._worker, []
        engine, runner = self._engine, self._part("runner")
        if engine is not None:
            counts = engine.statistics()
            if not engine.idle or counts.num_running or counts.num_waiting:
                left.append(f"engine: {counts.num_running} running, {counts.num_waiting} waiting sequences")
            if counts.num_free_pages != counts.num_pages:
                left.append(f"engine: {counts.num_free_pages} of {counts.num_pages} pages free")
        if runner is not None:
            left += [f"runner: {line}" for line in runner.waiting()]
            if len(runner._table):
                left.append(f"runner: {len(runner._table)} rows or held firings")
            left += [f"runner: {len(firings)} firings of {node} never fired" for node, firings in runner._ready.items()]
            requests = {each.edge.name: len(each.outstanding) for each in runner._outbound.edges.values() if each.outstanding}
            left += [f"runner: {count} requests of {edge} without a response" for edge, count in requests.items()]
        if (unpack := self._part("unpack")) is not None:
            left += [f"transfer of {key[0]}, attempt {key[1]}" for key in unpack._transfers] + [f"pull {step}" for step in unpack._by_step]
        if (group := self._part("group")) is not None and group._pack is not None:
            left += [f"offer of {key[0]}, attempt {key[1]}" for key in group._pack._offers]
            left += [f"extra tensors of {key[0]}, attempt {key[1]}" for key in group._pack.extras._prompts]
        if (failover := self._part("failover")) is not None:
            left += [f"parts of {tag}" for tag in failover.client.tags]
            left += [f"trampoline {number} counts as late" for number in failover.client.trampolines.late]
        if (links := self._part("links")) is not None:
            left += [f"outbox to {link.peer.name}: {len(link._outbox)} messages" for link in links.values() if len(link._outbox)]
        if worker._compute.running is not None:
            left.append(f"computing {worker._compute.running.label}")
        return [f"{self.name}: {line}" for line in left]

    def credits(self) -> tuple[dict[str, tuple[int, int]], dict[str, tuple[int, int]]]:
        """I4, at the same moment. Outbound edges: name -> (free credits, all credits). Incoming edges: name -> (outstanding credits of
        consumed messages, messages present but not consumed)."""
        runner = self._part("runner")
        if runner is None:
            return {}, {}
        free = {each.edge.name: (each.free, each.size) for each in runner._outbound.edges.values() if each.size}
        inbound = [edge for edge in runner._inbound.edges.values() if edge.size]
        outstanding = {each.edge.name: (each.consumed, each.received - each.consumed) for each in inbound}
        return free, outstanding


@cache
def _sorted(names: frozenset[str]) -> list[str]:
    return sorted(names)


def credit_faults(insides: list[WorkerInternals]) -> list[str]:
    """I4 over all edges: when no message is in flight, free and outstanding credits add up to all credits."""
    faults, free, outstanding = [], {}, Counter[str]()
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
