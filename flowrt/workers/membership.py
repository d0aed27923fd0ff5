"""A worker's reaction when another process dies, and when its next incarnation joins.

The worker creates one Membership per incarnation when its links are up. flowrt/exchange/failover.py redispatches lost parts.

Events may come twice and in any order: a link may end before or after the launcher's notification. `Links.incarnations` knows which
incarnations live, and each ends once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping

from flowrt.actors.control import (
    Control,
    DeathCause,
    ExpertsUnavailable,
    GraphChanged,
    LateResponse,
    LinkLost,
    Listening,
    PeerJoined,
    PeerLeft,
)
from flowrt.actors.links import Links
from flowrt.actors.probed_link import PROBE_SECONDS
from flowrt.exchange.failover import Failover
from flowrt.graph.model import Graph
from flowrt.graph.recovery import neighbours
from flowrt.seams import Clock
from flowrt.transports.contract import Identity
from flowrt.transports.wire.message import Tag
from flowrt.workers.data_path import DataPath
from flowrt.workers.group import Group

POLL_SECONDS, IDLE_POLL_SECONDS = 5e-3, 20e-3  # between polls for late and waiting parts: with a tag outstanding, and without
REPORT_SECONDS = 1.0  # between two reports about one server


async def listen_more(links: Links, send: Callable[[Control], None]) -> None:
    """Listen where links of a changed graph need it, and report it: then peers that could not link yet join."""
    before = links.addresses
    if (addresses := await links.listen()) != before:
        send(Listening(addresses))


class Membership:
    """Handles lost and joined peers.

    `tasks` owns the tasks started here. `incarnations`: the initial ones. A peer whose incarnation has ended, or that has none, counts as
    lost until it joins. `restarting`: those that a recovery policy restarts.
    """

    def __init__(
        self,
        graph: Graph,
        data_path: DataPath,
        send: Callable[[Control], None],
        clock: Clock,
        tasks: asyncio.TaskGroup,
        incarnations: Mapping[str, str],
        restarting: Collection[str] = (),
    ) -> None:
        self._links, self._runner, self._send, self._clock, self._tasks = data_path.links, data_path.runner, send, clock, tasks
        self._data_path, self._unpack, self._failover = data_path, data_path.unpack, data_path.failover
        settings = graph.reliability
        self._unavailable_expert_seconds, self._degrades = settings.unavailable_expert_seconds, settings.unavailable_expert == "degrade"
        self._restarting = set(restarting)  # by a recovery policy; meanwhile, no unavailable expert is given up
        self._latest_report = ExpertsUnavailable("")
        self._is_needed = asyncio.Event()  # a step has begun, or a server was lost
        self._reported_at: dict[str, float] = {}  # process -> when last
        self._sources = self._sources_of(graph)
        for process in sorted(self._sources):
            if (current := self._links.incarnations.current(process)) is None:
                self._lose(process, incarnations.get(process, ""))
            else:
                self._use(current)
        if graph.version:
            self._confirm_version(graph)
        if (
            any(node.kind.kv for node in graph.nodes_of(data_path.name)) and graph.emulation is None
        ):  # modelled links may take as long as they please
            tasks.create_task(self._watch_links(), name=f"probes of {data_path.name}")
        if data_path.failover is not None and data_path.failover.processes:
            if data_path.group is not None:
                data_path.group.on_begin = self._is_needed.set
            tasks.create_task(self._watch_parts(data_path.failover, data_path.group), name=f"parts of {data_path.name}")

    def ended_sources(self) -> set[str]:
        """The sources of the tags of the incarnations that have ended."""
        ended = self._links.incarnations.ended()
        return {f"{source}@{each.incarnation}" for each in ended for source in self._sources.get(each.name, ())}

    def on_lost(self, peer: Identity, reason: str) -> None:
        """Handle the end of the link to this incarnation."""
        if peer.name not in self._sources:
            return  # it has left the graph
        self._lose(peer.name, peer.incarnation)
        self._send(LinkLost(peer.name, reason, peer.incarnation))

    def use(self, graph: Graph) -> None:
        """Use another version of the graph. A peer that is new counts as lost until it joins. One that is not in it has ended: others
        compute what it was to compute."""
        sources = self._sources_of(graph)
        for process in sorted(self._sources.keys() - sources.keys()):
            if (current := self._links.incarnations.current(process)) is not None:
                self._links.drop(process, current.incarnation)
                self._lose(process, current.incarnation)
            if self._failover is not None:
                self._failover.settle(process, DeathCause(process, "", "has left the graph", is_on_purpose=True))
        self._data_path.use(graph)
        joining, self._sources = sorted(sources.keys() - self._sources.keys()), sources
        for process in joining:
            self._lose(process, "")
        self._tasks.create_task(self._links.close_unplanned(), name=f"unplanned links of {self._data_path.name}")
        self._tasks.create_task(listen_more(self._links, self._send), name=f"new listeners of {self._data_path.name}")
        self._confirm_version(graph)

    def _sources_of(self, graph: Graph) -> dict[str, list[str]]:
        """Returns the nodes that emit the tags of each peer."""
        here = (edge for node in graph.nodes_of(self._data_path.name) if node.kind.kv for edge in graph.edges_from(node.name))
        self._pulls = frozenset(edge.id for edge in here if graph.nodes[edge.target].kind.kv == "offers")
        peers = neighbours(graph).get(self._data_path.name, ())
        return {process: [node.name for node in graph.nodes_of(process) if node.kind.emits] for process in peers}

    def _confirm_version(self, graph: Graph) -> None:
        self._tasks.create_task(self._confirm(graph), name=f"version {graph.version} in {self._data_path.name}")

    async def _confirm(self, graph: Graph) -> None:
        """Report that this version is used, once nothing is left at processes that are leaving."""
        while not self._data_path.is_drained():
            await self._clock.sleep(POLL_SECONDS)
        self._send(GraphChanged(graph.version))

    def on_control(self, control: PeerLeft | PeerJoined | DeathCause) -> None:
        if control.process not in self._sources:
            return  # it has left the graph
        if isinstance(control, PeerJoined):
            self._tasks.create_task(self._join(control), name=f"join {control.process}")
            return
        if isinstance(control, DeathCause):
            if self._failover is not None:
                self._drop_cancelled()
                self._failover.settle(control.process, control)
            return
        (self._restarting.add if control.is_restarting else self._restarting.discard)(control.process)
        if self._links.drop(control.process, control.incarnation):
            self._lose(control.process, control.incarnation)

    def _lose(self, process: str, incarnation: str) -> None:
        self._is_needed.set()
        sources = [f"{source}@{incarnation}" for source in self._sources[process]]
        awaited = set[Tag]().union(*map(self._runner.awaited, () if self._failover is None else self._failover.ways_to(process)))
        self._runner.end_peer(process, sources)
        if self._unpack is not None:
            self._unpack.on_lost(process)
        if self._failover is not None:
            self._failover.mark_lost(process, sources, awaited)

    async def _join(self, joined: PeerJoined) -> None:
        if await self._links.join(joined.process, joined.incarnation, joined.addresses) and joined.process in self._sources:
            self._restarting.discard(joined.process)
            self._runner.join_peer(joined.process)
            self._use(Identity(joined.process, joined.incarnation))

    def _use(self, peer: Identity) -> None:
        if self._unpack is not None:
            self._unpack.on_joined(peer.name, peer.incarnation)
        if self._failover is not None:
            self._drop_cancelled()
            self._failover.mark_joined(peer.name)

    def _drop_cancelled(self) -> None:
        if self._data_path.group is not None:
            self._data_path.group.drop_cancelled()

    async def _watch_links(self) -> None:
        """Probe the links between prefill workers and groups, which may break without an error, while a pull or a part of an expert has no
        response. A pull that was cancelled does not count: its worker may stand still, and have been marked dead."""
        while True:
            await self._clock.sleep(PROBE_SECONDS)
            for process in self._sources:
                awaits_kv = self._unpack is not None and self._unpack.is_waiting_for(process)
                self._links.check(process, awaits_kv or self._runner.is_waiting_for(process, self._pulls))

    async def _watch_parts(self, failover: Failover, group: Group | None) -> None:
        """Watch the outstanding parts of a group. A trampoline has none: its groups hedge, and it lets no part wait for a replica."""
        while True:
            if self._has_no_part(failover, group):
                self._is_needed.clear()
                await self._is_needed.wait()
            await self._clock.sleep(IDLE_POLL_SECONDS if not failover.client.tags else POLL_SECONDS)
            for process in [process for process, until in failover.client.servers.due.items() if until <= self._clock.now()]:
                self._drop_cancelled()
                failover.settle(process, None)
            if group is None:
                continue
            if self._data_path.hedges:
                failover.hedge()
                self._report_late_servers(failover)
            if failover.client.has_waiting_parts:
                failover.redispatch_waiting()
            text = failover.unavailable_text()
            if text is None:
                group.accept()
                self._report_unavailable(ExpertsUnavailable(""))
                continue
            if self._restarting & failover.processes:
                failover.client.servers.omitted.postpone()
            if self._degrades:
                if failover.client.servers.omitted.omit_unavailable(self._unavailable_expert_seconds):
                    group.roll_back()  # steps that wait for these experts are computed again without them
                self._report_unavailable(ExpertsUnavailable(text, "degrade" if failover.client.servers.omitted.has_omitted else "wait"))
            elif failover.client.servers.omitted.unavailable_seconds >= self._unavailable_expert_seconds:
                group.refuse(text)
                self._report_unavailable(ExpertsUnavailable(text, "error"))
            else:
                group.accept()  # others may have been the reason to refuse
                self._report_unavailable(ExpertsUnavailable(text, "wait"))

    def _has_no_part(self, failover: Failover, group: Group | None) -> bool:
        """Whether nothing is to be watched until a step begins or a server is lost."""
        if failover.client.servers.due or group is None:
            return not failover.client.servers.due
        if not group.is_idle or failover.client.tags:
            return False
        return not self._latest_report.text and failover.unavailable_text() is None

    def _report_unavailable(self, lost: ExpertsUnavailable) -> None:
        if lost != self._latest_report:
            self._latest_report = lost
            self._send(lost)

    def _report_late_servers(self, failover: Failover) -> None:
        """Report servers whose response is long overdue."""
        for process, (waited, usual) in failover.overdue().items():
            now, peer = self._clock.now(), self._links.incarnations.current(process)
            if peer is not None and now >= self._reported_at.get(process, now - REPORT_SECONDS) + REPORT_SECONDS:
                self._reported_at[process] = now
                self._send(LateResponse(process, peer.incarnation, waited, usual))
