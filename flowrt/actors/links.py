"""Opens and closes all links of one worker to the others. No other module opens channels of the data path.

link.py reads and sends on one link; flowrt/dataflow interprets the messages.

A peer that may die has several incarnations. When one ends, its links are closed; a later incarnation is linked like the first.
Incarnations decides at once, without waiting, which incarnation is current; closing and connecting follow.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial

from flowrt.actors.lazy_channel import LazyChannel
from flowrt.actors.lazy_opener import connect_with_retries
from flowrt.actors.link import LOST, Link, LinkLostError
from flowrt.actors.probed_link import ProbedLink
from flowrt.transports.contract import Channel, HostAddress, Identity, Limits, Listener, Transport
from flowrt.transports.errors import BrokenChannelError, TransportError
from flowrt.transports.wire.message import Message

__all__ = ["LOST", "Link", "LinkLostError", "LinkPlan", "Links"]


MAX_ENDED = 64  # remembered per process: no notice about an older incarnation comes


class Callers:
    """Accepted channels by process and scheme, the latest of each: of planned links, and of processes that joined the run before the notice
    of it came here."""

    def __init__(self) -> None:
        self._here: dict[tuple[str, str], Channel] = {}
        self._changed: asyncio.Future[None] | None = None

    def put(self, channel: Channel, scheme: str) -> Channel | None:
        """Keep a channel. Returns the one that it replaces, which the caller closes."""
        key = channel.peer.name, scheme
        replaced, self._here[key] = self._here.get(key), channel
        if self._changed is not None and not self._changed.done():
            self._changed.set_result(None)
        return replaced

    def take(self, identity: Identity, scheme: str) -> Channel | None:
        """The channel of exactly this incarnation, if it has connected."""
        key = identity.name, scheme
        channel = self._here.get(key)
        return self._here.pop(key) if channel is not None and channel.peer == identity else None

    async def wait(self, identity: Identity, scheme: str) -> Channel:
        """The channel of exactly this incarnation, once it connects. A channel of another one stays: it may be a later incarnation."""
        while (channel := self.take(identity, scheme)) is None:
            if self._changed is None or self._changed.done():
                self._changed = asyncio.get_running_loop().create_future()
            await asyncio.wait([self._changed])  # several tasks may wait; cancelling one does not cancel the others
        return channel

    def forget(self, process: str, scheme: str) -> Channel | None:
        """Returns the channel of a process that has no link any more."""
        return self._here.pop((process, scheme), None)

    async def aclose(self) -> None:
        """Close the channels that were never taken."""
        while self._here:
            await self._here.popitem()[1].aclose()


class Incarnations:
    """The incarnations of all peers of one worker, each identified by process name and incarnation."""

    def __init__(self) -> None:
        self._current: dict[str, Identity] = {}  # by process
        self._ended: defaultdict[str, deque[str]] = defaultdict(partial(deque, maxlen=MAX_ENDED))  # by process

    def current(self, process: str) -> Identity | None:
        """The current incarnation of `process`, or None."""
        return self._current.get(process)

    def begin(self, identity: Identity) -> bool:
        """Make `identity` the current incarnation of its process. Returns False, without effect, when it has already ended."""
        if self.has_ended(identity):
            return False
        before = self.current(identity.name)
        if before is not None and before != identity:
            self._ended[before.name].append(before.incarnation)
        self._current[identity.name] = identity
        return True

    def end(self, identity: Identity) -> bool:
        """Mark `identity` as ended, whether or not it had begun. True when it was current until now."""
        if not self.has_ended(identity):
            self._ended[identity.name].append(identity.incarnation)
        if self._current.get(identity.name) != identity:
            return False
        del self._current[identity.name]
        return True

    def ended(self) -> Iterator[Identity]:
        """The incarnations that have ended, the latest MAX_ENDED of each process."""
        return (Identity(process, each) for process, ended in self._ended.items() for each in ended)

    def has_ended(self, identity: Identity) -> bool:
        return identity.incarnation in self._ended[identity.name]


@dataclass(frozen=True)
class LinkPlan:
    """One link that this worker needs: its peer, scheme and bounds, and whether this end connects."""

    peer: str
    scheme: str
    limits: Limits
    capacity_messages: int
    connects: bool
    link: str | None = None  # the profile that the channel emulates
    is_lazy: bool = False  # the first sender opens it; both ends plan alike
    edges: tuple[int, ...] = ()  # ids of the edges that it carries
    carries_kv: bool = False  # its channel may break without an error, so it is probed; both ends plan alike


class Links:
    """All links of one worker. Use: `listen`, publish the addresses, `open` with the addresses of all processes, then `run`.

    The plan says which end connects; the other one accepts. A pair may have one link per scheme. `wrap` may wrap each new
    channel (an emulated link) before anything is sent; both ends do the same.

    `host_address`: as in Seams. `tolerated`: processes whose loss ends only their own links. `on_lost` is called once per incarnation,
    with the reason, and must not wait. From then on messages posted to that incarnation are dropped, and no more of its messages are read.
    """

    def __init__(
        self,
        identity: Identity,
        key: bytes,
        plans: Iterable[LinkPlan],
        transport: Callable[[str], Transport],
        on_message: Callable[[str, Message], None],
        on_pause: Callable[[], None] | None = None,
        wrap: Callable[[LinkPlan, Channel], Channel] = lambda plan, channel: channel,
        on_lost: Callable[[Identity, str], None] | None = None,
        tolerated: frozenset[str] = frozenset(),
        host_address: HostAddress = HostAddress(),
    ) -> None:
        self._identity = identity
        self._key = key
        self._plans = {(plan.peer, plan.scheme): plan for plan in plans}
        self._transport = transport
        self._on_message = on_message
        self._on_pause = on_pause
        self._wrap = wrap
        self._on_lost = on_lost or (lambda peer, reason: None)
        self._tolerated, self._host_address = tolerated, host_address
        self.incarnations = Incarnations()
        self._listeners: dict[str, Listener] = {}
        self._listening = asyncio.Lock()  # a changed graph may need more while this is under way
        self._acceptors: asyncio.TaskGroup | None = None
        self._accepts: list[asyncio.Task[None]] = []
        self._callers = Callers()
        self._links: dict[tuple[str, str], Link] = {}
        self.by_edge: dict[int, Link] = {}  # by id of an edge: the link as in `__getitem__`
        self._lazy: dict[tuple[str, str], LazyChannel] = {}
        self._unplanned: list[Link | Channel] = []  # of earlier plans, to be closed
        self._running: asyncio.TaskGroup | None = None
        self._readers: dict[tuple[str, str], asyncio.Task[None] | None] = {}  # of links that are up
        self._meeting: dict[Identity, list[asyncio.Task[None]]] = {}  # incarnations that join now, and the connects in progress

    def __getitem__(self, key: tuple[str, str]) -> Link:
        """The link to (process, scheme); that of an ended incarnation until its successor's is up. KeyError: none yet."""
        return self._links[key]

    def values(self) -> list[Link]:
        return list(self._links.values())

    def incarnations_of(self, process: str) -> set[str]:
        """The incarnations of a peer that links lead to."""
        return {link.peer.incarnation for (peer, _), link in self._links.items() if peer == process}

    def leftovers(self) -> list[str]:
        """What is left when no message is in flight."""
        return [f"outbox to {link.peer.name}: {link.num_unsent} messages" for link in self._links.values() if link.num_unsent]

    def use(self, plans: Iterable[LinkPlan], tolerated: frozenset[str]) -> None:
        """Plan these links from now on. A peer without a link joins later; one without a plan was dropped. `close_unplanned` follows."""
        before, self._plans, self._tolerated = self._plans, {(plan.peer, plan.scheme): plan for plan in plans}, tolerated
        for key in sorted(before.keys() - self._plans.keys()):
            found = self._links.pop(key, None), self._callers.forget(*key)
            self._unplanned += [each for each in found if each is not None]
            self._lazy.pop(key, None)
        planned = {edge for plan in self._plans.values() for edge in plan.edges}
        self.by_edge = {edge: link for edge, link in self.by_edge.items() if edge in planned}

    async def close_unplanned(self) -> None:
        """Close what earlier plans have left. Idempotent, and may be cancelled: `aclose` closes it then."""
        for each in list(self._unplanned):
            await each.aclose()
            if each in self._unplanned:
                self._unplanned.remove(each)

    async def listen(self) -> dict[str, str]:
        """Listen on each scheme on which a peer connects, now or in a later incarnation; returns scheme -> address. Call it anew when the
        plans have changed."""
        async with self._listening:
            limits: dict[str, list[Limits]] = {}
            for plan in self._plans.values():
                if plan.scheme not in self._listeners and (plan.is_lazy or not plan.connects):
                    limits.setdefault(plan.scheme, []).append(plan.limits)
            for scheme, each in sorted(limits.items()):
                transport = self._transport(scheme)
                address = transport.address_at(self._host_address)
                self._listeners[scheme] = await transport.listen(address, _widest(each), self._key, self._identity)
                if self._acceptors is not None:
                    self._accept_on(self._acceptors, scheme)
        return self.addresses

    @property
    def addresses(self) -> dict[str, str]:
        """Where this worker listens: scheme -> address."""
        return {scheme: listener.address for scheme, listener in self._listeners.items()}

    async def open(self, addresses: Mapping[str, Mapping[str, str]], incarnations: Mapping[str, str]) -> set[str]:
        """Connect and accept until every planned link is up, except lazy ones. `addresses`: process -> scheme -> address.

        `incarnations`: of the peers that are up; a tolerated peer without one joins later. So does one that does not listen yet where the
        graph, which has changed, needs it. Returns these.

        Closes a caller that is not the named incarnation. A tolerated peer that ends meanwhile is not waited for. Raises (in a group)
        LinkLostError when another peer cannot be reached.
        """
        late = {plan.peer for plan in self._plans.values() if plan.peer in incarnations and _lacks(plan, addresses.get(plan.peer, {}))}
        for peer in sorted(late - self._tolerated):
            raise LinkLostError(peer, "it does not listen where a link needs it")
        peers = {peer: Identity(peer, incarnation) for peer, incarnation in incarnations.items() if peer not in late}
        begun = {peer for peer in {plan.peer for plan in self._plans.values()} & peers.keys() if self.incarnations.begin(peers[peer])}
        plans = [plan for plan in self._plans.values() if plan.peer in begun]
        async with self._accepting(), asyncio.TaskGroup() as group:
            for plan in plans:
                identity = peers[plan.peer]
                if plan.is_lazy:
                    self._expect(plan, addresses[plan.peer][plan.scheme], identity)
                    continue
                call = self._connect_first(plan, identity, addresses[plan.peer]) if plan.connects else self._meet(plan, identity, {})
                task = group.create_task(call, name=f"{'connect' if plan.connects else 'wait for'} {plan.peer}")
                self._meeting.setdefault(identity, []).append(task)
        self._meeting.clear()
        return late

    async def run(self) -> None:
        """Read and send on all links until cancelled. Raises (in a group) LinkLostError when a peer goes that is not tolerated.

        Such a peer that ends in order ends its link only.
        """
        async with self._accepting(), asyncio.TaskGroup() as self._running:
            for key in self._links:
                self._read(self._running, key)
            if any(plan.peer in self._tolerated for plan in self._plans.values()):
                try:
                    await asyncio.get_running_loop().create_future()  # never done: a lost peer may join again
                finally:
                    self._running = None  # a peer that joins now is closed with all others

    async def join(self, process: str, incarnation: str, addresses: Mapping[str, str]) -> bool:
        """Link with a new incarnation of a tolerated process, which listens at `addresses` (scheme -> address).

        True: the link is up; it is read from once this task waits. False: that incarnation ended meanwhile, or a repeated call, or it does
        not listen yet where the graph, which has changed, needs it: then another call follows.
        An earlier incarnation that has not ended ends now: `on_lost` is called and its links are closed first.
        """
        identity = Identity(process, incarnation)
        former = self.incarnations.current(process)
        if self.incarnations.has_ended(identity) or former == identity:
            return False
        if former is not None:
            self._lose(former, f"{process} has begun a new incarnation")
        keys = [key for key in self._plans if key[0] == process]
        if any(_lacks(self._plans[key], addresses) for key in keys):
            return False
        self.incarnations.begin(identity)
        self._meeting[identity] = []
        try:
            for link in [self._links[key] for key in keys if key in self._links]:
                await link.aclose()
            async with asyncio.TaskGroup() as group:
                if not self.incarnations.has_ended(identity):
                    self._meeting[identity] += [group.create_task(self._meet(self._plans[key], identity, addresses)) for key in keys]
        except* TransportError as errors:
            self._lose(identity, str(errors.exceptions[0]) or type(errors.exceptions[0]).__name__)
        finally:
            del self._meeting[identity]
        if self.incarnations.has_ended(identity):
            for link in [link for link in self._links.values() if link.peer == identity]:
                await link.aclose()
            return False
        if self._running is not None:
            for key in keys:
                self._read(self._running, key)
        return True

    def drop(self, process: str, incarnation: str) -> bool:
        """End this incarnation as if it were lost now, but without calling `on_lost`; also valid before it joins. True when it was current
        until now."""
        return self._end(Identity(process, incarnation))

    def check(self, process: str, is_waiting: bool) -> None:
        """Call once per PROBE_SECONDS for each peer with a probed link. `is_waiting`: a response of this peer is outstanding."""
        for (peer, _), link in self._links.items():
            if peer == process and isinstance(link, ProbedLink):
                link.check(is_waiting)

    async def aclose(self) -> None:
        """Close every link and listener. Idempotent."""
        async with AsyncExitStack() as stack:
            stack.push_async_callback(self._callers.aclose)
            stack.push_async_callback(self.close_unplanned)
            for listener in self._listeners.values():
                stack.push_async_callback(listener.aclose)
            for link in self._links.values():
                stack.push_async_callback(link.aclose)

    # Ends.

    def _lose(self, identity: Identity, reason: str) -> None:
        if self._end(identity):
            self._on_lost(identity, reason)

    def _end(self, identity: Identity) -> bool:
        """True when the incarnation was current until now."""
        if not self.incarnations.end(identity):
            return False
        for task in self._meeting.get(identity, ()):
            task.cancel()
        for key, link in self._links.items():
            if link.peer == identity:
                link.end()
                reader = self._readers.pop(key, None)
                if reader is not None and reader is not asyncio.current_task():
                    reader.cancel()  # and closes the link
        return True

    def _read(self, tasks: asyncio.TaskGroup, key: tuple[str, str]) -> None:
        link = self._links[key]
        tasks.create_task(self._serve(key, link), name=f"link to {link.peer.name}")

    async def _serve(self, key: tuple[str, str], link: Link) -> None:
        """Read and send until the link is over; then it is closed."""
        identity = link.peer
        try:
            if self.incarnations.has_ended(identity):
                return
            self._readers[key] = asyncio.current_task()  # not earlier: a task cancelled before it begins would close nothing
            try:
                await link.run()
                reason = f"{identity.name} has closed the link"
            except LinkLostError as error:
                if self.incarnations.has_ended(identity):  # dropped meanwhile, so that it may be tolerated no more
                    return
                if identity.name not in self._tolerated:
                    raise
                reason = error.reason
            if identity.name in self._tolerated:
                self._lose(identity, reason)
        finally:
            if self.incarnations.has_ended(identity):
                await link.aclose()

    # Beginnings.

    async def _meet(self, plan: LinkPlan, identity: Identity, addresses: Mapping[str, str]) -> None:
        """Open one link to a new incarnation."""
        if not (plan.connects or plan.is_lazy):
            self._add(plan, self._wrap(plan, await self._callers.wait(identity, plan.scheme)))
            return
        if plan.is_lazy:
            expected = self._expect(plan, addresses[plan.scheme], identity)
            if (channel := self._callers.take(identity, plan.scheme)) is not None:
                expected.opener.offer(self._wrap(plan, channel))
            return
        await self._connect(plan, addresses)
        if (found := self._links[plan.peer, plan.scheme].peer) != identity:
            await self._links[plan.peer, plan.scheme].aclose()
            raise BrokenChannelError(f"{found.name} {found.incarnation} responds at the address of {identity.name} {identity.incarnation}")

    async def _connect_first(self, plan: LinkPlan, identity: Identity, addresses: Mapping[str, str]) -> None:
        try:
            await self._connect(plan, addresses)
        except TransportError as error:
            reason = str(error) or type(error).__name__
            if plan.peer not in self._tolerated:
                raise LinkLostError(plan.peer, reason) from error
            self._lose(identity, reason)

    async def _connect(self, plan: LinkPlan, addresses: Mapping[str, str]) -> None:
        self._add(plan, await connect_with_retries(partial(self._dial, plan, addresses[plan.scheme])))

    async def _dial(self, plan: LinkPlan, address: str) -> Channel:
        return self._wrap(plan, await self._transport(plan.scheme).connect(address, plan.limits, self._key, self._identity))

    def _expect(self, plan: LinkPlan, address: str, peer: Identity) -> LazyChannel:
        """Prepare a lazy link."""
        channel = LazyChannel(peer, plan.scheme, plan.limits, partial(self._dial, plan, address), plan.connects)
        self._lazy[plan.peer, plan.scheme] = channel
        self._add(plan, channel)
        return channel

    @asynccontextmanager
    async def _accepting(self) -> AsyncIterator[None]:
        """Accept channels on every listener meanwhile: of the first links, of lazy links at their first use, and of new incarnations."""
        async with asyncio.TaskGroup() as self._acceptors:
            self._accepts.clear()
            try:
                for scheme in self._listeners:
                    self._accept_on(self._acceptors, scheme)
                yield
            finally:
                self._acceptors = None
            while self._accepts:
                self._accepts.pop().cancel()

    def _accept_on(self, tasks: asyncio.TaskGroup, scheme: str) -> None:
        self._accepts.append(tasks.create_task(self._accept(scheme, self._listeners[scheme], tasks), name=f"accept {scheme}"))

    async def _accept(self, scheme: str, listener: Listener, tasks: asyncio.TaskGroup) -> None:
        while True:
            refused = self._admit(await listener.accept(), scheme)
            if refused is not None:
                tasks.create_task(refused.aclose(), name=f"refuse {refused.peer.name}")  # completes although this task is cancelled

    def _admit(self, channel: Channel, scheme: str) -> Channel | None:
        """Give a channel to its lazy link, or keep it for `_meet`. Returns the channel to close: this one, or the one that it replaces."""
        peer = channel.peer
        plan = self._plans.get((peer.name, scheme))
        if self.incarnations.has_ended(peer):
            return channel
        if plan is None:
            return self._callers.put(channel, scheme)
        link = self._links.get((peer.name, scheme))
        if link is not None and link.peer == peer:
            opener = self._lazy[peer.name, scheme].opener if plan.is_lazy else None
            if opener is None or opener.has_opened:
                return channel
            opener.offer(self._wrap(plan, channel))
            return None
        is_first = link is None and peer == self.incarnations.current(peer.name)
        return self._callers.put(channel, scheme) if is_first or peer.name in self._tolerated else channel

    def _add(self, plan: LinkPlan, channel: Channel) -> None:
        new_link = ProbedLink if plan.carries_kv else Link
        on_message = partial(self._on_message, plan.peer)
        link = self._links[plan.peer, plan.scheme] = new_link(channel, plan.capacity_messages, on_message, self._on_pause)
        self.by_edge.update(dict.fromkeys(plan.edges, link))


def _lacks(plan: LinkPlan, addresses: Mapping[str, str]) -> bool:
    """Whether this link needs an address that is not among those of the peer."""
    return (plan.connects or plan.is_lazy) and plan.scheme not in addresses


def _widest(limits: list[Limits]) -> Limits:
    """Bounds that fit every expected caller: a listener does not know yet which peer connects."""
    return Limits(**{name: max(getattr(each, name) for each in limits) for name in Limits.__struct_fields__})
