"""Links to processes that may die: a loss ends the links of one incarnation only, and a later incarnation is linked like the first."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any

import pytest

from flowrt.actors.link import BadMessageError
from flowrt.actors.link_plan import LinkPlan
from flowrt.actors.links import MAX_ENDED, Incarnations, LinkLostError, Links
from flowrt.costs.links import profile_of
from flowrt.timer import LoopTimer
from flowrt.transports.conformance.connection_checks import KEY, SMALL
from flowrt.transports.conformance.kit import numbered
from flowrt.transports.contract import Channel, Identity
from flowrt.transports.emulation.channel import EmulatedChannel
from flowrt.transports.emulation.nic import Nic
from flowrt.transports.errors import BrokenChannelError, EndOfChannel, HandshakeError
from flowrt.transports.registry import get_transport, unavailable_reason
from flowrt.transports.wire.message import Message

CLIENT = Identity("a", "a1")
SCHEMES = pytest.mark.parametrize("scheme", [scheme for scheme in ("inproc", "shm", "zmq") if unavailable_reason(scheme) is None])
CLIENT_CALLS = pytest.mark.parametrize("calls", [True, False], ids=["client calls", "server calls"])


def plan(peer: str, scheme: str, connects: bool, is_lazy: bool = False) -> LinkPlan:
    return LinkPlan(peer, scheme, SMALL, 64, connects, None, is_lazy)


def steps(messages: list[Message]) -> list[int]:
    return [message.tag.step for message in messages if message.tag]


def first_error(error: BaseException | None) -> BaseException | None:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.002)


class World:
    """A client linked to servers `b` and `c`, each in whatever identity it is, all in one loop."""

    def __init__(self, scheme: str, calls: bool, tolerated: str = "bc", is_lazy: bool = False) -> None:
        self.scheme, self.calls, self._is_lazy = scheme, calls, is_lazy
        self.lost: list[tuple[str, str]] = []
        self.received: list[Message] = []  # by the client
        self.per_incarnation: dict[str, list[Message]] = {}  # by each identity of each server
        self.wrap: Callable[[LinkPlan, Channel], Channel] = lambda plan, channel: channel
        self.servers: dict[str, Links] = {}
        self.tasks: dict[str, asyncio.Task[None]] = {}
        self.stack = AsyncExitStack()
        self.client = Links(
            CLIENT,
            KEY,
            [plan(name, scheme, calls, self._is_lazy) for name in "bc"],
            get_transport,
            lambda _, message: self.received.append(message),
            wrap=lambda plan, channel: self.wrap(plan, channel),
            on_lost=lambda peer, reason: self.lost.append((peer.incarnation, reason)),
            tolerated=frozenset(tolerated),
        )
        self.addresses: dict[str, str] = {}  # the client's
        self.running: asyncio.Task[None]

    async def serve(self, incarnation: str) -> dict[str, str]:
        """A new identity, called by its first letter. It listens, and opens its link as soon as the client does its part."""
        per_incarnation = self.per_incarnation[incarnation] = []
        links = self.servers[incarnation] = Links(
            Identity(incarnation[0], incarnation),
            KEY,
            [plan("a", self.scheme, not self.calls, self._is_lazy)],
            get_transport,
            lambda _, message: per_incarnation.append(message),
            wrap=lambda plan, channel: self.wrap(plan, channel),
        )
        addresses = await links.listen()

        async def live() -> None:
            try:
                await links.open({"a": self.addresses}, {"a": CLIENT.incarnation})
                await links.run()
            finally:
                await links.aclose()  # as a worker that ends

        self.tasks[incarnation] = asyncio.ensure_future(live())
        return addresses

    async def leave(self, incarnation: str) -> None:
        task = self.tasks.pop(incarnation)
        task.cancel()
        await asyncio.wait([task])
        await self.servers[incarnation].aclose()

    async def replace(self, former: str, identity: str) -> None:
        """The server ends, and its next incarnation joins and exchanges messages."""
        await self.leave(former)
        await until(lambda: former in [incarnation for incarnation, _ in self.lost])
        assert await self.client.join("b", identity, await self.serve(identity))
        await self.exchange(identity)

    def post(self, incarnation: str, *numbers: int) -> None:
        """From the client to the process whose identity this was."""
        for number in numbers:
            self.client[incarnation[0], self.scheme].post(numbered(number))

    def respond(self, incarnation: str, *numbers: int) -> None:
        for number in numbers:
            self.servers[incarnation]["a", self.scheme].post(numbered(number))

    async def exchange(self, incarnation: str, count: int = 20) -> None:
        """Both ways, in order, and no other message between."""
        self.per_incarnation[incarnation].clear()
        self.received.clear()
        await until(lambda: ("a", self.scheme) in self.servers[incarnation]._links)
        self.post(incarnation, *range(count))
        self.respond(incarnation, *range(count))
        await until(lambda: len(self.per_incarnation[incarnation]) >= count and len(self.received) >= count)
        assert steps(self.per_incarnation[incarnation]) == steps(self.received) == list(range(count))
        self.per_incarnation[incarnation].clear()
        self.received.clear()


@asynccontextmanager
async def world(scheme: str, calls: bool, **options: object) -> AsyncIterator[World]:
    made = World(scheme, calls, **options)  # type: ignore[arg-type]
    try:
        async with asyncio.timeout(60):
            made.addresses = await made.client.listen()
            addresses = {name: await made.serve(f"{name}1") for name in "bc"}
            await made.client.open(addresses, {"b": "b1", "c": "c1"})
        made.running = asyncio.ensure_future(made.client.run())
        await asyncio.sleep(0)
        yield made
    finally:
        if hasattr(made, "running"):
            made.running.cancel()
            await asyncio.wait([made.running])
        for incarnation in list(made.tasks):
            await made.leave(incarnation)
        await made.client.aclose()


@SCHEMES
@CLIENT_CALLS
async def test_loss_is_reported_once_and_ends_nothing_else(scheme: str, calls: bool, loop_kind: str) -> None:
    async with world(scheme, calls) as w:
        await w.exchange("b1")
        await w.leave("b1")
        await until(lambda: w.lost)
        w.post("b1", *range(200))  # far more than its outbox holds
        await w.exchange("c1", 50)
        assert [incarnation for incarnation, _ in w.lost] == ["b1"]
        w.client.drop("b", "b1")
        assert len(w.lost) == 1


@SCHEMES
@pytest.mark.parametrize(
    ("calls", "is_lazy"), [(True, False), (False, False), (True, True)], ids=["client calls", "server calls", "lazy channels"]
)
async def test_later_incarnations_are_used_like_the_first(scheme: str, calls: bool, is_lazy: bool, loop_kind: str) -> None:
    async with world(scheme, calls, is_lazy=is_lazy) as w:
        await w.exchange("b1")
        for former, identity in (("b1", "b2"), ("b2", "b3")):
            await w.replace(former, identity)
        await w.exchange("c1")
        assert [incarnation for incarnation, _ in w.lost] == ["b1", "b2"]


@SCHEMES
@CLIENT_CALLS
async def test_joining_before_the_old_end_was_noticed(scheme: str, calls: bool, loop_kind: str) -> None:
    async with world(scheme, calls) as w:
        await w.exchange("b1")
        addresses = await w.serve("b2")
        assert await w.client.join("b", "b2", addresses)  # b1 still runs, like a stopped process
        assert [incarnation for incarnation, _ in w.lost] == ["b1"]
        w.respond("b1", 99)  # into nothing
        await w.exchange("b2")
        w.client.drop("b", "b1")  # notified late: of the earlier identity
        await w.exchange("b2")
        assert len(w.lost) == 1


@SCHEMES
async def test_a_link_is_dropped_with_messages_waiting(scheme: str, loop_kind: str) -> None:
    async with world(scheme, True) as w:
        await until(lambda: ("a", w.scheme) in w.servers["b1"]._links)
        link = w.client["b", scheme]
        count = SMALL.capacity_messages + 40
        w.post("b1", *range(count))  # in one go: the server cannot read meanwhile
        assert link._outbox.items
        w.client.drop("b", "b1")
        assert not link._outbox.items
        w.post("b1", *range(count, 5 * count))
        await until(lambda: link._channel.closed)
        await asyncio.wait([w.tasks["b1"]], timeout=60)  # its link ends in order
        per_incarnation = steps(w.per_incarnation["b1"])
        assert per_incarnation == list(range(len(per_incarnation)))
        assert len(per_incarnation) < count
        await w.exchange("c1")
        assert w.lost == []
        assert await w.client.join("b", "b2", await w.serve("b2"))
        await w.exchange("b2")


@pytest.mark.parametrize("scheme", ["inproc", "shm"])
async def test_a_connection_that_breaks_is_a_loss(scheme: str) -> None:
    async with world(f"faulty+{scheme}?drop@3", True) as w:
        for identity in ("b1", "b2", "b3"):
            await until(lambda identity=identity: ("a", w.scheme) in w.servers[identity]._links)
            w.post(identity, *range(10))
            await until(lambda identity=identity: identity in [incarnation for incarnation, _ in w.lost])
            following = f"b{int(identity[1:]) + 1}"
            assert await w.client.join("b", following, await w.serve(following))
        assert [incarnation for incarnation, _ in w.lost] == ["b1", "b2", "b3"]
        for task in w.tasks.values():  # of a server: it ends when it loses a client that is not tolerated
            assert not task.done() or isinstance(task.exception(), BaseExceptionGroup)


@SCHEMES
async def test_a_peer_that_listens_later_than_a_changed_graph_needs_it_joins(scheme: str) -> None:
    """`old` has only connected so far. `new` has to connect to it, and gets no address at first."""
    old, new = Identity("old", "o1"), Identity("new", "n1")
    received: list[Message] = []
    ends = {
        identity: Links(
            identity, KEY, plans, get_transport, lambda _, message: received.append(message), tolerated=frozenset({"old", "new", "first"})
        )
        for identity, plans in ((old, [plan("first", scheme, connects=True)]), (new, [plan("old", scheme, connects=True)]))
    }
    async with AsyncExitStack() as stack:
        for links in ends.values():
            stack.push_async_callback(links.aclose)
            await links.listen()
            assert links.addresses == {}
        assert await ends[old].open({}, {}) == set()
        assert await ends[new].open({"old": {}}, {"old": "o1"}) == {"old"}
        running = [asyncio.create_task(links.run()) for links in ends.values()]
        await asyncio.sleep(0)
        ends[old].use([plan("first", scheme, connects=True), plan("new", scheme, connects=False)], frozenset({"new", "first"}))
        addresses = await ends[old].listen()
        assert [*addresses] == [scheme]
        joined = await asyncio.gather(ends[old].join("new", "n1", {}), ends[new].join("old", "o1", addresses))
        assert joined == [True, True]
        ends[new]["old", scheme].post(numbered(1))
        await until(lambda: steps(received) == [1])
        for task in running:
            task.cancel()
        await asyncio.wait(running)


@SCHEMES
async def test_loss_of_any_other_process_ends_the_run(scheme: str) -> None:
    async with world(f"faulty+{scheme}?drop@3", True, tolerated="c") as w:
        await until(lambda: ("a", w.scheme) in w.servers["b1"]._links)
        w.post("b1", *range(10))
        await asyncio.wait([w.running], timeout=60)
        assert isinstance(lost := first_error(w.running.exception()), LinkLostError)
        assert lost.peer == "b"
        assert w.lost == []


@SCHEMES
@CLIENT_CALLS
async def test_ended_incarnation_does_not_join(scheme: str, calls: bool) -> None:
    async with world(scheme, calls) as w:
        w.client.drop("b", "b2")  # the end is notified before the begin
        assert not await w.client.join("b", "b2", {scheme: w.addresses.get(scheme, "nowhere")})
        await w.exchange("b1")  # and that changes nothing for the identity that counts
        w.client.drop("b", "b1")
        assert await w.client.join("b", "b3", await w.serve("b3"))
        await w.exchange("b3")
        assert w.lost == []


async def test_incarnation_may_end_while_it_joins() -> None:
    async with world("shm", False) as w:  # the server calls, and this one never does
        await w.leave("b1")
        await until(lambda: w.lost)
        joining = asyncio.ensure_future(w.client.join("b", "b2", {}))
        for _ in range(20):
            await asyncio.sleep(0)
        assert not joining.done()
        w.client.drop("b", "b2")
        assert await joining is False
        assert await w.client.join("b", "b3", await w.serve("b3"))
        await w.exchange("b3")
        assert [incarnation for incarnation, _ in w.lost] == ["b1"]


async def test_later_incarnation_may_join_while_one_joins() -> None:
    async with world("shm", False) as w:
        joining = asyncio.ensure_future(w.client.join("b", "b2", {}))
        for _ in range(20):
            await asyncio.sleep(0)
        assert await w.client.join("b", "b3", await w.serve("b3"))
        assert await joining is False
        await w.exchange("b3")
        assert [incarnation for incarnation, _ in w.lost] == ["b1", "b2"]


async def test_later_incarnation_may_have_called_while_an_earlier_one_joins() -> None:
    async with world("shm", False) as w:
        joining = asyncio.ensure_future(w.client.join("b", "b2", {}))
        await w.serve("b3")
        await until(lambda: w.client._callers._here)
        for _ in range(20):
            await asyncio.sleep(0)
        assert await w.client.join("b", "b3", {})  # it is still there
        assert await joining is False
        await w.exchange("b3")


async def test_incarnation_joins_once() -> None:
    async with world("shm", True) as w:
        w.client.drop("b", "b1")
        addresses = await w.serve("b2")
        assert await w.client.join("b", "b2", addresses)
        assert not await w.client.join("b", "b2", addresses)
        await w.exchange("b2")
        assert w.lost == []


@SCHEMES
async def test_one_that_cannot_be_reached_is_lost(scheme: str) -> None:
    async with world(scheme, True) as w:
        await w.leave("b1")
        await until(lambda: w.lost)
        addresses = await w.serve("b2")
        await w.leave("b2")
        assert not await w.client.join("b", "b2", addresses)
        assert [incarnation for incarnation, _ in w.lost] == ["b1", "b2"]


@SCHEMES
async def test_one_that_does_not_listen_yet_joins_once_it_does(scheme: str) -> None:
    """It was started before the change of the graph that needs it to listen."""
    async with world(scheme, True) as w:
        addresses = await w.serve("b2")
        assert not await w.client.join("b", "b2", {})
        assert [incarnation for incarnation, _ in w.lost] == ["b1"]
        assert await w.client.join("b", "b2", addresses)
        await w.exchange("b2")
        assert [incarnation for incarnation, _ in w.lost] == ["b1"]


@SCHEMES
async def test_caller_waits_until_it_is_announced_and_others_are_refused(scheme: str) -> None:
    async with world(scheme, False) as w:
        await w.leave("b1")
        await until(lambda: w.lost)
        await w.serve("b2")
        await until(lambda: w.client._callers._here)  # it has called before its Joined came
        with pytest.raises((EndOfChannel, BrokenChannelError, HandshakeError)):  # that identity is over
            async with await get_transport(scheme).connect(w.addresses[scheme], SMALL, KEY, Identity("b", "b1")) as stranger:
                await stranger.recv()
        assert await w.client.join("b", "b2", {})
        await w.exchange("b2")


async def test_another_process_at_the_address_is_not_the_new_incarnation() -> None:
    async with world("shm", True) as w:
        w.client.drop("b", "b1")
        await w.serve("b2")
        addresses = await w.serve("b9")
        assert not await w.client.join("b", "b3", addresses)
        assert "b9 responds at the address of b b3" in w.lost[-1][1]


async def test_emulated_links_are_lost_and_joined_alike() -> None:
    timer = LoopTimer()
    nics = {name: Nic(profile_of("ub"), timer) for name in ("a", "bc")}
    async with world("shm", True) as w:
        w.wrap = lambda plan, channel: EmulatedChannel(channel, nics["bc" if plan.peer == "a" else "a"], plan.limits)
        for former, identity in (("b1", "b2"), ("b2", "b3")):
            await w.replace(former, identity)
    for nic in nics.values():
        nic.close()


async def test_reader_of_the_new_incarnation_starts_after_join_returns() -> None:
    """A caller that awaits `join` opens its edges before the first message of that incarnation arrives."""
    async with world("shm", True) as w:
        w.client.drop("b", "b1")
        addresses = await w.serve("b2")
        w.servers["b2"]._on_message = lambda peer, message: None
        assert await w.client.join("b", "b2", addresses)
        seen = list(w.received)
        await until(lambda: ("a", w.scheme) in w.servers["b2"]._links)
        w.respond("b2", 1, 2)
        assert seen == []
        await until(lambda: steps(w.received) == [1, 2])


@pytest.mark.parametrize("tolerated", ["bc", ""])
async def test_bad_message_ends_the_link_of_its_sender(tolerated: str) -> None:
    """The receiver refuses a message of b1. Of a process that may die only this incarnation is lost; any other ends `run`, by name."""
    async with world("shm", True, tolerated=tolerated) as w:

        def refuse(peer: str, message: Message) -> None:
            if peer == "b":
                raise BadMessageError("a double response")
            w.received.append(message)

        for link in w.client.values():
            link._on_message = partial(refuse, link.peer.name)
        w.respond("b1", 1)
        if tolerated:
            await until(lambda: w.lost == [("b1", "a double response")])
            w.respond("c1", 2, 3)
            await until(lambda: steps(w.received) == [2, 3])
            assert not w.running.done()
        else:
            await until(w.running.done)
            error = first_error(w.running.exception())
            assert isinstance(error, LinkLostError)
            assert (error.peer, error.reason) == ("b", "a double response")


def test_incarnation_ends_once_and_never_returns() -> None:
    incarnations, one, two = Incarnations(), Identity("b", "b1"), Identity("b", "b2")
    assert incarnations.begin(one)
    assert incarnations.current("b") == one
    assert not incarnations.end(two)  # it had not begun, and never will
    assert not incarnations.begin(two)
    assert incarnations.current("b") == one
    three = Identity("b", "b3")
    assert incarnations.begin(three)
    assert incarnations.has_ended(one)
    assert not incarnations.begin(one)
    assert incarnations.end(three)
    assert not incarnations.end(three)
    assert incarnations.current("b") is None


def test_a_bounded_number_of_ended_incarnations_is_remembered() -> None:
    incarnations = Incarnations()
    identities = [Identity("server", f"{number:04x}") for number in range(MAX_ENDED + 1)]
    for identity in identities:
        incarnations.end(identity)
    assert [incarnations.has_ended(each) for each in (identities[0], identities[1], identities[-1])] == [False, True, True]
    assert not incarnations.begin(identities[1]), "it has ended"


@SCHEMES
@CLIENT_CALLS
@pytest.mark.parametrize("turns", range(5))
async def test_a_peer_that_dies_as_it_leaves_the_plans_ends_its_own_link_only(scheme: str, calls: bool, turns: int) -> None:
    """The reader may have found the end of the link, and not have told it, when the peer is dropped and tolerated no more."""
    async with world(scheme, calls) as w:
        await w.exchange("c1")
        w.client["b", scheme]._channel.abort("b died")
        for _ in range(turns):
            await asyncio.sleep(0)
        w.client.drop("b", "b1")
        w.client.use([plan("c", scheme, calls)], frozenset("c"))
        await w.exchange("c1")
        assert not w.running.done()


async def _in_drawn_order(w: World, scheme: str, calls: bool, draw: random.Random) -> None:
    """Deaths, changes of the plans and joins of `b`, as a worker handles them (membership.py), a few turns of the loop apart. In the end it
    is planned and up."""
    number, is_planned = 1, True
    calls_begun: list[asyncio.Future[Any]] = []
    for action in [*draw.choices(("die", "leave", "join", "turns"), k=draw.randrange(3, 10)), "join"]:
        if action == "die" and ("b", scheme) in w.client._links:
            w.client["b", scheme]._channel.abort("b died")
        elif action == "leave" and is_planned:
            if (current := w.client.incarnations.current("b")) is not None:
                w.client.drop("b", current.incarnation)
            w.client.use([plan("c", scheme, calls)], frozenset("c"))
            is_planned = False
            calls_begun.append(asyncio.ensure_future(w.client.close_unplanned()))
        elif action == "join":
            number += 1
            if not is_planned:
                w.client.use([plan(name, scheme, calls) for name in "bc"], frozenset("bc"))
                is_planned = True
            joining = w.client.join("b", f"b{number}", await w.serve(f"b{number}"))
            calls_begun.append(asyncio.ensure_future(joining))
        for _ in range(draw.randrange(6)):
            await asyncio.sleep(0)
    assert await calls_begun[-1]
    await asyncio.gather(*calls_begun)
    await w.exchange(f"b{number}")
    await w.exchange("c1")
    assert not w.running.done()


@pytest.mark.parametrize("scheme", ["inproc", "shm"])
@CLIENT_CALLS
async def test_deaths_joins_and_changes_in_any_order_end_no_other_link(scheme: str, calls: bool) -> None:
    for seed in range(60):
        async with world(scheme, calls) as w:
            try:
                await _in_drawn_order(w, scheme, calls, random.Random(seed))
            except BaseException as error:
                error.add_note(f"seed {seed}")
                raise
