"""The data path of a loaded worker: its runner, its links, and where the process has them its group and its failover."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from flowrt.actors.control import CallFailed, Control, EdgeStatistics, ExpertStatistics, NodeStatistics, Start, Statistics
from flowrt.actors.link_plan import plan_links
from flowrt.actors.links import LinkPlan, Links
from flowrt.dataflow.matching import Firing
from flowrt.dataflow.runner import Runner
from flowrt.dataflow.subgraph import NodeFunction, RoutedOutput
from flowrt.engine.constraint_builder import ConstraintBuilder
from flowrt.engine.engine import Engine
from flowrt.errors import OperatorError
from flowrt.exchange.dispatch import Dispatch
from flowrt.exchange.expert_client import ExpertClient
from flowrt.exchange.expert_service import ExpertService
from flowrt.exchange.failover import Failover
from flowrt.exchange.kv_transfer import KvPack, KvUnpack, TransferEnd
from flowrt.exchange.trampoline import Trampoline
from flowrt.graph.model import Edge, Graph
from flowrt.graph.numerics import is_strict
from flowrt.graph.placement import expert_map_of, servers_of
from flowrt.graph.recovery import survivable_processes
from flowrt.seams import Compute, Seams
from flowrt.transports.contract import Identity
from flowrt.transports.wire.message import Message, Tag
from flowrt.workers.emulated import EmulatedWorker
from flowrt.workers.group import Group
from flowrt.workers.message_schemas import edge_schemas
from flowrt.workers.model_nodes import config_of
from flowrt.workers.traced import TracedWorker


@dataclass(frozen=True)
class LoadedOperators:
    """The functions of a process's nodes, the clients of expert servers among them by dispatch node, and the ends of KV transfers: the
    sink `pack` or `unpack`, with its node.

    `strict_blocks`: the row blocks of strict numerics, as text. `files`: fingerprints of the model's files.
    """

    functions: Mapping[str, NodeFunction]
    clients: Mapping[str, ExpertClient]
    pack: tuple[str, KvPack] | None = None
    unpack: tuple[str, KvUnpack] | None = None
    strict_blocks: str = ""
    files: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(
        cls, loaded: Mapping[str, NodeFunction | TransferEnd], strict_blocks: str = "", files: Mapping[str, str] = {}
    ) -> LoadedOperators:
        """`loaded`: what build_model_nodes returned, and the functions of users."""
        functions = {node: each for node, each in loaded.items() if not isinstance(each, KvPack | KvUnpack)}
        clients = {node: each.client for node, each in functions.items() if isinstance(each, Dispatch)}
        pack = next(((node, each) for node, each in loaded.items() if isinstance(each, KvPack)), None)
        unpack = next(((node, each) for node, each in loaded.items() if isinstance(each, KvUnpack)), None)
        return cls(functions, clients, pack, unpack, strict_blocks, files)

    def renamed(self, names: Mapping[str, str]) -> LoadedOperators:
        """Returns those of the nodes `names[node]` of another process, whose operators are equal."""
        functions = {names[node]: function for node, function in self.functions.items()}
        clients = {names[node]: client for node, client in self.clients.items()}
        pack = None if self.pack is None else (names[self.pack[0]], self.pack[1])
        unpack = None if self.unpack is None else (names[self.unpack[0]], self.unpack[1])
        return replace(self, functions=functions, clients=clients, pack=pack, unpack=unpack)


@dataclass(frozen=True)
class WorkerContext:
    """What a worker gives to its parts. `send`, `when_sent`: see ControlLink."""

    graph: Graph
    start: Start
    seams: Seams
    compute: Compute
    emulated: EmulatedWorker | None
    send: Callable[[Control], None]
    when_sent: Callable[[Callable[[], None]], None]


class DataPath:
    """Owns the runner. Complete once created. `sink` takes the firings of nodes without a function, in place of a group; `on_lost` the lost
    peers; `traced` records what it does."""

    def __init__(
        self,
        context: WorkerContext,
        operators: LoadedOperators,
        on_lost: Callable[[Identity, str], None],
        sink: Callable[[Firing], None] | None = None,
        traced: TracedWorker | None = None,
    ) -> None:
        graph, start, seams, compute, emulated = context.graph, context.start, context.seams, context.compute, context.emulated
        self.name = name = start.name
        self._context, self._graph, self._sink, self._strict_blocks = context, graph, sink, operators.strict_blocks
        self._expert_services = [each for each in operators.functions.values() if isinstance(each, ExpertService)]
        plans = plan_links(graph, name)
        dispatch, client = next(iter(operators.clients.items()), ("", None))
        self._dispatch = dispatch
        self.hedges = client is not None and self._can_hedge(graph, client)
        device = torch.device(graph.devices.get(name, "cpu"))
        _, pack = operators.pack or ("", None)
        unpacks, unpack = operators.unpack or ("", None)
        nodes = graph.nodes_of(name)
        self._sinks = {node.name: node.kind.sink(pack, unpack, node) for node in nodes if node.kind.sink is not None}
        functions = operators.functions if emulated is None else emulated.charged(operators.functions)
        self.post: Callable[[Edge, Message], None] = self._post
        if traced is not None:
            compute, functions, self.post = traced.compute(compute), traced.functions(functions), traced.post(self._post)
        self.unpack = unpack
        self.group: Group | None = None
        self.failover: Failover | None = None
        self._traced = traced
        self.runner = Runner(
            graph,
            name,
            functions,
            compute,
            seams.clock,
            self,
            device,
            early=getattr(compute, "beside_loop", False),
            new_timer=seams.new_timer,
            compiled=seams.compiled,
            **self._edge_properties(graph, plans),
        )
        wrap = {"wrap": emulated.links.wrap} if emulated is not None else {}
        self.links = Links(
            Identity(name, start.incarnation),
            start.key,
            plans,
            seams.transport,
            self.runner.accept if traced is None else traced.accept(self.runner.accept),
            self.runner.settle,
            on_lost=on_lost,
            tolerated=survivable_processes(graph),
            host_address=seams.host_address,
            **wrap,
        )
        sources = [node for node in nodes if node.kind.schedules]
        if sources and graph.model is not None:
            config, dilation = config_of(graph), 1.0 if graph.emulation is None else graph.emulation.dilation
            engine = Engine(
                graph.limits_of(name),
                min(graph.micro_batches, graph.limits_of(name).max_micro_batches),
                config.max_position_embeddings,
                config.vocab_size,
                config.eos_token_ids,
                chunk_tokens=graph.limits.chunk_tokens if is_strict(graph, name) else 0,
                streams=any(node.kind.is_early for node in nodes),
                has_recurrent_layers=bool(config.recurrent_layers),
            )
            self.group = Group(
                sources[0],
                start.incarnation,
                engine,
                self.runner,
                context.send,
                context.when_sent,
                graph.limits_of(name).page_size,
                device,
                client,
                pack,
                unpack,
                lambda: seams.clock.now() / dilation,
                ConstraintBuilder(Path(graph.model.path), config.vocab_size, config.eos_token_ids).build,
                seams.new_compute,
            )
            if pack is not None:
                pack.connect(self.runner.respond)
            if unpack is not None:
                ports = {graph.nodes[edge.target].process: edge.source_port for edge in graph.edges_from(unpacks)}
                emit = partial(self.runner.emit, unpacks)
                unpack.connect(f"{unpacks}@{start.incarnation}", ports, emit, self.group.on_pulled, self.group.on_pull_failed)
            if client is not None:
                self.failover = Failover(graph, dispatch, client, self.runner, self.group)
        elif client is not None:
            self.failover = Trampoline(graph, dispatch, client, self.runner)

    def use(self, graph: Graph) -> None:
        """Use another version of the graph. Peers that are not in it were ended; those that are new are to be ended until they join."""
        plans, self._graph = plan_links(graph, self.name), graph
        self.runner.use(graph, **self._edge_properties(graph, plans))
        self.links.use(plans, survivable_processes(graph))
        if self.failover is not None:
            client, config = self.failover.client, config_of(graph)
            expert_map = expert_map_of(graph, self._dispatch, config.moe_layers, config.num_experts)
            client.servers.place(expert_map, servers_of(graph, self._dispatch), graph.leaving)
            self.failover.use(graph)
            self.hedges = self._can_hedge(graph, client)
        if self._traced is not None:
            self._traced.use(graph)

    def is_drained(self) -> bool:
        """Whether nothing of this worker is left at processes that are leaving, nor here if it is one."""
        leaving = [process for process in self._graph.leaving if process != self.name]
        if self.group is not None and self.name in self._graph.leaving and not self.group.is_idle:
            return False
        if self.failover is not None and any(map(self.failover.client.has_parts_of, leaving)):
            return False
        return not any(map(self.runner.is_waiting_for, leaving))

    def _can_hedge(self, graph: Graph, client: ExpertClient) -> bool:
        return client.servers.has_replicas() and {*client.processes.values()} != {self.name} and graph.reliability.hedge

    def _edge_properties(self, graph: Graph, plans: Iterable[LinkPlan]) -> dict[str, Any]:
        """What the runner must know of the edges, see OutboundEdges."""
        abilities = {plan.scheme: self._context.seams.transport(plan.scheme).capabilities for plan in plans}
        edges = [(edge.id, abilities[edge.transport]) for edge in graph.edges.values() if edge.transport in abilities]
        return {
            "staying": {edge for edge, each in edges if not each.between_processes},
            "on_device": {edge for edge, each in edges if each.device_memory},
            "schemas": edge_schemas(graph),
        }

    def statistics(self) -> Statistics:
        counters = self.runner.statistics
        edges = tuple(self._edge_statistics(edge) for edge in self._graph.edges.values() if edge.id in counters.sent)
        waiting = self.runner.num_waiting()
        statistics = Statistics(
            edges=edges,
            nodes=tuple(
                NodeStatistics(node, each.num_calls, each.num_firings, each.compute_seconds, waiting.get(node, 0))
                for node, each in counters.nodes.items()
            ),
            experts=tuple(
                ExpertStatistics(layer, tuple(pairs), tuple(pairs.values()))
                for service in self._expert_services
                for layer, pairs in service.num_pairs().items()
            ),
            num_firings=counters.num_firings,
            compute_seconds=counters.compute_seconds,
            inline_seconds=counters.inline_seconds,
            late_wakeups=sum(link.statistics().late_wakeups for link in self.links.values()),
            resident_bytes=self._context.seams.resident_bytes(),
            strict_blocks=self._strict_blocks,
            emulation=emulated.statistics() if (emulated := self._context.emulated) is not None else None,
            num_redispatched=self.failover.client.num_redispatched if self.failover is not None else 0,
            map_version=self.failover.client.servers.map_version if self.failover is not None else 0,
        )
        return statistics if self.group is None else self.group.with_counts(statistics)

    def leftovers(self) -> list[str]:
        """What is left when all requests have ended and no message is in flight."""
        parts = self.group, self.unpack, self.failover, self.links
        left = [f"runner: {line}" for line in self.runner.leftovers()]
        return left + [line for part in parts if part is not None for line in part.leftovers()]

    def _edge_statistics(self, edge: Edge) -> EdgeStatistics:
        sent, times = self.runner.statistics.sent[edge.id], self.runner.edge_times[edge.id]
        latency = times.latency
        counts = tuple(latency.counts) if latency.count else ()
        return EdgeStatistics(edge.name, edge.transport, sent[0], sent[1], times.wait_seconds, latency.total, counts)

    def _post(self, edge: Edge, message: Message) -> None:
        self.links.by_edge[edge.id].post(message)

    # What the runner calls.

    def on_sink(self, firing: Firing) -> None:
        if (sink := self._sink or self._sinks.get(firing.node)) is None:
            group = self.group
            assert group is not None, firing.node
            sink = group.on_step_end
        sink(firing)

    def on_response(self, edge: int, tag: Tag, message: Message) -> None:
        if self.failover is not None:
            self.failover.on_response(edge, tag, message)

    def on_unsent(self, output: RoutedOutput) -> None:
        if self.failover is not None:
            self.failover.on_unsent(output)

    def on_failed(self, tag: Tag, error: OperatorError) -> None:
        if self._graph.model is None:
            self._context.send(CallFailed(tag.source, tag.step, str(error), error.node))
        elif self.unpack is None or not self.unpack.on_error(tag, str(error)):
            if self.group is not None:
                self.group.fail_step(tag, error)
            elif isinstance(self.failover, Trampoline):
                self.failover.fail(tag, error)
            else:
                raise error
